"""Attention of a sharded sequence beside its definition in float64, on eight virtual devices.

A program of its own, since JAX counts its devices once: prints one JSON object, each case's largest errors.
"""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from operand_cases import by_definition, make

from pallas_kernels.context_parallel import (
    Context,
    check_context,
    context_backward,
    context_forward,
    context_operand_gradients,
    head_groups,
    natural_order,
    zigzag_order,
)
from pallas_kernels.flash_attention import AttentionSpec
from pallas_kernels.hardware import INTERPRETER
from pallas_kernels.masks import Causal, Full, PerHead, SlidingWindow, prefix_lm

CAUSAL = Causal()
CASES = {
    "ring, 2 shards": {"shards": 2},
    "ring, 2 shards, segments": {"shards": 2, "wanted": ("segments",)},
    "ring, 4 shards, segments, sinks": {"shards": 4, "wanted": ("segments", "sinks")},
    "ring, 8 shards": {"shards": 8},
    "ring, 8 shards, segments, lengths": {"shards": 8, "wanted": ("segments", "q_lens", "kv_lens")},
    "ring, contiguous, segments": {"shards": 4, "layout": "contiguous", "wanted": ("shuffled segments",)},
    "ring, a window of two shards": {"shards": 8, "layout": "contiguous", "mask": SlidingWindow(17)},
    "ring, all pairs": {"shards": 4, "mask": Full(), "wanted": ("segments",)},
    "ring, twice as many keys": {"shards": 2, "mask": Full(), "kv_length": 128},
    "ring, a head at a time": {"shards": 4, "wanted": ("segments", "sinks"), "groups": 2},
    "exchange, 2 shards": {"shards": 2, "method": "all_to_all", "layout": "contiguous"},
    "exchange, 4 shards, zig-zag": {
        "shards": 4,
        "method": "all_to_all",
        "wanted": ("segments", "alibi", "sinks", "kv_lens"),
        "kv_heads": 2,
    },
    "exchange, 8 shards, any mask, bias": {
        "shards": 8,
        "method": "all_to_all",
        "layout": "contiguous",
        "mask": prefix_lm(20),
        "wanted": ("segments", "bias"),
        "heads": 8,
        "kv_heads": 1,
    },
}
REFUSED = {
    "length": {"shards": 8, "length": 72},
    "as many keys as queries": {"shards": 2, "kv_length": 128},
    "bias": {"shards": 2, "wanted": ("bias",)},
    "alibi_slopes": {"shards": 2, "wanted": ("alibi",)},
    "layout='contiguous'": {"shards": 2, "mask": SlidingWindow(9)},
    "distance": {"shards": 2, "layout": "contiguous", "mask": prefix_lm(9)},
    "masks of heads": {"shards": 2, "mask": PerHead([Full(), Causal()] * 2)},
    "4 heads to exchange": {"shards": 8, "method": "all_to_all"},
}


def inputs(heads=4, kv_heads=2, length=64, kv_length=None, wanted=(), mask=CAUSAL):
    kv_length = kv_length or length
    shape = (2, heads, kv_heads, length, kv_length, 16)
    case = types.SimpleNamespace(shape=shape, spec=AttentionSpec(scale=0.25, mask=mask))
    rng = np.random.default_rng(0)
    queries, keys = (2, heads, length, 16), (2, kv_heads, kv_length, 16)
    shapes = [queries, keys, keys, queries, queries[:3]]
    tensors = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return case, tensors, make(case, wanted)


def reorder(x, context, axis, back=False):
    if x is None or context.layout == "contiguous":
        return x
    order = (natural_order if back else zigzag_order)(context.shards)
    chunks = np.split(np.asarray(x), len(order), axis)
    return np.concatenate([chunks[n] for n in order], axis)


def run(context, tensors, operands, spec):
    """o, lse, dq, dk, dv and the gradients by bias and sinks, of the whole."""
    ring = context.method == "ring"

    def local(q, k, v, do, dlse, operands):
        where = {"context": context, "spec": spec}
        o, lse = context_forward(q, k, v, operands, hardware=INTERPRETER, **where)
        saved = (q, k, v, o, lse, do, dlse)
        gradients = context_backward(*saved, operands=operands, hardware=INTERPRETER, **where)
        dbias, dsinks, _ = context_operand_gradients(*saved, operands=operands, wanted=(), **where)
        if ring and dsinks is not None:
            dsinks = jax.lax.psum(dsinks, context.axis)
        return o, lse, *gradients, dbias, dsinks

    sequence, by_head = P(None, None, "x"), P() if ring else P("x")
    ids = P(None, "x") if ring else P()
    bias = P(None, "x") if operands.bias is not None and operands.bias.shape[1] > 1 else P()
    of_operands = type(operands)(ids, ids, bias, by_head, by_head, P(), P(), ())
    mesh = jax.make_mesh((context.shards,), ("x",))
    fn = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*[sequence] * 5, of_operands),
        out_specs=(*[sequence] * 5, bias, by_head),
        check_vma=False,
    )
    ids = [reorder(x, context, 1) for x in operands[:2]]
    tensors = [reorder(x, context, 2) for x in tensors]
    *found, dbias, dsinks = jax.jit(fn)(*tensors, type(operands)(*ids, *operands[2:]))
    return [*(reorder(x, context, 2, back=True) for x in found), dbias, dsinks]


def errors(shards, method="ring", layout="zigzag", groups=1, **how):
    case, tensors, operands = inputs(**how)
    context = Context("x", shards, method, layout)
    check_context(tensors[0].shape, tensors[1].shape, operands, case.spec, context)
    limit = head_groups.PARTIAL_BYTES
    if groups > 1:
        head_groups.PARTIAL_BYTES = 1
    got = run(context, tensors, operands, case.spec)
    head_groups.PARTIAL_BYTES = limit
    q, k, v, do, dlse = tensors
    found = []
    for x, y in zip(got, by_definition(case, q, k, v, do, dlse, operands)):
        if y is not None:
            assert np.array_equal(np.isinf(x), np.isinf(y))
            x, y = (np.nan_to_num(z, neginf=0) for z in (x, y))
            found.append(float(np.abs(x - y).max() / np.abs(y).max()))
    return found


def refusal(shards, method="ring", layout="zigzag", **how):
    case, tensors, operands = inputs(**how)
    try:
        check_context(
            tensors[0].shape, tensors[1].shape, operands, case.spec, Context("x", shards, method, layout)
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def bfloat16_errors():
    """Of o in bfloat16: of the ring over eight shards, and of one device."""
    case, (q, k, v, do, dlse), operands = inputs()
    want = by_definition(case, q, k, v, do, dlse, operands)[0]
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do)]
    return [
        float(np.abs(np.asarray(run(Context("x", n), [*narrow, dlse], operands, case.spec)[0]) - want).max())
        for n in (8, 1)
    ]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "errors": {name: errors(**case) for name, case in CASES.items()},
                "refused": {name: refusal(**case) for name, case in REFUSED.items()},
                "bfloat16": bfloat16_errors(),
            }
        )
    )
