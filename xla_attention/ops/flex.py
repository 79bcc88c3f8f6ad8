"""FlexAttention: torch's function, on XLA tensors in the flash attention kernels of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions, noop_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from pallas_kernels.flash_attention import AttentionSpec, BlockSizes
from xla_attention.flex.block_mask import listed_mask
from xla_attention.flex.hoist import Sizes
from xla_attention.flex.operands import captured_tensors, compute_operands
from xla_attention.flex.plan import make_plan
from xla_attention.flex.trace import Traced, trace
from xla_attention.ops.checks import check_finite, check_qkv
from xla_attention.ops.flash_ops import kernel_attention
from xla_attention.ops.placement import AttentionPlacement, placement_of_call

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    partition_spec: Sequence[Any] | None = None,
    mesh: xs.Mesh | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention whose scores and mask are torch functions (arXiv:2412.05496), with torch's semantics.

    ::

        s = score_mod(scale * q k^T, b, h, q_idx, kv_idx)     where block_mask's mask_mod is True
        o = softmax(s) v

    On XLA tensors the functions are translated into the Pallas flash attention kernels (FlashAttention-2,
    arXiv:2307.08691), forward and backward, in memory linear in the sequence; on others torch's own
    ``flex_attention`` is called. A function is traced anew on every call, about 10 ms, so that a changed
    closure is never missed; kernels are compiled once for each different function and shape.

    Conditions on indices alone skip tiles that they empty. ``ids[q_idx] == ids[kv_idx]`` and
    ``kv_idx < lengths[b]`` are segments and lengths of ``flash_attention`` and skip tiles as those do; other
    conditions on captured data, on ``b`` or on ``h`` hide pairs in the tiles that they may reach. Captured
    tensors may want gradients: these are computed beside the kernels, at the cost of a pass over all pairs.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, on XLA float32 or bfloat16, ``head_dim`` 16 to 576.
        key: ``[1 or batch, kv_heads, kv_len, head_dim]``.
        value: ``[1 or batch, kv_heads, kv_len, value_dim]``, ``value_dim`` 16 to 512.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars; ``score`` is float32. It may use the
            operators of ``xla_attention.flex.operators`` and index tensors of ``query``'s device that it
            captures; indices out of range are clamped. ``-inf`` hides a pair, as does anything at or below
            -5e29. Integers are of 32 bits.
        block_mask: from ``create_block_mask``, ours or torch's. Its mask_mod may capture tensors of any
            device, and alone says what is visible: lists that hide more than it are not read. Where there is
            none (``BlockMask.from_kv_blocks``), the lists say it.
        scale: factor of the scores, default ``head_dim ** -0.5``.
        enable_gqa: allow fewer heads of key and value; they must divide those of the query.
        return_lse: also return the log-sum-exp ``[batch, heads, q_len]``, float32 and differentiable;
            ``-inf`` where a query sees nothing, whose output is zero.
        kernel_options: ``{"block_sizes": BlockSizes}`` sets the tiling; torch's own options, which tune
            Triton kernels, have no effect here.
        return_aux: torch's newer form of ``return_lse``; ``max_scores`` is not computed here.
        partition_spec, mesh: as of ``flash_attention``: in an SPMD program, how ``query`` lies on the mesh.
            What the functions capture is the same on every device.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in ``query``'s dtype, and what else is asked for.

    Raises:
        TypeError: an argument of a wrong type, or dtypes that do not fit.
        ValueError: a shape, device or option that does not fit; the message names the argument.
        FlexTraceError: a ValueError; a function that cannot be translated, and what to write instead.
    """
    if isinstance(query, Tensor) and query.device.type == "xla":
        o, lse = _on_xla(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse or (return_aux is not None and return_aux.lse),
            _block_sizes(kernel_options),
            placement_of_call(partition_spec, mesh),
        )
        if return_aux is None:
            return (o, lse) if return_lse else o
        if return_lse or return_aux.max_scores:
            raise ValueError(
                "return_aux: on XLA it may ask for lse alone, and return_lse may not be given beside it"
            )
        return o, AuxOutput(lse=lse if return_aux.lse else None)
    return torch_flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )


# Dynamo cannot put a closure's captured tensors into its graph for an operator that is not its own: the graph
# is cut here, and the call runs lazily between its parts.
@torch.compiler.disable
def _on_xla(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    differentiate_lse: bool,
    block_sizes: BlockSizes | None,
    placement: AttentionPlacement | None,
) -> tuple[Tensor, Tensor]:
    key, value = (_broadcast(x, query) for x in (key, value))
    check_qkv(query, key, value)
    batch, heads, q_len, head_dim = query.shape
    if key.shape[1] != heads and not enable_gqa:
        raise ValueError(f"enable_gqa: is False, but query has {heads} heads, key and value {key.shape[1]}")
    sizes = Sizes(batch, heads, q_len, key.shape[2])
    score = trace(score_mod, "score_mod") if score_mod is not None else None
    mask = _trace_mask(block_mask, sizes)
    captured = captured_tensors(score, mask, "query", query.device)
    trained = frozenset(n for n, x in enumerate(captured) if torch.is_grad_enabled() and x.requires_grad)
    plan = make_plan(score, mask, sizes, trained)
    spec = AttentionSpec(
        scale=head_dim**-0.5 if scale is None else check_finite("scale", scale),
        mask=plan.mask,
        softcap=plan.softcap,
        score=plan.score,
        block_sizes=block_sizes,
    )
    if plan.names() and placement and placement.sequence and placement.layout == "zigzag":
        raise ValueError(
            "score_mod, block_mask: they may not capture tensors where the sequence lies in a zig-zag, whose "
            "order those have not; take layout='contiguous'"
        )
    operands = compute_operands(plan, captured, query)
    return kernel_attention(query, key, value, operands, spec, differentiate_lse, placement)


def _broadcast(x: Tensor, query: Tensor) -> Tensor:
    if isinstance(x, Tensor) and x.ndim == 4 and x.shape[0] == 1 < query.shape[0]:
        return x.expand(query.shape[0], -1, -1, -1)
    return x


def _trace_mask(block_mask: BlockMask | None, sizes: Sizes) -> Traced | None:
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, needs a BlockMask of create_block_mask"
        )
    *leading, q_len, kv_len = block_mask.shape
    if (q_len, kv_len) != (sizes.q_len, sizes.kv_len):
        raise ValueError(
            f"block_mask: made for lengths {(q_len, kv_len)}, but query and key have "
            f"{(sizes.q_len, sizes.kv_len)}; create one for these"
        )
    if any(n not in (1, m) for n, m in zip(leading, (sizes.batch, sizes.heads))):
        raise ValueError(
            f"block_mask: made for batch and heads {tuple(leading)}, needs 1 or {sizes.batch}, and 1 or "
            f"{sizes.heads}"
        )
    mask_mod = listed_mask(block_mask) if block_mask.mask_mod in (None, noop_mask) else block_mask.mask_mod
    return trace(mask_mod, "mask_mod")


def _block_sizes(options: dict[str, Any] | None) -> BlockSizes | None:
    options = dict(options or {})
    block_sizes = options.pop("block_sizes", None)
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"kernel_options: block_sizes is {type(block_sizes).__name__}, needs BlockSizes")
    known = FlexKernelOptions.__annotations__
    for name in options:
        if name.removeprefix("fwd_").removeprefix("bwd_") not in known:
            raise ValueError(
                f"kernel_options: got {name!r}, known are block_sizes and torch's FlexKernelOptions"
            )
    return block_sizes
