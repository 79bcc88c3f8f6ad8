"""flex_attention on XLA as torch's function: results, graphs, caches, block masks, arguments."""

import warnings

import pytest
import torch
import torch_xla
from torch.nn.attention import flex_attention as torch_flex

from pallas_kernels.flash_attention import BlockSizes, ForwardBlocks
from xla_attention import and_masks, create_block_mask, flex_attention, noop_mask
from xla_attention.benchmarks.flex_accuracy import LIMIT, Shape, distance, errors
from xla_attention.benchmarks.flex_functions import composed
from xla_attention.flex import FlexTraceError, operands
from xla_attention.flex.variants import VARIANTS
from xla_attention.flex.variants.causal import causal
from xla_attention.ops import flash_ops


def inputs(device, seed=0, batch=1, heads=2, kv_heads=2, length=40, requires_grad=True):
    shape = Shape(length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=16, value_dim=16)
    return [x.to(device).requires_grad_(requires_grad) for x in shape.tensors(seed)[:3]]


def close(got, want):
    for g, w in zip(got, want, strict=True):
        assert distance(g, w.detach().cpu()) < LIMIT


def test_as_torchs_own_function():
    """Called the same way, block mask and all, forward and backward."""

    def run(flex, create, device):
        q, k, v = inputs(device, heads=4, batch=2)
        table = torch.linspace(-1, 1, 4 * 80).reshape(4, 80).to(device).requires_grad_()
        ids = torch.arange(40, device=device) // 15

        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) + table[h, q_idx - kv_idx + 40]

        def documents(b, h, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

        block_mask = create(and_masks(causal, documents), 2, None, 40, 40, device=device)
        o, lse = flex(q, k, v, score_mod, block_mask, 0.3, True, True)
        (o.square().sum() + lse.sin().sum()).backward()
        return o, lse, q.grad, k.grad, v.grad, table.grad

    ours = run(flex_attention, create_block_mask, torch_xla.device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(ours, run(torch_flex.flex_attention, torch_flex.create_block_mask, "cpu"))
        # Elsewhere it is torch's, with our block mask.
        assert all(
            map(
                torch.equal,
                run(flex_attention, create_block_mask, "cpu"),
                run(torch_flex.flex_attention, torch_flex.create_block_mask, "cpu"),
            )
        )


def test_a_changed_closure_is_never_stale(first_device):
    q, k, v = inputs(first_device, requires_grad=False)
    factor, table = 1.0, torch.zeros(40, device=first_device)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor + table[kv_idx]

    def want(factor, table):
        s = q @ k.mT / 4 * factor + table
        return torch.softmax(s, -1) @ v

    close([flex_attention(q, k, v, score_mod)], [want(1.0, table)])
    factor = 2.5
    close([flex_attention(q, k, v, score_mod)], [want(2.5, table)])
    table = torch.linspace(0, 3, 40, device=first_device)
    close([flex_attention(q, k, v, score_mod)], [want(2.5, table)])
    table += 1  # in place, between calls
    table[3] = -9.0
    close([flex_attention(q, k, v, score_mod)], [want(2.5, table)])


@pytest.mark.parametrize("calls", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_calls_lower_once(calls, first_device, monkeypatch):
    lowered = []
    for kernel in (flash_ops._kernel_forward, flash_ops._kernel_backward, operands._kernel_compute):
        lower = kernel._lower
        monkeypatch.setattr(kernel, "_lower", lambda *a, lower=lower: lowered.append(1) or lower(*a))
    q, k, v = inputs(first_device, length=24)

    def call():
        slopes = torch.ones(2, device=first_device)
        block_mask = create_block_mask(lambda b, h, q, kv: q >= kv - 3, None, None, 24, 24, first_device)
        # A constant of this case: the other case's functions are lowered already.
        return flex_attention(
            q, k, v, lambda s, b, h, q, kv: s - slopes[h] * torch.sin(q - kv * (1 + 1 / calls)), block_mask
        )

    for n in range(calls):
        o = call()
        if n % 10 == 0:
            o.sum().backward()
            torch_xla.sync()
    assert len(lowered) == 3


def test_torch_compile(first_device):
    torch._dynamo.reset()
    table = torch.linspace(-1, 1, 80).to(first_device).requires_grad_()

    def block(q, k, v):
        block_mask = create_block_mask(causal, None, None, 40, 40, q.device)
        o = flex_attention(
            q * 2, k, v, lambda s, b, h, q_idx, kv_idx: s + table[q_idx - kv_idx + 40], block_mask
        )
        return torch.nn.functional.gelu(o)

    def run(fn):
        qkv = inputs(first_device)
        table.grad = None
        o = fn(*qkv)
        o.square().sum().backward()
        return [o, *(x.grad for x in qkv), table.grad.clone()]

    lazy = [x.detach().cpu() for x in run(block)]
    close(run(torch.compile(block, backend="openxla")), lazy)


def test_bfloat16(first_device):
    q, k, v = (x.detach().bfloat16() for x in inputs(first_device))
    o, lse = flex_attention(q, k, v, lambda s, *_: s.sin(), return_lse=True)
    wide = torch.softmax(torch.sin(q.float() @ k.float().mT / 4), -1) @ v.float()
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert distance(o, wide.cpu()) < 2**-7  # rounds at 2^-9, probabilities and results


QUICK = [
    ("heads_apart", VARIANTS["heads_apart"], Shape(37)),
    ("padded", VARIANTS["padded"], Shape(1)),
    ("natten", VARIANTS["natten"], Shape(196, batch=1)),
    ("t5_bias", VARIANTS["t5_bias"], Shape(64, 90, kv_batch=1, value_dim=48)),
    ("step", composed(("gathered", "of queries", "hides")), Shape(64)),
    ("mask", composed((), ("documents of batch", "keys of batch"), "or"), Shape(64)),
]


@pytest.mark.parametrize(("make", "shape"), [x[1:] for x in QUICK], ids=[x[0] for x in QUICK])
def test_functions(make, shape):
    for name, error in errors(make, shape).items():
        assert error < LIMIT, name


def test_every_variant_is_drawn_from_the_list_of_the_article():
    wanted = {"full", "causal", "relative_position", "alibi", "t5_bias", "softcap", "sliding_window"}
    wanted |= {"prefix_lm", "documents", "padded", "tanh_gated", "dilated", "natten"}
    assert wanted <= VARIANTS.keys()


@pytest.mark.parametrize("whose", [torch_flex.BlockMask, None])
@pytest.mark.parametrize("block", [16, (32, 16)])
def test_lists_alone(whose, block, first_device):
    """Without a mask_mod, the lists are the mask."""
    made = torch_flex.create_block_mask(
        lambda b, h, q, kv: (q // 32 + kv // 16 + h) % 3 > 0, 1, 2, 96, 96, device="cpu", BLOCK_SIZE=block
    )
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    listed = torch_flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, seq_lengths=(96, 96))
    if whose is None:
        listed = listed.to(first_device)
    q, k, v = inputs(first_device, length=96)
    o = flex_attention(q, k, v, block_mask=listed)
    o.sum().backward()
    i = torch.arange(96)
    rows, columns = listed.BLOCK_SIZE
    seen = made.to_dense()[:, :, i // rows][..., i // columns].bool()
    qkv = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=seen)
    want.sum().backward()
    close([o, q.grad, k.grad, v.grad], [want, *(x.grad for x in qkv)])


def test_a_mask_moved_to_the_device_takes_its_captures_along(first_device):
    ids = torch.arange(40) // 9
    block_mask = torch_flex.create_block_mask(
        lambda b, h, q, kv: ids[q] == ids[kv], None, None, 40, 40, device="cpu"
    ).to(first_device)
    q, k, v = inputs(first_device, requires_grad=False)
    seen = ids[:, None] == ids[None]
    want = torch.nn.functional.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu(), attn_mask=seen)
    close([flex_attention(q, k, v, block_mask=block_mask)], [want])


def test_block_sizes_and_torchs_options(first_device):
    q, k, v = inputs(first_device, requires_grad=False, length=200)
    small = BlockSizes(ForwardBlocks(block_q=128, tile_q=128, block_kv=128, border_kv=128))
    options = {"block_sizes": small, "BLOCK_M": 64, "fwd_num_stages": 2}
    close([flex_attention(q, k, v, kernel_options=options)], [flex_attention(q, k, v)])
    with pytest.raises(ValueError, match="kernel_options: got 'BLOCK'"):
        flex_attention(q, k, v, kernel_options={"BLOCK": 64})
    with pytest.raises(TypeError, match="block_sizes is int"):
        flex_attention(q, k, v, kernel_options={"block_sizes": 128})


def test_auxiliary_results(first_device):
    q, k, v = inputs(first_device, requires_grad=False)
    o, lse = flex_attention(q, k, v, return_lse=True)
    again, aux = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(lse=True))
    assert torch.equal(o, again)
    assert torch.equal(lse, aux.lse)
    with pytest.raises(ValueError, match="return_aux"):
        flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(max_scores=True))


def test_bad_arguments(first_device):
    q, k, v = inputs(first_device, heads=4, kv_heads=2, requires_grad=False)
    with pytest.raises(ValueError, match="enable_gqa: is False"):
        flex_attention(q, k, v)
    with pytest.raises(ValueError, match="block_mask: made for lengths"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 40, 41), enable_gqa=True)
    with pytest.raises(ValueError, match="block_mask: made for batch and heads"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 3, 40, 40), enable_gqa=True)
    with pytest.raises(TypeError, match="block_mask: got function"):
        flex_attention(q, k, v, block_mask=causal, enable_gqa=True)
    with pytest.raises(TypeError, match="score_mod: got float"):
        flex_attention(q, k, v, 2.0, enable_gqa=True)
    with pytest.raises(ValueError, match="scale"):
        flex_attention(q, k, v, scale=float("nan"), enable_gqa=True)
    elsewhere = torch.zeros(40)
    with pytest.raises(ValueError, match="captures a tensor of shape .* on cpu"):
        flex_attention(q, k, v, lambda s, b, h, q, kv: s + elsewhere[kv], enable_gqa=True)
    with pytest.raises(FlexTraceError, match="torch.where"):
        flex_attention(q, k, v, lambda s, b, h, q, kv: s if q > kv else -s, enable_gqa=True)
    with pytest.raises(ValueError, match="batch"):
        flex_attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), enable_gqa=True)


def test_no_function_at_all(first_device):
    q, k, v = inputs(first_device, requires_grad=False)
    block_mask = create_block_mask(noop_mask, None, None, 40, 40, first_device)
    want = torch.nn.functional.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu())
    close([flex_attention(q, k, v), flex_attention(q, k, v, block_mask=block_mask)], [want, want])
