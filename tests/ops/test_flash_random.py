"""Any sensible combination: the kernels on the XLA device against the definition in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import BACKWARD, FORWARD, leaves, relative, to

from xla_attention import flash_attention, masks

LAZY = st.one_of(
    st.none(),
    st.builds(masks.Causal, st.integers(-9, 30)),
    st.builds(masks.Chunked, st.integers(1, 60)).map(lambda mask: ~mask),
    st.builds(masks.prefix_lm, st.integers(0, 60)),
)
WINDOWS = st.one_of(st.none(), st.tuples(st.one_of(st.none(), st.integers(0, 50)), st.integers(0, 50)))
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def problems(draw):
    """Tensors that are differentiated, and the operator's other arguments."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    head_dim, value_dim = draw(st.integers(16, 70)), draw(st.integers(16, 70))
    heads, generator = kv_heads * group, torch.Generator().manual_seed(draw(SEEDS))

    def chosen():
        return draw(st.booleans())

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def integers(most, *shape):
        return torch.randint(0, most + 1, shape, generator=generator)

    tensors = {
        "q": normal(batch, heads, q_len, head_dim),
        "k": normal(batch, kv_heads, kv_len, head_dim),
        "v": normal(batch, kv_heads, kv_len, value_dim),
    }
    outer = (batch if chosen() else 1, heads if chosen() else 1, q_len, kv_len)
    options = {"is_causal": chosen(), "sliding_window": draw(WINDOWS), "softcap": 2.0 if chosen() else None}
    if chosen():
        tensors["bias"] = normal(*outer)
    if chosen():
        tensors["sinks"] = normal(heads)
    if chosen():
        options["alibi_slopes"] = normal(heads).abs()
    if options["is_causal"] and chosen():
        options["causal_alignment"] = "bottom_right"
    if chosen():
        options["segment_ids"] = integers(2, batch, q_len), integers(2, batch, kv_len)
    if chosen():
        options["q_lens"], options["kv_lens"] = integers(q_len, batch), integers(kv_len, batch)
    options["mask"] = normal(*outer) > 0 if chosen() else draw(LAZY)
    return tensors, options


def results(tensors, options, device, dtype):
    ours = dict(zip(tensors, leaves(tensors.values(), device, dtype)))
    o, lse = flash_attention(**ours, **{n: to(device, x) for n, x in options.items()}, return_lse=True)
    weight = torch.linspace(-1, 2, o.shape[-1], device=device, dtype=dtype)
    ((o * weight).sum() + torch.where(lse.isinf(), 0.0, lse).square().sum()).backward()
    return o, lse, {name: x.grad for name, x in ours.items()}


@settings(max_examples=5, deadline=None, derandomize=True)
@given(problems())
def test_kernels_equal_the_definition(first_device, problem):
    tensors, options = problem
    got = results(*problem, first_device, torch.float32)
    want = results(*problem, "cpu", torch.float64)
    assert relative(got[0], want[0]) < FORWARD
    assert relative(got[1], want[1]) < FORWARD
    # q and k may have gradients of next to nothing, where each query sees about one key: sums of terms that
    # are as large as v's
    floor = want[2]["v"].abs().max() / 10
    for name, x in want[2].items():
        error = (got[2][name].cpu().double() - x).abs().max()
        assert error <= BACKWARD * x.abs().max().clamp(min=floor), name
