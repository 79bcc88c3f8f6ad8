"""Attention of sharded tensors beside the same on the CPU in eager torch, on eight virtual devices.

A program of its own, since SPMD is a setting of a whole process: prints one JSON object, for each case the
largest errors, the collectives of its forward and backward together, and how the result lies.
"""

import collections
import glob
import json
import os
import re
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from xla_attention import (
    AttentionPlacement,
    create_block_mask,
    flash_attention,
    flex_attention,
    from_zigzag,
    merge_heads,
    split_heads,
    to_zigzag,
    use_attention_placement,
)

BATCH, LENGTH, DIM = 4, 64, 16
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 4, (BATCH, LENGTH), generator=GENERATOR).sort(-1).values
CASES = {
    "batch and heads": {"axes": {"data": 2, "tensor": 4}, "kv_heads": 4},
    "batch over two axes": {"axes": {"data": 2, "fsdp": 2, "tensor": 2}, "kv_heads": 2},
    "two key heads on four shards": {"axes": {"data": 2, "tensor": 4}},
    "everything": {
        "axes": {"data": 2, "tensor": 4},
        "arguments": ("bias", "sinks", "alibi_slopes", "segment_ids", "kv_lens"),
    },
    "ring": {
        "axes": {"data": 2, "context": 4},
        "layout": "zigzag",
        "arguments": ("segment_ids",),
        "devices": (0, 4, 2, 6, 1, 3, 5, 7),
    },
    "exchange of heads": {
        "axes": {"data": 2, "tensor": 2, "context": 2},
        "method": "all_to_all",
        "arguments": ("segment_ids",),
        "devices": (7, 6, 5, 4, 3, 2, 1, 0),
    },
    "flex": {"axes": {"data": 2, "tensor": 4}, "flex": True},
    "flex, exchange of heads": {"axes": {"data": 4, "context": 2}, "method": "all_to_all", "flex": True},
}


def make(kv_heads, arguments):
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q, k, v, w = (normal(BATCH, n, LENGTH, DIM) for n in (4, kv_heads, kv_heads, 4))
    every = {
        "bias": normal(1, 4, LENGTH, LENGTH),
        "sinks": normal(4),
        "alibi_slopes": torch.rand(4, generator=generator),
        "segment_ids": IDS,
        "kv_lens": torch.tensor([64, 50, 33, 7]),
        "table": normal(2 * LENGTH),
    }
    return (q, k, v, w), {name: every[name] for name in arguments}


def attention(q, k, v, table=None, **arguments):
    if table is None:
        return flash_attention(q, k, v, is_causal=True, **arguments)
    ids = IDS.to(q.device)[0]
    block_mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, LENGTH, LENGTH, device=q.device
    )

    def score(s, b, h, i, j):
        return s * (h + 1) + table[i - j + LENGTH] * (b + 1)

    return flex_attention(q, k, v, score, block_mask, enable_gqa=True)


def run(device, tensors, arguments, place=lambda *_: None):
    q, k, v, w = (x.clone().to(device) for x in tensors)
    arguments = {name: x.clone().to(device) for name, x in arguments.items()}
    for x, of_query in ((q, True), (k, False), (v, False), (w, True)):
        place(x, of_query)
    learned = [q, k, v, *(x for name, x in arguments.items() if name in ("bias", "sinks", "table"))]
    for x in learned:
        x.requires_grad_()
    forget_dumps()
    o = attention(q, k, v, **arguments)
    (o * w).sum().backward()
    return [o, *(x.grad for x in learned)]


def case(axes, kv_heads=2, arguments=(), devices=range(8), flex=False, method="ring", layout="contiguous"):
    mesh = xs.Mesh(np.array(devices), tuple(axes.values()), tuple(axes))
    placement = AttentionPlacement.of_mesh(mesh, method=method, layout=layout)
    tensors, arguments = make(kv_heads, arguments if not flex else ("table",))
    want = run("cpu", tensors, arguments)

    shards = axes.get("context", 1)
    if layout == "zigzag":
        tensors = [to_zigzag(x, shards, 2) for x in tensors]
        arguments = {name: to_zigzag(x, shards) for name, x in arguments.items()}

    def place(x, of_query):
        heads = placement.heads if of_query or kv_heads % placement.size(placement.heads) == 0 else None
        xs.mark_sharding(x, mesh, (placement.batch, heads, placement.sequence, None))

    with use_attention_placement(placement):
        got = run(torch_xla.device(), tensors, arguments, place)
    torch_xla.sync()
    lies = torch_xla._XLAC._get_xla_sharding_spec(got[0])
    counted = collectives()
    got = [x.detach().cpu() for x in got]
    if layout == "zigzag":
        got = [from_zigzag(x, shards, 2) for x in got]
    errors = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(got, want)]
    return {"errors": errors, "collectives": counted, "sharding": lies}


def by_arguments():
    """Placed by the global mesh, by partition_spec, and not at all: equal results, and collectives."""
    mesh = xs.Mesh(np.arange(8), (2, 4), ("data", "tensor"))
    xs.set_global_mesh(mesh)
    tensors, _ = make(4, ())
    spec = ("data", "tensor", None, None)

    def call(**how):
        q, k, v = (x.to(torch_xla.device()) for x in tensors[:3])
        for x in (q, k, v):
            xs.mark_sharding(x, mesh, spec)
        forget_dumps()
        o = flash_attention(q, k, v, **how)
        torch_xla.sync()
        counted = collectives()
        return o.cpu(), counted

    whole = call()
    explicit = call(partition_spec=spec)
    with use_attention_placement(None):
        unplaced = call()
    refusal = "none"
    try:
        with use_attention_placement(AttentionPlacement((("tensor", 4),), heads="tensor")):
            call()
    except ValueError as error:
        refusal = str(error)
    return {
        "another mesh": refusal,
        "equal": torch.equal(whole[0], explicit[0]) and torch.allclose(whole[0], unplaced[0], atol=1e-5),
        "collectives": [x[1] for x in (whole, explicit, unplaced)],
    }


def heads():
    """Heads of 64, turned by angles of each token, split and merged where they lie."""
    mesh = xs.Mesh(np.arange(8), (2, 2, 2), ("data", "tensor", "context"))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, LENGTH, 256, generator=generator)
    angle = torch.rand(BATCH, 1, LENGTH, 32, generator=generator) * 7

    def there_and_back(x, cos, sin):
        y = split_heads(x, 64, cos, sin)
        o = merge_heads(y.square())
        return y, o, torch.autograd.grad(o.square().sum(), x)[0]

    want = there_and_back(x.requires_grad_(), angle.cos(), angle.sin())
    given = [t.detach().to(torch_xla.device()) for t in (x, angle.cos(), angle.sin())]
    for t, spec in zip(given, (("data", "context", "tensor"), *[("data", None, "context", None)] * 2)):
        xs.mark_sharding(t, mesh, spec)
    forget_dumps()
    with use_attention_placement(AttentionPlacement.of_mesh(mesh)):
        got = there_and_back(given[0].requires_grad_(), *given[1:])
    torch_xla.sync()
    lies, counted = [torch_xla._XLAC._get_xla_sharding_spec(t) for t in got[:2]], collectives()
    errors = [((a.cpu() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want)]
    return {"errors": errors, "collectives": counted, "sharding": lies}


def forget_dumps():
    torch_xla.sync()
    for file in glob.glob(f"{DUMPS}/*"):
        os.remove(file)


def collectives():
    """Of the programs that were compiled since ``forget_dumps``."""
    kinds = r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    found = collections.Counter()
    for file in glob.glob(f"{DUMPS}/*after_optimizations.txt"):
        with open(file) as text:
            found.update(re.findall(kinds, text.read()))
    return found


if __name__ == "__main__":
    DUMPS = sys.argv[1]
    xr.use_spmd()
    torch_xla.device()  # before the first backward on the CPU
    found = {name: case(**how) for name, how in CASES.items()}
    print(json.dumps(found | {"heads": heads(), "by arguments": by_arguments()}))
