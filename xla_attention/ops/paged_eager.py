"""Paged attention of tensors that are not XLA's: by its definition, or with functions by torch's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from pallas_kernels.paged_attention import PagedOperands, PagedSpec, ragged_paged_attention_reference
from pallas_kernels.paged_attention.reference import scale_of_keys
from xla_attention.flex.block_mask import MaskMod
from xla_attention.ops.flex import ScoreMod


class Functions(NamedTuple):
    """What a call is given beside numbers, as of ``flex_attention``."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None


@torch.no_grad()
def attend_eagerly(
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: int | Tensor,
    operands: PagedOperands,
    spec: PagedSpec,
    functions: Functions,
) -> Tensor:
    """Attention of a flat batch, in float32; arguments as of ``ragged_paged_attention``."""
    call = (q.float(), kv_pages.float(), kv_lens, page_indices, cu_q_lens)
    if functions == Functions():
        wide = ragged_paged_attention_reference(*call, [num_seqs], operands, spec=spec, xp=torch)
    else:
        wide = _by_sequence(*call, int(num_seqs), operands, spec, functions)
    return wide.to(q.dtype)


def _by_sequence(
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: int,
    operands: PagedOperands,
    spec: PagedSpec,
    functions: Functions,
) -> Tensor:
    """torch's flex_attention of one sequence after the other; sinks join its sums afterwards."""
    num_pages, page_size, width = kv_pages.shape
    cu = cu_q_lens.clamp(0, len(q)).cummax(0).values.tolist()
    out = torch.zeros_like(q)
    for s in range(min(num_seqs, len(kv_lens))):
        first, stop = cu[s], cu[s + 1]
        kv_len = min(max(int(kv_lens[s]), 0), page_indices.shape[1] * page_size)
        if first == stop or kv_len == 0:
            continue
        pages = page_indices[s, : -(-kv_len // page_size)].long().clamp(0, num_pages - 1)
        rows = kv_pages[pages].reshape(-1, width)[:kv_len].reshape(kv_len, 2, -1, q.shape[2])
        k, v = (x.transpose(0, 1) for x in rows.unbind(1))
        if operands.k_scale is not None:
            k = k * scale_of_keys(operands.k_scale, pages.tolist(), page_size, kv_len)
        if operands.v_scale is not None:
            v = v * scale_of_keys(operands.v_scale, pages.tolist(), page_size, kv_len)
        o, lse = torch_flex_attention(
            q[None, first:stop].transpose(1, 2), k[None], v[None],
            _score_mod(spec, functions, s, kv_len - (stop - first)),
            scale=spec.scale, enable_gqa=True, return_lse=True,
        )  # fmt: skip
        if operands.sinks is not None:
            o = o * torch.sigmoid(lse - operands.sinks[:, None])[..., None]
        out[first:stop] = o[0].transpose(0, 1)
    return out


def _score_mod(spec: PagedSpec, functions: Functions, sequence: int, before: int) -> ScoreMod:
    """Everything that changes the scores of a sequence whose first query is at position ``before``."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        b, q_idx = b + sequence, q_idx + before
        seen = spec.mask().visible(q_idx, kv_idx)
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if functions.score_mod is not None:
            score = functions.score_mod(score, b, h, q_idx, kv_idx)
        if functions.mask_mod is not None:
            seen = seen & functions.mask_mod(b, h, q_idx, kv_idx)
        return torch.where(seen, score, -torch.inf)

    return score_mod
