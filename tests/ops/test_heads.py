"""``split_heads`` and ``merge_heads`` on an XLA device against Hugging Face's rotary embedding."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from xla_attention import merge_heads, split_heads
from xla_attention.ops.heads import apply_rope


def angles(batch, seq, head_dim):
    generator = torch.Generator().manual_seed(2)
    shape = (seq, head_dim // 2) if batch is None else (batch, 1, seq, head_dim // 2)
    angle = torch.rand(shape, generator=generator) * 7
    return angle.cos(), angle.sin()


def hugging_face(x, head_dim, cos, sin):
    """Theirs takes ``[batch, seq, head_dim]``, both halves written out."""
    heads = x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    cos, sin = (torch.cat([t, t], -1).reshape(-1, *t.shape[-2:-1], head_dim) for t in (cos, sin))
    return apply_rotary_pos_emb(heads, heads, cos, sin)[0]


@pytest.mark.parametrize("head_dim, heads", [(128, 2), (64, 4), (48, 3)])  # the last is left to XLA
@pytest.mark.parametrize("of_batch", [False, True])
def test_values_and_gradients(device, head_dim, heads, of_batch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 21, heads * head_dim, generator=generator)
    w = torch.randn(2, heads, 21, head_dim, generator=generator)
    cos, sin = angles(2 if of_batch else None, 21, head_dim)
    want_x = x.clone().requires_grad_()
    want = hugging_face(want_x, head_dim, cos, sin)
    (want * w).sum().backward()

    got_x = x.to(device).requires_grad_()
    got = split_heads(got_x, head_dim, cos.to(device), sin.to(device))
    (got * w.to(device)).sum().backward()
    # float32, two products and a sum.
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(got_x.grad.cpu(), want_x.grad, rtol=0, atol=2e-6)


def test_there_and_back(device):
    x = torch.randn(3, 10, 256).to(device).requires_grad_()
    heads = split_heads(x, 64)
    assert torch.equal(heads.cpu(), x.unflatten(-1, (4, 64)).transpose(1, 2).cpu())
    back = merge_heads(heads * 2)
    assert torch.equal(back.cpu(), x.cpu() * 2)
    (back * torch.arange(256.0, device=device)).sum().backward()
    assert torch.equal(x.grad.cpu(), (2 * torch.arange(256.0)).expand(3, 10, 256))


def test_bfloat16_is_turned_in_float32(device):
    x = torch.randn(1, 64, 256, dtype=torch.bfloat16)
    cos, sin = angles(None, 64, 128)
    got = split_heads(x.to(device), 128, cos.to(device), sin.to(device))
    wide = apply_rope(x.double().unflatten(-1, (2, 128)).transpose(1, 2), cos.double(), sin.double())
    assert got.dtype == torch.bfloat16
    # One rounding, half of a bfloat16's last place: 2^-9, with the exponent of the value.
    torch.testing.assert_close(got.cpu().double(), wide, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: split_heads([1.0], 64), TypeError, "x: got list"),
        (
            lambda x: split_heads(x, 96),
            ValueError,
            r"x: got shape \(2, 8, 256\), needs .* \* 96\]",
        ),
        (lambda x: split_heads(x, 64, x), ValueError, "needs both or none"),
        (lambda x: split_heads(x, 64, *[torch.ones(7, 32)] * 2), ValueError, "cos: got shape"),
        (lambda x: split_heads(x[..., :255], 85, *[torch.ones(8, 42)] * 2), ValueError, "head_dim: got 85"),
        (lambda x: merge_heads(x), ValueError, r"needs \[batch, heads, seq, head_dim\]"),
        (lambda x: merge_heads(None), TypeError, "x: got NoneType"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.zeros(2, 8, 256))
