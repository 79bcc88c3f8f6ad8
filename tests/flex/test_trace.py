"""What a traced function becomes, and what cannot be traced, in our words."""

import gc
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla

from pallas_kernels.masks import Causal, Chunked, KeyLength, SlidingWindow
from xla_attention.flex import FlexTraceError, and_masks, noop_mask, or_masks
from xla_attention.flex.hoist import Sizes, compute, split
from xla_attention.flex.plan import make_plan
from xla_attention.flex.recognise import as_mask
from xla_attention.flex.trace import trace

SIZES = Sizes(batch=2, heads=4, q_len=40, kv_len=50)
TABLE = torch.arange(200.0).reshape(4, 50)
CUBE = torch.arange(100.0).reshape(4, 5, 5)
IDS = torch.arange(40) * 7 % 4


def plan(score_mod=None, mask_mod=None, trained=frozenset()):
    score = score_mod and trace(score_mod, "score_mod")
    return make_plan(score, mask_mod and trace(mask_mod, "mask_mod"), SIZES, trained)


def test_equal_code_is_one_object():
    def make(n):
        return trace(lambda s, b, h, q, kv: s * n + TABLE[h, kv], "score_mod").result

    kept = make(2.0)
    assert make(2.0) is kept
    assert make(2.5) is not kept
    # 1 and 1.0 are equal in Python, and so are 0.0 and -0.0: they are not the same code
    assert (
        trace(lambda s, *_: s / 0.0, "score_mod").result
        is not trace(lambda s, *_: s / -0.0, "score_mod").result
    )


def test_expressions_are_not_kept_forever():
    from xla_attention.flex import expression

    gc.collect()
    before = len(expression._known)
    for n in range(20):
        trace(lambda s, b, h, q, kv, n=n: s + (n + 0.123) * torch.sin(q + kv), "score_mod")
    gc.collect()
    assert len(expression._known) <= before + 5


@pytest.mark.parametrize(
    ("mask_mod", "mask"),
    [
        (lambda b, h, q, kv: q >= kv, Causal()),
        (lambda b, h, q, kv: kv <= q, Causal()),
        (lambda b, h, q, kv: q - kv >= 0, Causal()),
        (lambda b, h, q, kv: q + 10 > kv, Causal(9)),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 7), SlidingWindow(6)),
        (lambda b, h, q, kv: torch.logical_and(kv + 6 >= q, q >= kv), SlidingWindow(6)),
        (lambda b, h, q, kv: (q - kv).abs() <= 5, SlidingWindow(5, 5)),
        (lambda b, h, q, kv: kv < 30, KeyLength(30)),
        (lambda b, h, q, kv: q // 8 == kv // 8, Chunked(8)),
        (and_masks(lambda b, h, q, kv: q >= kv, noop_mask), Causal()),
        (or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 9), Causal() | KeyLength(9)),
        (lambda b, h, q, kv: ~(q < kv), ~(SlidingWindow(-1, None))),
    ],
)
def test_known_masks_become_the_cores(mask_mod, mask):
    assert as_mask(trace(mask_mod, "mask_mod").result) == mask


def test_known_scores_become_the_cores():
    capped = plan(lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0))
    assert (capped.softcap, capped.score) == (20.0, None)
    slopes = torch.rand(4)
    for score_mod in (
        lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(),
        lambda s, b, h, q, kv: s + (kv - q) * slopes[h],
        lambda s, b, h, q, kv: s + torch.exp2(-((h + 1) * 8.0 / 4)) * (kv - q),
    ):
        found = plan(score_mod, lambda b, h, q, kv: q >= kv)
        assert found.score is None
        assert found.names() == ["alibi_slopes"]
    # A signed distance is ALiBi where no key comes after its query; slopes that learn need a gradient.
    assert plan(lambda s, b, h, q, kv: s + (kv - q) * slopes[h]).score is not None
    learned = plan(lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(), trained=frozenset([0]))
    assert learned.names() == ["score"]


def test_documents_and_lengths_become_operands():
    ids, lengths = torch.arange(50) // 9, torch.tensor([20, 40])

    def mask_mod(b, h, q, kv):
        return (ids[q] == ids[kv]) & (q >= kv) & (kv < lengths[b]) & (q < lengths[b])

    found = plan(mask_mod=mask_mod)
    assert found.mask == Causal()
    assert found.score is None
    assert set(found.names()) == {"q_segment_ids", "kv_segment_ids", "q_lens", "kv_lens"}


@pytest.mark.parametrize(
    ("score_mod", "alongs"),
    [
        (lambda s, b, h, q, kv: s * TABLE[h, 3], ["head"]),
        (lambda s, b, h, q, kv: s + TABLE[h, q] * TABLE[h, kv], ["query", "key"]),
        (lambda s, b, h, q, kv: s + TABLE[h, q - kv], ["distance"]),
        (lambda s, b, h, q, kv: s + TABLE[h, (2 * (q - kv)).clamp(-3, 3) + 9] * (q - kv), ["distance"]),
        (lambda s, b, h, q, kv: s + TABLE[h, (q - kv).abs() + torch.where(kv > q, 5, 0)], ["distance"]),
        (lambda s, b, h, q, kv: s + TABLE[h, torch.where(kv > 2 * q, 5, 0)], ["pair"]),
        (lambda s, b, h, q, kv: s + TABLE[b, (q + kv) // 4], ["pair"]),
        (lambda s, b, h, q, kv: s + TABLE[b].sum() * q, ["query"]),
        (lambda s, b, h, q, kv: s + torch.acos(q / 99), ["query"]),
        (lambda s, b, h, q, kv: s * q.sin() + kv, []),
    ],
)
def test_captured_parts_vary_along_no_more_than_they_depend_on(score_mod, alongs):
    score, hoisted = split(trace(score_mod, "score_mod").result, "score_mod")
    assert [h.along for h in hoisted] == alongs == list(score.operands)


@pytest.mark.parametrize(
    "index",
    [
        lambda b, h, q, kv: TABLE[IDS[q], IDS[kv] + 40],
        lambda b, h, q, kv: TABLE[IDS[kv], -1 - IDS[q]],
        lambda b, h, q, kv: CUBE[IDS[q] // 3, IDS[q], IDS[kv]],
        lambda b, h, q, kv: CUBE[h, IDS[q], IDS[kv]],
    ],
)
def test_indices_of_queries_and_of_keys_are_never_written_down_in_pairs(index):
    """XLA would have them so, two integers a pair: at 8192 x 8192, 32 GiB as a TPU pads them."""
    traced = trace(lambda s, *at: s * index(*at), "score_mod")
    _, (hoisted,) = split(traced.result, "score_mod")
    captured = [jnp.asarray(x.numpy()) for x in traced.captured]
    learned = next(n for n, x in enumerate(captured) if x.dtype == jnp.float32)
    sizes = Sizes(1, 2, 9, 13)

    def of_table(table):
        return compute(hoisted, (*captured[:learned], table, *captured[learned + 1 :]), sizes)

    def there_and_back(table):
        value, pull = jax.vjp(of_table, table)
        return value, pull(value)

    every = torch.meshgrid(*map(torch.arange, (1, 2, 9, 13)), indexing="ij")
    value, _ = there_and_back(captured[learned])
    np.testing.assert_array_equal(np.broadcast_to(value, every[0].shape), index(*every))
    program = jax.jit(there_and_back).lower(captured[learned]).as_text()
    integers = [
        math.prod(map(int, shape.split("x"))) for shape in re.findall(r"tensor<([\dx]+)xi\d+>", program)
    ]
    assert integers and max(integers) < 9 * 13


def _python_if(s, b, h, q, kv):
    return s if q > kv else s * 2


def _python_while(s, b, h, q, kv):
    while s > 1:
        s = s / 2
    return s


def _augmented(s, b, h, q, kv):
    s += TABLE[h, kv]
    s *= 2.0
    return s


def test_a_functions_own_tensors_may_change_in_place():
    def plain(s, b, h, q, kv):
        return (s + TABLE[h, kv]) * 2.0

    assert trace(_augmented, "score_mod").result is trace(plain, "score_mod").result


def _in_place(s, b, h, q, kv):
    TABLE.add_(1)
    return s


def _in_place_of_a_view(s, b, h, q, kv):
    TABLE[0].add_(1)
    return s


def _in_place_at(s, b, h, q, kv):
    TABLE[h, q] = 0
    return s + TABLE[h, q]


BAD = {
    "if": (_python_if, "torch.where"),
    "while": (_python_while, "torch.where"),
    "and": (lambda s, b, h, q, kv: torch.where(q > kv and h > 1, s, 0.0), "&, |, ~"),
    "item": (lambda s, b, h, q, kv: s + q.item(), r"\.item\(\)"),
    "range": (lambda s, b, h, q, kv: s + sum(range(int(q))), r"int\(\)"),
    "random": (lambda s, b, h, q, kv: s + torch.rand(()), "random"),
    "dropout": (lambda s, b, h, q, kv: torch.nn.functional.dropout(s, 0.1), "random"),
    "in place": (_in_place, "in place"),
    "in place of a view": (_in_place_of_a_view, "in place"),
    "in place at": (_in_place_at, "in place"),
    "returns None": (lambda s, b, h, q, kv: None, "returns NoneType"),
    "returns a number": (lambda s, b, h, q, kv: 1.0, "returns float"),
    "returns a vector": (lambda s, b, h, q, kv: s + TABLE[h], r"shape \(50,\)"),
    "returns an integer": (lambda s, b, h, q, kv: q - kv, "returns torch.int32"),
    "returns a condition": (lambda s, b, h, q, kv: q > kv, "use mask_mod"),
    "too few arguments": (lambda s, b, h: s, "score, b, h, q, kv"),
    "unknown operator": (lambda s, b, h, q, kv: torch.special.bessel_j0(s), "no form on TPU"),
    "outside only": (lambda s, b, h, q, kv: torch.acos(s), "depends on the score"),
    "complex": (lambda s, b, h, q, kv: torch.complex(s, s).abs(), "real numbers"),
    "made inside": (lambda s, b, h, q, kv: s + torch.tensor([1.0, 2.0])[h], "make it outside"),
    "own error": (lambda s, b, h, q, kv: s + undefined_name, "undefined_name"),  # noqa: F821
}


@pytest.mark.parametrize("name", BAD)
def test_bad_score_mods(name):
    score_mod, says = BAD[name]
    before = TABLE.clone()
    with pytest.raises(FlexTraceError, match=says) as caught:
        plan(score_mod)
    assert "score_mod" in str(caught.value)
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize(
    ("mask_mod", "says"),
    [
        (lambda b, h, q, kv: q - kv, "torch.bool"),
        (lambda b, h, q, kv: bool(q > kv), "torch.where"),
        (lambda b, h, q, kv: q > kv if h > 0 else q < kv, "torch.where"),
        (lambda b, h, q, kv: torch.rand(()) > 0.5, "random"),
        (lambda b, h, q, kv: TABLE[h] > 0, r"shape \(50,\)"),
        (lambda s, b, h, q, kv: q > kv, "b, h, q, kv"),
    ],
)
def test_bad_mask_mods(mask_mod, says):
    with pytest.raises(FlexTraceError, match=says):
        plan(mask_mod=mask_mod)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="score_mod: got int"):
        trace(3, "score_mod")


def test_captured_xla_tensors_keep_their_identity():
    table = torch.ones(4, 50, device=torch_xla.device(), requires_grad=True)
    traced = trace(lambda s, b, h, q, kv: s + table[h, kv] * table[h, q], "score_mod")
    assert [x is table for x in traced.captured] == [True]
