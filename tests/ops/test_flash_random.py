"""Any sensible combination: the kernels on the XLA device against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import BACKWARD, FORWARD, leaves, relative, to

from xla_attention import flash_attention, masks

SIMPLE = st.one_of(
    st.just(masks.Full()),
    st.builds(masks.Causal, st.integers(-9, 30)),
    st.builds(masks.SlidingWindow, st.integers(0, 50), st.integers(0, 50), st.integers(-20, 20)),
    st.builds(masks.Chunked, st.integers(1, 60)),
    st.builds(masks.prefix_lm, st.integers(0, 60)),
)


def compose(some):
    pairs = st.tuples(some, some)
    return st.one_of(
        pairs.map(lambda p: p[0] & p[1]), pairs.map(lambda p: p[0] | p[1]), some.map(lambda m: ~m)
    )


LAZY = st.recursive(SIMPLE, compose, max_leaves=4)
WINDOWS = st.one_of(st.none(), st.tuples(st.one_of(st.none(), st.integers(0, 50)), st.integers(0, 50)))
SEEDS = st.integers(0, 2**32 - 1)
# Of o, of lse and of gradients. bfloat16 rounds at 2^-9, results and probabilities both; in the gradients two
# rounded factors meet, and a sink's is a sum over all queries that may cancel.
LIMITS = {
    torch.float32: (FORWARD, FORWARD, BACKWARD, BACKWARD),
    torch.bfloat16: (2**-7, 2**-9, 2**-6, 2**-5),
}


@st.composite
def problems(draw):
    """Tensors that are differentiated, and the operator's other arguments."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    head_dim, value_dim = draw(st.integers(16, 70)), draw(st.integers(16, 70))
    dtype = draw(st.sampled_from(list(LIMITS)))
    heads, generator = kv_heads * group, torch.Generator().manual_seed(draw(SEEDS))

    def chosen():
        return draw(st.booleans())

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def integers(most, *shape):
        return torch.randint(0, most + 1, shape, generator=generator)

    tensors = {
        "q": normal(batch, heads, q_len, head_dim).to(dtype),
        "k": normal(batch, kv_heads, kv_len, head_dim).to(dtype),
        "v": normal(batch, kv_heads, kv_len, value_dim).to(dtype),
    }
    outer = (batch if chosen() else 1, heads if chosen() else 1, q_len, kv_len)
    options = {"is_causal": chosen(), "sliding_window": draw(WINDOWS), "softcap": 2.0 if chosen() else None}
    if chosen():
        tensors["bias"] = normal(*outer).to(dtype)
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
    kind = draw(st.sampled_from(["none", "lazy", "per head", "dense"]))
    if kind == "lazy":
        options["mask"] = draw(LAZY)
    elif kind == "per head":
        few = draw(st.lists(LAZY, min_size=1, max_size=2))
        options["mask"] = masks.PerHead([draw(st.sampled_from(few)) for _ in range(heads)])
    elif kind == "dense":
        options["mask"] = normal(*outer) > 0
    return tensors, options


def results(tensors, options, device, dtype=None):
    ours = dict(zip(tensors, leaves(tensors.values(), device, dtype)))
    o, lse = flash_attention(**ours, **{n: to(device, x) for n, x in options.items()}, return_lse=True)
    weight = torch.linspace(-1, 2, o.shape[-1]).bfloat16().to(device, o.dtype)
    ((o * weight).float().sum() + torch.where(lse.isinf(), 0.0, lse).square().sum()).backward()
    return o, lse, {name: x.grad for name, x in ours.items()}


def check(first_device, tensors, options):
    got = results(tensors, options, first_device)
    want = results(tensors, options, "cpu", torch.float64)
    *forward, backward, of_sinks = LIMITS[tensors["q"].dtype]
    for x, y, limit in zip(got, want, forward):
        assert relative(x, y) < limit
    # q and k may have gradients of next to nothing, where each query sees about one key: sums of terms that
    # are as large as v's
    floor = want[2]["v"].abs().max() / 10
    for name, x in want[2].items():
        error = (got[2][name].cpu().double() - x).abs().max()
        limit = of_sinks if name == "sinks" else backward
        assert error <= limit * x.abs().max().clamp(min=floor), name


@settings(max_examples=4)
@given(problems())
def test_kernels_equal_the_definition(first_device, problem):
    check(first_device, *problem)


@pytest.mark.slow
@settings(max_examples=60)
@given(problems())
def test_kernels_equal_the_definition_in_many_more(first_device, problem):
    check(first_device, *problem)
