"""Optional operands of attention, made at random, and their gradients by torch in float64."""

import numpy as np
import torch

from pallas_kernels.flash_attention import Operands, attention_reference

FLOATING = ("bias", "sinks")  # what has a gradient


def packed(rng, length, documents):
    """Ids of documents that lie one after the other."""
    starts = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
    return np.searchsorted(starts, np.arange(length), side="right").astype(np.int32)


def make(case, wanted, *, bias_shape=None, seed=1):
    """The operands named in ``wanted``, as NumPy arrays; those of segments are packed documents."""
    batch, heads, _, q_len, kv_len, _ = case.shape
    rng = np.random.default_rng(seed)
    made = {}
    if "segments" in wanted:
        made["q_segment_ids"] = np.stack([packed(rng, q_len, 3 + b) for b in range(batch)])
        made["kv_segment_ids"] = np.stack([packed(rng, kv_len, 3 + b) for b in range(batch)])
    if "shuffled segments" in wanted:
        made["q_segment_ids"] = rng.integers(0, 3, (batch, q_len), np.int32)
        made["kv_segment_ids"] = rng.integers(0, 3, (batch, kv_len), np.int32)
    if "bias" in wanted:
        shape = (*(bias_shape or (batch, heads)), q_len, kv_len)
        made["bias"] = rng.standard_normal(shape).astype(np.float32)
    if "alibi" in wanted:
        made["alibi_slopes"] = (2.0 ** -np.linspace(1, 8, heads)).astype(np.float32)
    if "sinks" in wanted:
        made["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if "q_lens" in wanted:
        made["q_lens"] = rng.integers(1, q_len + 1, batch, np.int32)
    if "kv_lens" in wanted:
        made["kv_lens"] = rng.integers(1, kv_len + 1, batch, np.int32)
    return Operands(**made)


def in_torch(operands):
    """The operands there are, by name: floating ones in float64, with gradients where they have any."""
    tensors = {name: torch.tensor(x) for name, x in operands._asdict().items() if x is not None}
    tensors |= {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
    for name in set(FLOATING) & tensors.keys():
        tensors[name].requires_grad_()
    return tensors


def by_definition(case, q, k, v, do, dlse, operands):
    """o, lse, dq, dk, dv and the gradients by bias and sinks (None without), of the reference in float64."""
    wide = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (q, k, v)]
    tensors = in_torch(operands)
    o, lse = attention_reference(*wide, Operands(**tensors), spec=case.spec, xp=torch)
    do, dlse = (torch.tensor(np.asarray(x, np.float64)) for x in (do, dlse))
    # -inf where nothing is seen: its gradient is nothing, not NaN
    ((o * do).sum() + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()).backward()
    gradients = [x.grad.numpy() for x in wide]
    gradients += [tensors[name].grad.numpy() if name in tensors else None for name in FLOATING]
    return [o.detach().numpy(), lse.detach().numpy(), *gradients]
