"""The paged operators on XLA against the definition, in which the plain torch path is written too."""

import sys
from pathlib import Path

import pytest
import torch
import torch_xla

sys.path.insert(0, str(Path(__file__).parents[1] / "pallas_kernels"))
from paged_cases import Case, relative

from xla_attention.ops import paged

MIXED = Case(((1, 5), (4, 64), (17, 20), (0, 9)), sinks=True, softcap=3.0, sliding_window=6)


def tensors(case):
    *arrays, operands = case.inputs()
    return [torch.from_numpy(x.copy()) for x in arrays], torch.from_numpy(operands.sinks)


def test_ragged_on_xla_and_in_torch():
    given, sinks = tensors(MIXED)
    options = {"softcap": 3.0, "sliding_window": 6}
    plain = paged.ragged_paged_attention(*given, sinks=sinks, **options)
    assert relative(plain, MIXED.expected()) < 1e-6
    on_xla = [x.to("xla") for x in given]
    got = paged.ragged_paged_attention(*on_xla, sinks=sinks.to("xla"), **options)
    assert relative(got.cpu(), plain) < 2e-6  # float32, another order of summation


def test_multi_and_decode_are_the_ragged_ones():
    torch.manual_seed(0)
    pages = torch.randn(9, 8, 2 * 2 * 16)
    table = torch.randperm(8).reshape(2, 4)
    kv_lens, q_lens = torch.tensor([30, 7]), torch.tensor([2, 3])
    q = torch.randn(2, 3, 4, 16)
    multi = paged.multi_queries_paged_attention(q, pages, kv_lens, table, q_lens)
    assert (multi[0, 2] == 0).all()
    device = torch_xla.device()
    got = paged.multi_queries_paged_attention(*(x.to(device) for x in (q, pages, kv_lens, table, q_lens)))
    assert relative(got.cpu(), multi) < 2e-6
    decode = paged.paged_attention(q[:, 1], pages, kv_lens, table)
    got = paged.paged_attention(*(x.to(device) for x in (q[:, 1], pages, kv_lens, table)))
    assert relative(got.cpu(), decode) < 2e-6


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_update_in_place(device):
    torch.manual_seed(0)
    before = torch.randn(4, 8, 2 * 2 * 16)
    k, v = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    slots = torch.tensor([9, 3, -1, 9, 32, 31])
    pages = before.clone().to(device)
    if device == "xla":
        torch_xla.sync(wait=True)
        buffer = torch_xla._XLAC._unsafe_buffer_pointer(pages)
    assert paged.update_kv_pages(pages, *(x.to(device) for x in (k, v, slots))) is None
    if device == "xla":  # its buffer is given to the program, and comes back
        torch_xla.sync(wait=True)
        assert torch_xla._XLAC._unsafe_buffer_pointer(pages) == buffer
    want = before.clone().view(32, -1)
    for n in (1, 3, 5):  # 9 is written twice, and two are outside
        want[slots[n]] = torch.cat([k[n].flatten(), v[n].flatten()])
    assert torch.equal(pages.cpu(), want.view(before.shape))


@pytest.mark.parametrize("by_page", [False, True])
def test_pages_of_8_bits_and_their_error(by_page):
    """int8 with the scale of the largest value: half a step is 1/254 of it, float8_e4m3fn keeps 4 bits."""
    torch.manual_seed(0)
    k, v = torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    table, kv_lens, q = torch.tensor([[1]]), torch.tensor([20]), torch.randn(1, 4, 16)
    slots = torch.arange(20) + 32
    exact = torch.zeros(2, 32, 64)
    paged.update_kv_pages(exact, k, v, slots)
    want = paged.paged_attention(q, exact, kv_lens, table)
    for dtype, most, limit in ((torch.int8, 127, 0.02), (torch.float8_e4m3fn, 448, 0.06)):
        scales = {"k_scale": k.abs().max().item() / most, "v_scale": v.abs().max().item() / most}
        if by_page:  # of page 1; nothing is in page 0
            by_head = {"k_scale": k.abs().amax((0, 2)) / most, "v_scale": v.abs().amax((0, 2)) / most}
            scales = {name: torch.stack([torch.zeros(2), x]) for name, x in by_head.items()}
        pages = torch.zeros(2, 32, 64).to(dtype)
        paged.update_kv_pages(pages, k, v, slots, **scales)
        plain = paged.paged_attention(q, pages, kv_lens, table, **scales)
        assert relative(plain, want) < limit
        on_xla = [x.to("xla") for x in (q, torch.zeros(2, 32, 64).to(dtype), kv_lens, table)]
        scales = {name: x.to("xla") if by_page else x for name, x in scales.items()}
        paged.update_kv_pages(on_xla[1], *(x.to("xla") for x in (k, v, slots)), **scales)
        assert relative(paged.paged_attention(*on_xla, **scales).cpu(), plain) < 2e-6


GOOD = {
    "q": torch.ones(2, 4, 16),
    "kv_pages": torch.ones(4, 8, 64),
    "kv_lens": torch.ones(2, dtype=torch.int32),
    "page_indices": torch.zeros(2, 2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.ones(3, 4, 16)}, ValueError, "q: got shape"),
        ({"q": torch.ones(2, 4, 16, dtype=torch.float16)}, TypeError, "q: got torch.float16"),
        ({"q": torch.ones(2, 3, 16)}, ValueError, "kv_pages: got 2 heads"),
        ({"q": [1]}, TypeError, "q: got list"),
        ({"kv_pages": torch.ones(4, 8, 65)}, ValueError, "kv_pages: got shape"),
        ({"kv_pages": torch.ones(4, 7, 64)}, ValueError, "kv_pages: got pages of 7"),
        ({"kv_pages": torch.ones(4, 16, 64, dtype=torch.int8)}, ValueError, "needs 32 or more"),
        ({"kv_lens": torch.ones(2)}, TypeError, "kv_lens: got torch.float32"),
        ({"page_indices": torch.zeros(2, dtype=torch.int32)}, ValueError, "page_indices: got shape"),
        ({"scale": "1"}, TypeError, "scale: got str"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0"),
        ({"sliding_window": 0}, ValueError, "sliding_window: got 0"),
        ({"sliding_window": 2.0}, TypeError, "sliding_window: got float"),
        ({"sinks": torch.ones(3)}, ValueError, "sinks: got shape"),
        ({"k_scale": 2.0}, ValueError, "k_scale: got one for pages in torch.float32"),
        (
            {"kv_pages": torch.ones(4, 32, 64).to(torch.int8), "k_scale": torch.ones(3, 2)},
            ValueError,
            r"k_scale: got shape \(3, 2\)",
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        paged.paged_attention(**{**GOOD, **changes})


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_results_have_no_gradient(device):
    given, sinks = tensors(MIXED)
    q, *rest = (x.to(device) for x in given)
    assert not paged.ragged_paged_attention(q.requires_grad_(), *rest, sinks=sinks.to(device)).requires_grad


def test_update_refuses_pages_that_attention_would():
    k = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="kv_pages: got pages of 12 tokens"):
        paged.update_kv_pages(torch.zeros(3, 12, 64), k, k, torch.tensor([0]))


def test_update_of_a_pool_that_is_a_view_takes_no_gradient():
    pool = torch.zeros(8, 3, 4)
    k = torch.ones(1, 1, 2, requires_grad=True)
    paged.update_kv_pages(pool.transpose(0, 1), k, 2 * k, torch.tensor([9]))
    assert not pool.requires_grad
    assert pool[1, 1].tolist() == [1, 1, 2, 2] and pool.sum() == 6


@pytest.mark.parametrize(
    "shape, kv_heads, message",
    [
        ((3, 8, 256), 3, "kv_heads: got 3"),
        ((3, 8, 256), 0, "kv_heads: got 0"),
        ((8, 256), 2, "kv_pages: got shape"),
    ],
)
def test_split_names_what_does_not_fit(shape, kv_heads, message):
    with pytest.raises(ValueError, match=message):
        paged.split_kv_pages(torch.zeros(shape), kv_heads)
