"""Flash attention for torch: the Pallas kernels on XLA tensors, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pallas_kernels.flash_attention import AttentionSpec, BlockSizes, Operands, attention_reference
from pallas_kernels.masks import Causal, Full, Mask, PerHead, SlidingWindow
from xla_attention.ops.checks import check_finite, check_operands, check_qkv, check_tensor
from xla_attention.ops.flash_ops import kernel_attention
from xla_attention.ops.placement import placement_of_call

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs

_ALIGNMENTS = ("top_left", "bottom_right")
_HIDDEN = -1e30  # a bias that hides its pair; the kernels' own value for it


# Dynamo puts the call into its graph as it stands; followed line by line, it would guard on every static
# argument ever interned, and compile again after each new one.
@torch.compiler.allow_in_graph
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    mask: Mask | PerHead | Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lens: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    partition_spec: Sequence[Any] | None = None,
    mesh: xs.Mesh | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in memory linear in the sequence, differentiable in q, k, v, bias and sinks.

    ::

        s = softcap(scale * q k^T) - slope * |query's position - key's position| + bias
        o = sum_keys exp(s - lse) v          lse = log(exp(sink) + sum_keys exp(s))

    over the keys that a query sees. What hides keys may be combined: a query sees those that ``is_causal``,
    ``sliding_window``, ``mask``, ``segment_ids``, ``q_lens`` and ``kv_lens`` all show.

    On XLA tensors it runs FlashAttention-2 (Dao, 2023, arXiv:2307.08691) as Pallas kernels, in lazy mode and
    under ``torch.compile(backend="openxla")``. On other tensors it runs the definition in float32 (float64
    for float64), in memory quadratic in the sequence: the same model runs in eager torch.

    Under ``torch.autocast`` of the tensors' device, ``q``, ``k`` and ``v`` other than float64 are cast to its
    dtype first, as ``scaled_dot_product_attention`` does on CPU and CUDA.

    Args:
        q: ``[batch, heads, q_len, head_dim]``, float32 or bfloat16; off XLA also float16 or float64. A
            ``head_dim`` of 16 to 576.
        k: ``[batch, kv_heads, kv_len, head_dim]`` in ``q``'s dtype; ``kv_heads`` divides ``heads``, and
            query head ``h`` reads key head ``h // (heads // kv_heads)``.
        v: ``[batch, kv_heads, kv_len, value_dim]``, likewise; a ``value_dim`` of 16 to 512.
        is_causal: query ``i`` sees keys up to ``i``, or as ``causal_alignment`` says.
        causal_alignment: the position of query ``i`` among the keys, for ``is_causal``, ``sliding_window``
            and ``alibi_slopes``, one of which it needs. ``"top_left"``: ``i``, as in
            ``scaled_dot_product_attention``. ``"bottom_right"``: ``i + kv_len - q_len``, so that the last
            query sees every key, as in decoding and FlashAttention; it is the tensors' lengths that count,
            not ``q_lens`` and ``kv_lens``.
        scale: factor of the logits, default ``head_dim ** -0.5``.
        mask: a value of ``xla_attention.masks``, asked about indices of queries and keys as they lie in the
            tensors: tiles that it empties cost nothing. Or ``masks.PerHead([...])``, one for each query
            head: the kernels run once for each mask among them, on the heads that have it (more than once
            only if it is that of more heads of one key head than of another). Or bool ``[1 or batch,
            1 or heads, q_len, kv_len]``, True where a key is seen: it becomes a bias of -1e30 where False, in
            bfloat16 or, broadcast with ``bias``, in that one's dtype, so it takes that memory, and hides
            pairs without saving their time.
        sliding_window: ``(left, right)``: a query at position ``p`` sees keys from ``p - left`` to
            ``p + right``; None leaves a side open. ``n``: with ``is_causal``, the ``n`` keys up to and
            including the query's own (Mistral, arXiv:2310.06825), which is ``(n - 1, 0)``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before anything is added or hidden, as in
            Gemma 2 (arXiv:2408.00118).
        segment_ids: int32 or int64 ``[batch, length]`` for queries and keys alike, or a pair for queries
            ``[batch, q_len]`` and keys ``[batch, kv_len]``: a query sees keys of its own segment. Ids must
            not be negative; where they do not decrease along the sequence, tiles between segments are
            skipped. ``segment_ids_from_lengths`` makes them for packed documents.
        bias: ``[1 or batch, 1 or heads, q_len, kv_len]``, float32 or bfloat16 (off XLA as ``q``), added to
            the logits. At or below -5e29, -inf included, it hides the pair.
        alibi_slopes: ``[heads]``, as in ALiBi (Press et al., arXiv:2108.12409); constants, without gradient.
        sinks: ``[heads]``: the logit of one more key in each head, seen by every query, whose value is zero
            (gpt-oss; Xiao et al., arXiv:2309.17453).
        q_lens: ``[batch]``, int32 or int64: queries from there on see nothing. Lengths are data: other values
            compile nothing anew. Above ``q_len`` they hide nothing.
        kv_lens: ``[batch]``, likewise: keys from there on are seen by none.
        return_lse: also return the logarithm of the softmax denominator.
        block_sizes: tiling of the kernels, default chosen by hardware and shapes; ignored off XLA.
        partition_spec: of an SPMD program, how ``q`` lies on the mesh: what ``mark_sharding`` is told of it,
            four entries. Default is by names, where there is a global mesh: batch over its axes ``data`` and
            ``fsdp``, heads over ``tensor``, the sequence over ``context``; or the placement that
            ``use_attention_placement`` has set, which also says by which method and in which order a sequence
            is sharded. Ignored off XLA.
        mesh: the mesh of ``partition_spec``, or by whose axes' names to shard; default the global mesh.

    Integers of 64 bits are cast to 32, slopes and sinks to float32 (float64 where ``q`` is).

    Returns:
        ``[batch, heads, q_len, value_dim]`` in ``q``'s dtype; zeros, with zero gradients, in a row that sees
        no key. With ``return_lse`` also ``lse [batch, heads, q_len]``: natural logarithm, float32 (float64
        for float64), differentiable; in a row that sees no key the sink, or ``-inf`` without one.

    Raises:
        TypeError: an argument's type, or a dtype that does not fit the device or the other tensors.
        ValueError: a shape, device, value or combination that does not fit; the message names the argument.
    """
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v)
    q_ids, kv_ids = _segment_ids(segment_ids, q, k)
    operands = Operands(q_ids, kv_ids, bias, alibi_slopes, sinks, q_lens, kv_lens)
    check_operands(operands, q, k)
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"block_sizes: got {type(block_sizes).__name__}, needs BlockSizes or None")
    if causal_alignment not in _ALIGNMENTS:
        raise ValueError(f"causal_alignment: got {causal_alignment!r}, allowed are {_ALIGNMENTS}")
    offset = 0
    if causal_alignment == "bottom_right":
        if not is_causal and sliding_window is None and alibi_slopes is None:
            raise ValueError(
                "causal_alignment: 'bottom_right' needs is_causal=True, sliding_window or alibi_slopes"
            )
        offset = int(k.shape[2]) - int(q.shape[2])

    seen = _window(is_causal, sliding_window, offset)
    if isinstance(mask, Tensor):
        operands = operands._replace(bias=_fold(mask, bias, q, k))
    elif isinstance(mask, Mask | PerHead):
        if isinstance(mask, PerHead) and len(mask.masks) != q.shape[1]:
            raise ValueError(f"mask: got masks of {len(mask.masks)} heads, q has {q.shape[1]}")
        seen = seen & mask
    elif mask is not None:
        raise TypeError(
            f"mask: got {type(mask).__name__}, needs a value of xla_attention.masks or a bool tensor; one "
            "mask for each head is masks.PerHead([...])"
        )
    spec = AttentionSpec(
        scale=int(q.shape[-1]) ** -0.5 if scale is None else check_finite("scale", scale),
        mask=seen,
        softcap=None if softcap is None else check_finite("softcap", softcap, positive=True),
        query_offset=0 if alibi_slopes is None else offset,
        block_sizes=block_sizes,
    )
    operands = _cast(operands, q.dtype)
    if q.device.type == "xla":
        placement = placement_of_call(partition_spec, mesh)
        o, lse = kernel_attention(q, k, v, operands, spec, return_lse, placement)
    else:
        o, lse = _eager(q, k, v, operands, spec)
    return (o, lse) if return_lse else o


def _segment_ids(given: Any, q: Tensor, k: Tensor) -> tuple[Any, Any]:
    """The ids of queries and of keys."""
    if given is None:
        return None, None
    if isinstance(given, Tensor):
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"segment_ids: got one tensor for q_len {q.shape[2]} and kv_len {k.shape[2]}; where they "
                "differ, give a pair, (ids of q, ids of k and v)"
            )
        return given, given
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(x, Tensor) for x in given):
        raise TypeError("segment_ids: needs a tensor, or a pair of them, (ids of q, ids of k and v)")
    return given


def _window(is_causal: bool, window: Any, offset: int) -> Mask:
    """The mask of ``is_causal`` and ``sliding_window``; query 0 is at position ``offset``."""
    if window is None:
        return Causal(offset) if is_causal else Full()
    if isinstance(window, tuple) and len(window) == 2:
        left, right = (None if side is None else _count("sliding_window", side, 0) for side in window)
    else:
        left, right = _count("sliding_window", window, 1) - 1, 0
        if not is_causal:
            raise ValueError(
                f"sliding_window: got {window} without is_causal=True; give (left, right), for example "
                f"({left}, {left})"
            )
    return SlidingWindow(left, 0 if is_causal else right, offset)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, needs an int, a pair of int or None, or None")
    if value < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")
    return value


def _fold(mask: Tensor, bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """A bias that hides what the dense ``mask`` hides."""
    shape = ((1, q.shape[0]), (1, q.shape[1]), q.shape[2], k.shape[2])
    check_tensor("mask", mask, q, shape, (torch.bool,))
    if bias is None:
        bias = torch.zeros((), dtype=torch.bfloat16, device=q.device)
    return torch.where(mask, bias, _HIDDEN)


def _cast(operands: Operands, dtype: torch.dtype) -> Operands:
    """The types that the kernels read, and the definition likewise."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    i32 = torch.int32
    types = {"alibi_slopes": wide, "sinks": wide}
    types |= dict.fromkeys(("q_segment_ids", "kv_segment_ids", "q_lens", "kv_lens"), i32)
    given = {name: getattr(operands, name) for name in types}
    return operands._replace(**{name: x.to(types[name]) for name, x in given.items() if x is not None})


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
    if len(kinds) != 1 or not _autocasts(*kinds):
        return tensors
    dtype = torch.get_autocast_dtype(*kinds)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in eligible else x for x in tensors)


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _eager(q: Tensor, k: Tensor, v: Tensor, operands: Operands, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    if dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    kind = q.device.type
    with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():
        o, lse = attention_reference(q, k, v, operands, spec=spec, xp=torch)
    return o.to(dtype), lse
