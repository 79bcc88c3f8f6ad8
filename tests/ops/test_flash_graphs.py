"""How often the operator traces, lowers and compiles: lazy mode, torch.compile, scanned layers."""

import copy

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met

from pallas_kernels.flash_attention import AttentionSpec, Operands
from xla_attention import flash_attention, masks
from xla_attention.bridge import intern_static
from xla_attention.ops import flash_ops


def inputs(device, q_len=24, kv_len=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 4, q_len, 32), (1, 2, kv_len, 32), (1, 2, kv_len, 32)]
    return [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]


def block(q, k, v):
    return flash_attention(q * 2, k, v, is_causal=True, causal_alignment="bottom_right").sin()


def close(got, want):
    """Up to a few roundings of the largest element: other fusions, or another implementation, of the same."""
    for x, y in zip(got, want, strict=True):
        largest = y.abs().max().item()
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=0, atol=1e-5 * largest)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiles():
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def test_calls_reuse_one_computation(first_device):
    q, k, v = inputs(first_device)
    flash_attention(q, k, v, scale=0.123)
    before = len(flash_ops._kernel_forward._computations)
    for _ in range(1000):
        flash_attention(q, k, v, scale=0.123)
    assert len(flash_ops._kernel_forward._computations) == before
    flash_attention(q, k, v, scale=0.124)
    assert len(flash_ops._kernel_forward._computations) == before + 1


def test_lengths_are_data(first_device):
    """200 values of kv_lens and q_lens: lowered once, compiled once, and each value counts."""
    q, k, v = (x.detach() for x in inputs(first_device, 24, 200))
    want = inputs("cpu", 24, 200)
    torch_xla.sync()
    lowered, before = len(flash_ops._kernel_forward._computations), compiles()
    counts, answers = [], []
    for n in range(1, 201):
        lens = torch.tensor([n]).to(first_device)
        answers.append(flash_attention(q, k, v, kv_lens=lens, q_lens=lens).cpu())
        counts.append(compiles())
    assert len(flash_ops._kernel_forward._computations) == lowered + 1
    assert counts == [before + 1] * 200
    for n in (1, 17, 200):
        lens = torch.tensor([n])
        close([answers[n - 1]], [flash_attention(*want, kv_lens=lens, q_lens=lens).detach()])
    assert len({x.sum().item() for x in answers}) == 200


def test_segments_and_biases_are_data_in_training(first_device):
    counts = []
    for seed in range(3):
        q, k, v = inputs(first_device, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(1, 4, 24, 24, generator=generator).to(first_device).requires_grad_()
        ids = torch.randint(0, 3, (1, 24), generator=generator).to(first_device)
        flash_attention(q, k, v, bias=bias, segment_ids=ids).square().sum().backward()
        torch_xla.sync()
        counts.append(compiles())
    assert counts[1] == counts[2]


def test_training_steps_compile_once_and_equal_eager_torch(first_device):
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(32, 32, generator=generator) / 6
    data = torch.randn(1, 4, 24, 32, generator=generator)

    def train(device):
        weight, x = initial.to(device).requires_grad_(), data.to(device)
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        losses, counts = [], []
        for _ in range(4):
            h = x @ weight
            loss = flash_attention(h, h, x, is_causal=True).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            losses.append(loss.item())
            counts.append(compiles())
        return losses, counts

    losses, counts = train(first_device)
    want, _ = train("cpu")
    assert counts[1] == counts[2] == counts[3]
    assert want[3] < 0.99 * want[0]  # the weight did move
    assert losses == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_forward_and_backward(dynamic, first_device, fresh_dynamo):
    compiled = torch.compile(block, backend="openxla", fullgraph=True, dynamic=dynamic)
    for q_len, kv_len in [(24, 24), (16, 40)]:
        lazy, ours = (inputs(first_device, q_len, kv_len) for _ in range(2))
        want, got = block(*lazy), compiled(*ours)
        want.square().sum().backward()
        got.square().sum().backward()
        close([got, *(x.grad for x in ours)], [want, *(x.grad for x in lazy)])


def test_torch_compile_with_lse_and_frozen_key(first_device, fresh_dynamo):
    def both(q, k, v):
        o, lse = flash_attention(q, k, v, softcap=3.0, return_lse=True)
        return o.sum() + lse.square().sum()

    lazy, ours = inputs(first_device), inputs(first_device)
    for x in (lazy[1], ours[1]):
        x.requires_grad_(False)
    both(*lazy).backward()
    torch.compile(both, backend="openxla", fullgraph=True)(*ours).backward()
    assert ours[1].grad is None
    close([ours[0].grad, ours[2].grad], [lazy[0].grad, lazy[2].grad])


MASK = masks.Causal(3) & ~masks.Chunked(7)  # Dynamo cannot follow ~ on an object: made outside


def test_torch_compile_with_everything(first_device, fresh_dynamo):
    def attention(q, k, v, bias, sinks, slopes, shown, ids, lens):
        return flash_attention(
            q,
            k,
            v,
            mask=MASK,
            bias=bias.masked_fill(shown, -torch.inf),
            sinks=sinks,
            alibi_slopes=slopes,
            segment_ids=(ids, ids),
            kv_lens=lens,
            sliding_window=(9, None),
            softcap=3.0,
        )

    def arguments():
        generator = torch.Generator().manual_seed(1)
        bias, sinks = torch.randn(1, 4, 24, 24, generator=generator), torch.randn(4, generator=generator)
        frozen = sinks.abs(), bias > 1, torch.arange(24)[None] // 9, torch.tensor([20])
        trained = [x.to(first_device).requires_grad_() for x in (bias, sinks)]
        return [*inputs(first_device), *trained, *(x.to(first_device) for x in frozen)]

    lazy, ours = arguments(), arguments()
    want, got = attention(*lazy), torch.compile(attention, backend="openxla", fullgraph=True)(*ours)
    want.square().sum().backward()
    got.square().sum().backward()
    close([got, *(x.grad for x in ours[:5])], [want, *(x.grad for x in lazy[:5])])


def test_torch_compile_with_a_dense_mask(first_device, fresh_dynamo):
    def attention(q, k, v, shown):
        return flash_attention(q, k, v, mask=shown, is_causal=True, sliding_window=9)

    shown = (torch.arange(24 * 24).reshape(1, 1, 24, 24) % 3 > 0).to(first_device)
    lazy, ours = inputs(first_device), inputs(first_device)
    want = attention(*lazy, shown)
    got = torch.compile(attention, backend="openxla", fullgraph=True)(*ours, shown)
    want.square().sum().backward()
    got.square().sum().backward()
    close([got, *(x.grad for x in ours)], [want, *(x.grad for x in lazy)])


def test_torch_compile_is_not_disturbed_by_other_attention(first_device, fresh_dynamo):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("openxla")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    with torch.no_grad():
        for n in range(12):
            compiled(*inputs(first_device))
            flash_attention(*inputs(first_device), scale=1 / (n + 7))
    assert counter.frame_count == 1


def test_torch_compile_in_eager_torch(first_device, fresh_dynamo):
    want, got = inputs("cpu"), inputs("cpu")
    block(*want).sum().backward()
    torch.compile(block, backend="aot_eager", fullgraph=True)(*got).sum().backward()
    close([x.grad for x in got], [x.grad for x in want])


def test_torch_compile_with_masks_of_heads(first_device, fresh_dynamo):
    heads = masks.PerHead([masks.Causal(), ~masks.Chunked(5)] * 2)

    def attention(q, k, v):
        return flash_attention(q, k, v, mask=heads, sliding_window=(9, 9)).sin()

    want, got = inputs("cpu"), inputs("cpu")
    attention(*want).sum().backward()
    torch.compile(attention, backend="aot_eager", fullgraph=True)(*got).sum().backward()
    close([x.grad for x in got], [x.grad for x in want])


def test_operators_satisfy_torchs_own_checks(first_device):
    q, k, v = inputs(first_device)
    spec = intern_static(flash_ops.Problem(AttentionSpec(scale=0.2)))
    bias = torch.zeros(1, 4, 24, 24, device=first_device, requires_grad=True)
    sinks = torch.zeros(4, device=first_device, requires_grad=True)
    operands = Operands(bias=bias, sinks=sinks)
    checks = ("test_schema", "test_faketensor")  # the others do not know XLA devices
    torch.library.opcheck(flash_ops.forward, (q, k, v, *operands, spec, True), test_utils=checks)
    frozen = [x.detach() for x in (q, k, v)]
    operands = Operands(bias=bias.detach(), sinks=sinks.detach())
    o, lse = flash_ops.forward(*frozen, *operands, spec, True)
    args = (*frozen, o, lse, o, None, *operands, spec)
    torch.library.opcheck(flash_ops.backward, args, test_utils=checks)
    for wanted in ((True, True), (False, True)):
        torch.library.opcheck(flash_ops.operand_backward, (*args, *wanted, []), test_utils=checks)


def test_inside_scanned_layers(first_device):
    from torch_xla.experimental.scan_layers import scan_layers

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(32, 32)

        def forward(self, x):
            h = self.project(x)
            return x + flash_attention(h, h, x, is_causal=True)

    torch.manual_seed(0)
    eager = torch.nn.ModuleList(Layer() for _ in range(3))
    scanned = copy.deepcopy(eager).to(first_device)
    want = x = torch.randn(1, 2, 16, 32) / 4
    for layer in eager:
        want = layer(want)
    want.square().sum().backward()
    got = scan_layers(scanned, x.to(first_device))
    got.square().sum().backward()
    close([got, *(p.grad for p in scanned.parameters())], [want, *(p.grad for p in eager.parameters())])
