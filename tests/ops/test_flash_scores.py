"""What changes scores, with its gradients, against attention written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from operator_cases import BACKWARD, FORWARD, indices, leaves, qkv, relative, repeated

from xla_attention import flash_attention
from xla_attention.ops import flash_ops


def normal(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def definition(q, k, v, *, bias=0.0, sinks=None, softcap=None, seen=None):
    """Attention and lse; a sink is one more column of the softmax, whose value is zero."""
    k, v = repeated(q, k, v)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def check(got, want, ours, wide):
    """Values and, through a loss on o and lse, every gradient."""
    o_weight, lse_weight = normal(*want[0].shape, seed=8), normal(*want[1].shape, seed=9)
    for (o, lse), device, dtype in ((want, "cpu", torch.float64), (got, got[0].device, torch.float32)):
        ((o * o_weight.to(device, dtype)).sum() + (lse * lse_weight.to(device, dtype)).sum()).backward()
    assert relative(got[0], want[0]) < FORWARD
    assert relative(got[1], want[1]) < FORWARD
    for x, y in zip(ours, wide, strict=True):
        assert relative(x.grad, y.grad) < BACKWARD


@pytest.mark.parametrize(
    ("sizes", "device"),
    [((1, 1), "eager"), ((1, 4), "eager"), ((2, 1), "eager"), ((1, 4), "xla"), ((2, 1), "xla")],
    indirect=["device"],
)
def test_bias(sizes, device):
    inputs = [*qkv(24, 40), normal(*sizes, 24, 40)]
    *wide, wide_bias = leaves(inputs, dtype=torch.float64)
    *ours, bias = leaves(inputs, device)
    got = flash_attention(*ours, bias=bias, softcap=3.0, is_causal=True, return_lse=True)
    want = definition(*wide, bias=wide_bias, softcap=3.0, seen=torch.ones(24, 40).tril().bool())
    check(got, want, [*ours, bias], [*wide, wide_bias])


@pytest.mark.parametrize(
    ("alignment", "device"),
    [("top_left", "eager"), ("bottom_right", "eager"), ("bottom_right", "xla")],
    indirect=["device"],
)
def test_alibi(alignment, device):
    inputs, slopes = qkv(24, 40), torch.tensor([0.5, 0.25, 0.125, 0.0])
    wide, ours = leaves(inputs, dtype=torch.float64), leaves(inputs, device)
    q_at, kv_at = indices(24, 40)
    distance = (q_at + (16 if alignment == "bottom_right" else 0) - kv_at).abs()
    got = flash_attention(*ours, alibi_slopes=slopes.to(device), causal_alignment=alignment, return_lse=True)
    check(got, definition(*wide, bias=-slopes[:, None, None] * distance), ours, wide)


def test_sinks(device):
    inputs = [*qkv(), normal(4)]
    *wide, wide_sinks = leaves(inputs, dtype=torch.float64)
    *ours, sinks = leaves(inputs, device)
    got = flash_attention(*ours, sinks=sinks, sliding_window=(5, 5), return_lse=True)
    q_at, kv_at = indices(40, 40)
    want = definition(*wide, sinks=wide_sinks, seen=(q_at - kv_at).abs() <= 5)
    check(got, want, [*ours, sinks], [*wide, wide_sinks])


def test_a_dense_mask_hides_and_bias_and_sinks_get_their_gradients(device):
    """Where a query sees no key, only its head's sink is left."""
    shown = normal(2, 1, 24, 40) > 0
    shown[:, :, 3:7] = False
    inputs = [*qkv(24, 40), normal(1, 4, 24, 40), normal(4)]
    *wide, wide_bias, wide_sinks = leaves(inputs, dtype=torch.float64)
    *ours, bias, sinks = leaves(inputs, device)
    got = flash_attention(*ours, bias=bias, sinks=sinks, mask=shown.to(device), return_lse=True)
    want = definition(*wide, bias=wide_bias, sinks=wide_sinks, seen=shown)
    assert not got[0][:, :, 3:7].any()
    assert torch.equal(got[1][:, :, 3:7].cpu(), inputs[-1][:, None].expand(2, 4, 4))
    check(got, want, [*ours, bias, sinks], [*wide, wide_bias, wide_sinks])


def test_a_bias_may_hide(device):
    hidden = torch.tensor([-torch.inf, torch.finfo(torch.float32).min, -1e30, -5e29]).repeat(10)
    bias = normal(1, 1, 24, 40)
    bias[..., ::3] = hidden[::3]
    bias[:, :, 5] = hidden
    inputs = [*qkv(24, 40), bias]
    *ours, bias = leaves(inputs, device)
    o, lse = flash_attention(*ours, bias=bias, return_lse=True)
    o.square().sum().backward()
    assert not o[:, :, 5].any()
    assert lse[:, :, 5].isneginf().all()
    assert not bias.grad[..., ::3].any()
    assert not bias.grad[:, :, 5].any()

    *wide, wide_bias = leaves(inputs, dtype=torch.float64)
    rest = [n for n in range(24) if n != 5]
    want = F.scaled_dot_product_attention(
        wide[0][:, :, rest], *wide[1:], attn_mask=wide_bias[:, :, rest], enable_gqa=True
    )
    want.square().sum().backward()
    assert relative(o[:, :, rest], want) < FORWARD
    for x, y in zip([*ours, bias], [*wide, wide_bias]):
        assert relative(x.grad, y.grad) < BACKWARD


def test_value_dim_may_differ(device):
    q, k, _ = qkv(12, 20, kv_heads=1, head_dim=40)
    inputs = [q, k, normal(2, 1, 20, 136)]
    wide, ours = leaves(inputs, dtype=torch.float64), leaves(inputs, device)
    check(flash_attention(*ours, return_lse=True), definition(*wide), ours, wide)


def test_narrow_bias_and_wide_slopes(device):
    """bfloat16 attention with a float32 bias, bfloat16 sinks and slopes: nothing is rounded on the way in."""
    inputs = qkv(dtype=torch.bfloat16)
    bias, sinks, slopes = normal(1, 4, 40, 40), normal(4).bfloat16(), torch.full((4,), 0.25).bfloat16()
    ours, bias_ = leaves(inputs, device), bias.to(device).requires_grad_()
    sinks_ = sinks.to(device).requires_grad_()
    o, lse = flash_attention(
        *ours, bias=bias_, sinks=sinks_, alibi_slopes=slopes.to(device), is_causal=True, return_lse=True
    )
    o.float().square().sum().backward()
    assert [x.dtype for x in (o, lse, bias_.grad, sinks_.grad)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]
    wide, (q_at, kv_at) = leaves(inputs, dtype=torch.float64), indices(40, 40)
    wide_bias, wide_sinks = leaves([bias, sinks], dtype=torch.float64)
    want, want_lse = definition(
        *wide, bias=wide_bias - 0.25 * (q_at - kv_at), sinks=wide_sinks, seen=kv_at <= q_at
    )
    want.square().sum().backward()
    assert relative(lse, want_lse) < FORWARD
    assert relative(o, want) < 2**-7  # o is rounded to 2^-9 of itself, and so are the probabilities
    assert relative(bias_.grad, wide_bias.grad) < 2**-6
    assert relative(sinks_.grad, wide_sinks.grad) < 2**-6


@pytest.fixture
def kernel_calls(monkeypatch):
    """Names of the kernels that are called, in order."""
    calls = []
    for name in ("forward", "backward", "operand_gradients"):
        kernel = getattr(flash_ops, f"_kernel_{name}")

        def counted(*args, name=name, kernel=kernel, **static):
            calls.append((name, *static.get("wanted", ())))
            return kernel(*args, **static)

        monkeypatch.setattr(flash_ops, f"_kernel_{name}", counted)
    return calls


@pytest.mark.parametrize(
    ("trained", "calls"),
    [
        ("q k v", [("backward",)]),
        ("v bias", [("backward",), ("operand_gradients", True, False)]),
        ("sinks", [("operand_gradients", False, True)]),
    ],
)
def test_frozen_tensors_cost_nothing(trained, calls, kernel_calls, first_device):
    shape = {"q_len": 24, "kv_len": 40}
    tensors = dict(zip("qkv", qkv(**shape))) | {"bias": normal(1, 4, 24, 40), "sinks": normal(4)}
    ours = {name: x.to(first_device).requires_grad_(name in trained.split()) for name, x in tensors.items()}
    wide = {name: x.double().requires_grad_(name in trained.split()) for name, x in tensors.items()}
    flash_attention(**ours).square().sum().backward()
    definition(**wide)[0].square().sum().backward()
    assert kernel_calls == [("forward",), *calls]
    for name, x in ours.items():
        assert relative(x.grad, wide[name].grad) < BACKWARD if name in trained.split() else x.grad is None


def test_the_same_bits_every_time(first_device):
    def run():
        *ours, bias, sinks = leaves([*qkv(150, 150), normal(1, 4, 150, 150), normal(4)], first_device)
        ids = torch.arange(150, device=first_device).expand(2, 150) // 40
        o, lse = flash_attention(
            *ours, bias=bias, sinks=sinks, segment_ids=ids, is_causal=True, softcap=4.0, return_lse=True
        )
        (o.sum() + lse.square().sum()).backward()
        return [x.detach().cpu() for x in (o, lse, *(y.grad for y in (*ours, bias, sinks)))]

    first = run()
    for again in (run(), run()):
        assert all(torch.equal(x, y) for x, y in zip(first, again))
