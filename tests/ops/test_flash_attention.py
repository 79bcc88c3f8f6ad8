"""The public operator against scaled_dot_product_attention in float64, in lazy XLA and in eager torch."""

import pytest
import torch
import torch.nn.functional as F
from operator_cases import BACKWARD, FORWARD, leaves, qkv, relative

from xla_attention import flash_attention


def definition(q, k, v, *, offset=None, scale=None, softcap=None):
    """Attention and lse by torch's own functions: q sees keys up to q + offset; rows must see a key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if offset is not None:
        shown = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(offset)
        logits = logits.masked_fill(~shown, -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize(
    ("shape", "is_causal"),
    [
        ({}, True),
        ({"q_len": 7, "kv_len": 33}, True),
        ({"q_len": 33, "kv_len": 7, "kv_heads": 1}, True),
        ({"q_len": 1, "kv_len": 19, "heads": 3, "kv_heads": 3, "head_dim": 80}, False),
    ],
)
def test_equals_sdpa(shape, is_causal, device):
    inputs = qkv(**shape)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    wide = leaves(inputs, dtype=torch.float64)
    want = F.scaled_dot_product_attention(*wide, is_causal=is_causal, enable_gqa=True)
    want.backward(cotangent.double())

    ours = leaves(inputs, device)
    got = flash_attention(*ours, is_causal=is_causal)
    got.backward(cotangent.to(device))
    assert got.dtype == torch.float32
    assert relative(got, want) < FORWARD
    for x, y in zip(ours, wide):
        assert relative(x.grad, y.grad) < BACKWARD


@pytest.mark.parametrize(
    "options",
    [
        {"offset": None, "scale": 0.3, "softcap": 2.0},
        {"offset": 8, "softcap": 5.0, "scale": -0.2},
    ],
)
def test_options_and_lse_equal_the_definition(options, device):
    inputs = qkv(q_len=24, kv_len=32)
    o_weight, lse_weight = torch.randn(2, 4, 24, 32), torch.randn(2, 4, 24)
    wide = leaves(inputs, dtype=torch.float64)
    want = definition(*wide, **options)
    ((want[0] * o_weight).sum() + (want[1] * lse_weight).sum()).backward()

    ours = leaves(inputs, device)
    named = {name: options[name] for name in ("scale", "softcap") if name in options}
    if options["offset"] is not None:
        named |= {"is_causal": True, "causal_alignment": "bottom_right" if options["offset"] else "top_left"}
    got = flash_attention(*ours, **named, return_lse=True)
    ((got[0] * o_weight.to(device)).sum() + (got[1] * lse_weight.to(device)).sum()).backward()
    assert got[1].dtype == torch.float32
    assert relative(got[0], want[0]) < FORWARD
    assert relative(got[1], want[1]) < FORWARD
    for x, y in zip(ours, wide):
        assert relative(x.grad, y.grad) < BACKWARD


def test_gradient_of_lse_alone(device):
    inputs = qkv()
    wide, ours = leaves(inputs, dtype=torch.float64), leaves(inputs, device)
    definition(*wide)[1].square().sum().backward()
    flash_attention(*ours, return_lse=True)[1].square().sum().backward()
    assert relative(ours[0].grad, wide[0].grad) < BACKWARD
    assert relative(ours[1].grad, wide[1].grad) < BACKWARD
    assert ours[2].grad is None or not ours[2].grad.any()


def test_rows_that_see_nothing(device):
    inputs = qkv(q_len=12, kv_len=5)  # bottom-right: the first seven queries see no key
    wide, ours = leaves(inputs, dtype=torch.float64), leaves(inputs, device)
    o, lse = flash_attention(*ours, is_causal=True, causal_alignment="bottom_right", return_lse=True)
    (o.sum() + lse[..., 7:].sum()).backward()
    assert not o[:, :, :7].any()
    assert (lse[..., :7] == -torch.inf).all()
    assert not ours[0].grad[:, :, :7].any()

    want, want_lse = definition(wide[0][:, :, 7:], *wide[1:], offset=0)
    (want.sum() + want_lse.sum()).backward()
    assert relative(o[:, :, 7:], want) < FORWARD
    for x, y in zip(ours, wide):
        assert relative(x.grad, y.grad) < BACKWARD


def test_bfloat16_is_as_good_as_sdpa(device):
    inputs = qkv(q_len=65, kv_len=65, head_dim=64, dtype=torch.bfloat16)
    wide, theirs, ours = leaves(inputs, dtype=torch.float64), leaves(inputs), leaves(inputs, device)
    outputs = [
        F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True),
        flash_attention(*ours, is_causal=True),
    ]
    for x in outputs:
        x.backward(torch.ones_like(x))
    assert outputs[2].dtype == torch.bfloat16
    assert relative(outputs[2], outputs[0]) <= 1.5 * relative(outputs[1], outputs[0])
    for x, y, z in zip(ours, theirs, wide):
        assert x.grad.dtype == torch.bfloat16
        assert relative(x.grad, z.grad) <= 1.5 * relative(y.grad, z.grad)


def test_eager_float64_is_float64(first_device):
    inputs = leaves(qkv(dtype=torch.float64))
    o, lse = flash_attention(*inputs, return_lse=True)
    want = definition(*inputs)
    assert o.dtype == lse.dtype == torch.float64
    assert relative(o, want[0]) < 1e-14
    assert relative(lse, want[1]) < 1e-14


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)])
def test_frozen_inputs(frozen, device):
    inputs = qkv()
    wide, ours = leaves(inputs, dtype=torch.float64), leaves(inputs, device)
    for position in frozen:
        ours[position].requires_grad_(False)
    F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).sum().backward()
    flash_attention(*ours, is_causal=True).sum().backward()
    for position, (x, y) in enumerate(zip(ours, wide)):
        if position in frozen:
            assert x.grad is None
        else:
            assert relative(x.grad, y.grad) < BACKWARD


def test_all_frozen_needs_no_graph(device):
    o, lse = flash_attention(*(x.to(device) for x in qkv()), return_lse=True)
    assert not o.requires_grad
    assert not lse.requires_grad


def test_lse_that_is_not_asked_for_is_not_differentiated(monkeypatch, first_device):
    from xla_attention.ops import flash_ops as flash

    seen, kernel = [], flash._kernel_backward
    monkeypatch.setattr(flash, "_kernel_backward", lambda *a, **k: seen.append(a[6]) or kernel(*a, **k))
    ours = leaves(qkv(), first_device)
    flash_attention(*ours).sum().backward()
    flash_attention(*ours, return_lse=True)[0].sum().backward()
    sum(x.sum() for x in flash_attention(*ours, return_lse=True)).backward()
    assert [dlse is None for dlse in seen] == [True, True, False]


def test_transposed_and_expanded_inputs(device):
    """Layouts as a model makes them: [batch, seq, heads, head_dim] transposed, one key head expanded."""
    q = torch.randn(2, 20, 4, 32).to(device).requires_grad_()
    k = torch.randn(2, 1, 20, 32).to(device).requires_grad_()
    o = flash_attention(q.transpose(1, 2), k.expand(2, 2, 20, 32), k.expand(2, 2, 20, 32), is_causal=True)
    o.transpose(1, 2).reshape(2, 20, 128).square().sum().backward()

    q64, k64 = (x.detach().cpu().double().requires_grad_() for x in (q, k))
    want = F.scaled_dot_product_attention(q64.transpose(1, 2), k64, k64, is_causal=True, enable_gqa=True)
    want.square().sum().backward()
    assert relative(o, want) < FORWARD
    assert relative(q.grad, q64.grad) < BACKWARD
    assert relative(k.grad, k64.grad) < BACKWARD


def test_under_checkpoint(device):
    """Each device with the checkpoint that knows it."""
    if device.type == "xla":
        from torch_xla.utils.checkpoint import checkpoint
    else:
        from torch.utils.checkpoint import checkpoint

    def block(q, k, v):
        return flash_attention(q * 2, k, v, is_causal=True).sin()

    plain, again = (leaves(qkv(), device) for _ in range(2))
    block(*plain).sum().backward()
    checkpoint(block, *again, use_reentrant=True).sum().backward()
    for x, y in zip(again, plain):
        assert relative(x.grad, y.grad) < 1e-6  # the same kernels, in a graph that may fuse differently


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_casts_as_sdpa_does(dtype, device):
    q, k, v = leaves(qkv(dtype=dtype), device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = flash_attention(q, k.float(), v.float())
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == dtype
    want = F.scaled_dot_product_attention(*(x.cpu().double() for x in (q, k, v)), enable_gqa=True)
    assert relative(o, want) < 1e-2  # bfloat16 rounds at 4e-3


def test_double_backward_is_refused(first_device):
    q, k, v = leaves(qkv(), first_device)
    (dq,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dq.sum().backward()
