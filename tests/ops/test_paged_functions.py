"""score_mod and mask_mod over pages, in the kernel, against torch's own flex_attention sequence by sequence.

Limit: float32 in another order of summation, 5e-6 of the largest value.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch_xla

sys.path.insert(0, str(Path(__file__).parents[1] / "pallas_kernels"))
from paged_cases import Case, relative

from xla_attention.flex import FlexTraceError
from xla_attention.flex.paged import make_paged_plan
from xla_attention.flex.trace import trace
from xla_attention.ops import paged

HEADS, CONTEXT = 4, 160
# A sequence of two blocks of queries; one of few keys, one of none, and one that is dead.
CASE = Case(((1, 150), (9, 140), (3, 4), (2, 0)), heads=HEADS, page_size=32, pages_per_seq=5)


def functions(device):
    """``(score_mod, mask_mod)`` by name, what they capture on ``device``."""
    generator = torch.Generator().manual_seed(0)

    def captured(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    slopes, table, gate, bias = (
        captured(HEADS),
        captured(HEADS, 32),
        captured(HEADS),
        captured(CONTEXT, CONTEXT),
    )
    prefix = torch.tensor([40, 3, 2, 0, 1]).to(device)
    documents = (torch.arange(CONTEXT) // 48).repeat(5, 1).to(device)
    return {
        "alibi": (lambda s, b, h, q, kv: s - slopes[h].abs() * (q - kv), None),
        "t5": (lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(0, 31)], None),
        "gated": (lambda s, b, h, q, kv: s * torch.sigmoid(gate[h]) + bias[q, kv], None),
        "softcap": (lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0), None),
        "documents": (None, lambda b, h, q, kv: documents[b, q] == documents[b, kv]),
        "prefix and window": (None, lambda b, h, q, kv: (kv < prefix[b]) | (q - kv < 20)),
        "window": (None, lambda b, h, q, kv: (kv <= q) & (q - kv < 20)),
        "by head": (
            lambda s, b, h, q, kv: torch.where(h % 2 == 0, s, s + 0.01 * kv),
            lambda b, h, q, kv: (q - kv) % (h + 1) == 0,
        ),
    }


def inputs():
    *arrays, operands = CASE.inputs()
    q, pages, *lens = (torch.from_numpy(x.copy()) for x in arrays)
    return [q, pages.nan_to_num(), *lens]


@pytest.mark.parametrize("name", functions("cpu"))
def test_functions_over_pages(name):
    score_mod, mask_mod = functions("cpu")[name]
    want = paged.ragged_paged_attention(*inputs(), score_mod=score_mod, mask_mod=mask_mod)
    assert relative(want, paged.ragged_paged_attention(*inputs())) > 0.01
    device = torch_xla.device()
    score_mod, mask_mod = functions(device)[name]
    on_xla = [x.to(device) for x in inputs()]
    got = paged.ragged_paged_attention(*on_xla, score_mod=score_mod, mask_mod=mask_mod)
    assert relative(got.cpu(), want) < 5e-6


def test_with_options_of_the_kernel():
    sinks = torch.linspace(-1, 1, HEADS)
    options = {"softcap": 3.0, "sliding_window": 50, "scale": 0.3}
    mask_mod = functions("cpu")["documents"][1]
    want = paged.ragged_paged_attention(*inputs(), sinks=sinks, mask_mod=mask_mod, **options)
    device = torch_xla.device()
    got = paged.ragged_paged_attention(
        *(x.to(device) for x in inputs()), sinks=sinks.to(device), mask_mod=functions(device)["documents"][1],
        **options,
    )  # fmt: skip
    assert relative(got.cpu(), want) < 5e-6
    # Without a function the definition is another text: both say the same of what is always seen.
    plain = paged.ragged_paged_attention(*inputs(), sinks=sinks, **options)
    same = paged.ragged_paged_attention(
        *inputs(), sinks=sinks, mask_mod=lambda b, h, q, kv: q >= 0, **options
    )
    assert relative(same, plain) < 5e-6


def test_decode_and_multi_are_the_ragged_ones():
    torch.manual_seed(0)
    q, pages, table = torch.randn(2, 3, HEADS, 16), torch.randn(11, 32, 64), torch.randperm(10).reshape(2, 5)
    kv_lens = torch.tensor([150, 7])
    device = torch_xla.device()
    for fn, queries in ((paged.multi_queries_paged_attention, q), (paged.paged_attention, q[:, 0])):
        given = (queries, pages, kv_lens, table)
        want = fn(*given, score_mod=functions("cpu")["t5"][0])
        got = fn(*(x.to(device) for x in given), score_mod=functions(device)["t5"][0])
        assert relative(got.cpu(), want) < 5e-6


def test_a_changed_closure_is_seen():
    device, slope = torch_xla.device(), 0.1
    on_xla = [x.to(device) for x in inputs()]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slope * (q_idx - kv_idx)

    first = paged.ragged_paged_attention(*on_xla, score_mod=score_mod).cpu()
    slope = 1.0
    second = paged.ragged_paged_attention(*on_xla, score_mod=score_mod).cpu()
    assert relative(second, first) > 0.01
    assert relative(second, paged.ragged_paged_attention(*inputs(), score_mod=score_mod)) < 5e-6


def test_what_the_kernel_knows_is_recognised():
    every = {
        name: [None if fn is None else trace(fn, kind) for fn, kind in zip(pair, ("score_mod", "mask_mod"))]
        for name, pair in functions("cpu").items()
    }
    plan = make_paged_plan(*every["window"])
    assert (plan.sliding_window, plan.score) == (20, None)
    plan = make_paged_plan(*every["softcap"])
    assert (plan.softcap, plan.score) == (2.0, None)
    assert make_paged_plan(*every["t5"]).score.operands == ("distance",)
    assert make_paged_plan(*every["alibi"]).score.operands == ("head",)
    assert make_paged_plan(*every["documents"]).score.operands == ("query", "key")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"softcap": 2.0, "score_mod": lambda s, b, h, q, kv: s}, ValueError, "softcap: got one beside"),
        ({"score_mod": 3}, TypeError, "score_mod: got int"),
        ({"mask_mod": lambda b, h, q, kv: q + kv}, FlexTraceError, "needs torch.bool"),
        ({"score_mod": lambda s, b, h, q, kv: s if q > kv else s}, FlexTraceError, "torch.where"),
    ],
)
def test_bad_functions_are_named(changes, error, message):
    device = torch_xla.device()
    with pytest.raises(error, match=message):
        paged.ragged_paged_attention(*(x.to(device) for x in inputs()), **changes)
