"""Errors of torch's own attention in the cases of the feature grid, where it can compute them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xla_attention.benchmarks.feature_cases import Problem


class SdpaError(NamedTuple):
    """Errors of ``scaled_dot_product_attention`` on the CPU, relative to its result in float64.

    Attributes:
        fused: of its flash kernel, to which torch dispatches where head_dim and value_dim are equal.
        math: of its math backend, which computes bfloat16 in float32 and rounds the results alone.
    """

    fused: float
    math: float


def sdpa_errors(problem: Problem) -> dict[str, SdpaError]:
    """By quantity, of those it has: o, dq, dk and dv; none of a softcap, which it does not know.

    What hides keys and what is added to the scores is one additive mask in float32; a sink is a key of zeros;
    values narrower than keys are padded with zeros, since the flash kernel takes one head dim. It has no lse,
    so these are the gradients by ``o`` alone: by q and k there are none where no query sees two keys.
    """
    if "softcap" in problem.options:
        return {}
    added, blind = _additive_mask(problem)
    tensors = [problem.leaves[name] for name in "qkv"]
    do = problem.do.masked_fill(blind, 0.0)
    want = _results(tensors, added, do, problem, SDPBackend.MATH, torch.float64)
    found = (
        _results(tensors, added, do, problem, backend)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    )
    errors = {
        name: SdpaError(*(((x.double() - exact).norm() / (exact.norm() or 1.0)).item() for x in theirs))
        for name, exact, *theirs in zip(("o", "dq", "dk", "dv"), want, *found)
    }
    chooses = (added.isfinite().sum(-1, keepdim=True).gt(1) & ~blind).any()
    return errors if chooses else {name: errors[name] for name in ("o", "dv")}


def _additive_mask(problem: Problem) -> tuple[Tensor, Tensor]:
    """``[batch, heads, q_len, kv_len (+ 1 with a sink)]`` in float64, and which queries see nothing.

    Those see everything there, where torch would answer NaN; they must not count.
    """
    q, k = problem.leaves["q"], problem.leaves["k"]
    sizes = (*q.shape[:3], k.shape[2])
    b, h, rows, columns = (
        torch.arange(n).reshape([-1 if axis == d else 1 for d in range(4)]) for axis, n in enumerate(sizes)
    )
    seen = problem.mask_mod(b, h, rows, columns).broadcast_to(sizes)
    added = torch.zeros(sizes, dtype=torch.float64)
    if "alibi_slopes" in problem.options:
        distance = (rows + problem.query_offset - columns).abs()
        added = added - problem.options["alibi_slopes"][:, None, None] * distance
    if "bias" in problem.leaves:
        added = added + problem.leaves["bias"]
    blind = ~seen.any(-1, keepdim=True)
    added = added.masked_fill(~(seen | blind), -torch.inf)
    if "sinks" in problem.leaves:
        sinks = problem.leaves["sinks"][:, None, None].expand(*sizes[:3], 1)
        added = torch.cat([added, sinks.double()], dim=-1)
    return added, blind


def _results(
    tensors: list[Tensor],
    added: Tensor,
    do: Tensor,
    problem: Problem,
    backend: SDPBackend,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    q, k, v = leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in tensors]
    value_dim = v.shape[-1]
    if added.shape[-1] > k.shape[2]:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    v = F.pad(v, (0, q.shape[-1] - value_dim))
    mask = added.to(dtype or torch.float32)
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=problem.options.get("scale"), enable_gqa=True
        )[..., :value_dim]
    o.backward(do.to(q.dtype))
    return [(o * (do != 0).any(-1, keepdim=True)).detach(), *(x.grad for x in leaves)]
