"""Paged attention for torch: the Pallas kernel on XLA tensors, the plain definition elsewhere.

In an SPMD program whose placement (:mod:`xla_attention.ops.placement`) has an axis for heads, and kv heads
divide over its ``n`` devices, the columns of ``kv_pages`` are ``n`` parts, and each is the pages of one
device's heads: their keys, then their values. Writing and reading then need no exchange. Else every device
computes all of it.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from pallas_kernels.paged_attention import PagedOperands, PagedSpec
from pallas_kernels.paged_attention import combine_kv_pages as _combine
from pallas_kernels.paged_attention import split_kv_pages as _split
from xla_attention.flex.block_mask import MaskMod
from xla_attention.flex.operands import captured_tensors
from xla_attention.flex.paged import make_paged_plan
from xla_attention.flex.trace import trace
from xla_attention.ops.checks import check_finite, check_tensor
from xla_attention.ops.flex import ScoreMod
from xla_attention.ops.paged_eager import Functions, attend_eagerly
from xla_attention.ops.paged_ops import kernel_attention, kernel_update

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
_INTEGERS = (torch.int32, torch.int64)
_QUERIES = (torch.float32, torch.bfloat16)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_CACHES = (torch.float32, torch.bfloat16, *_EIGHT_BITS)
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest value of each type


def paged_attention(
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Attention of one query a sequence, its last token, to keys and values in pages. No gradient.

    Args:
        q: ``[seqs, heads, head_dim]``, float32 or bfloat16.
        kv_pages: ``[num_pages, page_size, 2 * kv_heads * head_dim]``: a row is one token, the keys of all
            heads and then the values; see :func:`combine_kv_pages`. float32, bfloat16, int8 or float8_e4m3fn;
            pages of 8 to 256 tokens, of 8 bits at least 32.
        kv_lens: ``[seqs]`` int32 or int64: tokens in the cache, the query's own among them. 0 reads nothing;
            what is beyond the table's pages is cut.
        page_indices: ``[seqs, pages_per_seq]``, likewise: pages in order. An index outside the pool is
            clamped to it: nothing outside is ever read.
        scale: factor of the logits, default ``head_dim ** -0.5``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv:2408.00118).
        sliding_window: a query sees that many keys, its own the last (Mistral, arXiv:2310.06825); pages
            before are not read.
        sinks: ``[heads]``: the logit of one more key of each head, whose value is zero (arXiv:2309.17453).
        k_scale: factor of the keys in pages of 8 bits: a number, ``[kv_heads]`` or ``[num_pages, kv_heads]``
            float32. Default 1.
        v_scale: of the values, likewise.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` as of :func:`flex_attention`: ``b`` is the
            sequence, ``h`` the query head, and ``q_idx`` and ``kv_idx`` are positions in the sequence, not in
            this call. It takes the place of ``softcap``.
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, likewise; what is causal, or a window, stays as it is.
            Both are traced anew at every call, about 10 ms. Of captured tensors, what is indexed by
            sequence, head and query costs a row of lanes for each query and head; what is indexed by key is
            written down for each sequence and key, and by head or query too for each query, head and key, 4
            bytes each: for long chunks of queries that is much.

    Returns:
        Like ``q``; zeros where ``kv_lens`` is 0, and where nothing is seen.

    Raises:
        TypeError: an argument's type or dtype.
        ValueError: a shape, device or value that does not fit; the message names the argument.
        FlexTraceError: a ValueError; a function that cannot be translated, and what to write instead.
    """
    _check(q, kv_pages, kv_lens, page_indices, ("seqs", "heads", "head_dim"))
    functions = Functions(score_mod, mask_mod)
    spec, operands = _static(q, kv_pages, scale, softcap, sliding_window, sinks, k_scale, v_scale, functions)
    check_tensor("q", q, q, (page_indices.shape[0], *q.shape[1:]), _QUERIES)
    if q.device.type == "xla":
        return _on_xla("decode", q, kv_pages, kv_lens, page_indices, operands, spec, functions)
    cu = torch.arange(q.shape[0] + 1)
    return attend_eagerly(q, kv_pages, kv_lens, page_indices, cu, q.shape[0], operands, spec, functions)


def multi_queries_paged_attention(
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    q_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Attention of a chunk of queries a sequence, its last tokens, causally. No gradient.

    Args:
        q: ``[seqs, q_len, heads, head_dim]``; of each sequence the first ``q_lens`` are queries.
        q_lens: ``[seqs]`` int32 or int64; None for ``q_len`` everywhere, and cut to it.
        kv_pages, kv_lens, page_indices, scale, softcap, sliding_window, sinks, k_scale, v_scale,
            score_mod, mask_mod: as of :func:`paged_attention`.

    Returns:
        Like ``q``; zeros behind ``q_lens``, and in rows that see no key.

    Raises:
        TypeError, ValueError: as of :func:`paged_attention`.
    """
    _check(q, kv_pages, kv_lens, page_indices, ("seqs", "q_len", "heads", "head_dim"))
    functions = Functions(score_mod, mask_mod)
    spec, operands = _static(q, kv_pages, scale, softcap, sliding_window, sinks, k_scale, v_scale, functions)
    seqs, q_len = page_indices.shape[0], q.shape[1]
    check_tensor("q", q, q, (seqs, *q.shape[1:]), _QUERIES)
    check_tensor("q_lens", q_lens, q, (seqs,), _INTEGERS)
    if q.device.type == "xla":
        return _on_xla("multi", q, kv_pages, kv_lens, page_indices, operands, spec, functions, q_lens)
    n = torch.full((seqs,), q_len) if q_lens is None else q_lens.clamp(0, q_len)
    valid = torch.arange(q_len) < n[:, None]
    cu = torch.cat([torch.zeros(1, dtype=n.dtype), n.cumsum(0)])
    o = torch.zeros_like(q)
    o[valid] = attend_eagerly(q[valid], kv_pages, kv_lens, page_indices, cu, seqs, operands, spec, functions)
    return o


def ragged_paged_attention(
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Attention of a flat batch in which sequences have any number of queries: prefill and decoding mixed.

    Args:
        q: ``[total_q, heads, head_dim]``.
        cu_q_lens: ``[seqs + 1]`` int32 or int64: sequence s has the queries ``cu_q_lens[s]`` up to, not
            including, ``cu_q_lens[s + 1]``; they are its last tokens.
        num_seqs: ``[1]``, likewise: sequences from there on are dead; nothing of them is read.
        kv_pages, kv_lens, page_indices, scale, softcap, sliding_window, sinks, k_scale, v_scale,
            score_mod, mask_mod: as of :func:`paged_attention`.

    Returns:
        Like ``q``; zeros in rows of no live sequence, and in rows that see no key.

    Raises:
        TypeError, ValueError: as of :func:`paged_attention`.
    """
    _check(q, kv_pages, kv_lens, page_indices, ("total_q", "heads", "head_dim"))
    functions = Functions(score_mod, mask_mod)
    spec, operands = _static(q, kv_pages, scale, softcap, sliding_window, sinks, k_scale, v_scale, functions)
    check_tensor("cu_q_lens", _given("cu_q_lens", cu_q_lens), q, (page_indices.shape[0] + 1,), _INTEGERS)
    check_tensor("num_seqs", _given("num_seqs", num_seqs), q, (1,), _INTEGERS)
    if q.device.type == "xla":
        return _on_xla(
            "ragged", q, kv_pages, kv_lens, page_indices, operands, spec, functions, cu_q_lens, num_seqs
        )
    return attend_eagerly(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs[0], operands, spec, functions
    )


def update_kv_pages(
    kv_pages: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Writes keys and values of new tokens into the pages, in place.

    Args:
        kv_pages: as of :func:`paged_attention`; on XLA its buffer is reused, not copied.
        k: ``[tokens, kv_heads, head_dim]``, in the dtype of the pages, or float32 or bfloat16 for pages of 8
            bits: then divided by ``k_scale``, and rounded to the nearest value that the pages can hold.
        v: likewise.
        slots: ``[tokens]`` int32 or int64: ``page * page_size + row`` of each token. Outside the pool,
            negative ones included, a token is dropped; of equal ones the last is kept.
        k_scale: a number, ``[kv_heads]`` or ``[num_pages, kv_heads]`` float32; for pages of 8 bits only.
            Default 1. What is in a page already keeps the scale that it was written with: choose a page's
            before its first token.
        v_scale: likewise.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    for name, x in (("kv_pages", kv_pages), ("k", k), ("v", v), ("slots", slots)):
        _given(name, x)
    if k.ndim != 3:
        raise ValueError(f"k: got shape {tuple(k.shape)}, needs [tokens, kv_heads, head_dim]")
    quantised = kv_pages.dtype in _EIGHT_BITS
    tokens, kv_heads, dim = k.shape
    check_tensor("kv_pages", kv_pages, k, (*kv_pages.shape[:2], 2 * kv_heads * dim), _CACHES)
    _check_page_size(kv_pages)
    check_tensor("k", k, k, tuple(k.shape), _QUERIES if quantised else (kv_pages.dtype,))
    check_tensor("v", v, k, tuple(k.shape), (k.dtype,))
    check_tensor("slots", slots, k, (tokens,), _INTEGERS)
    if tokens == 0:
        return
    rows = []
    for name, x, factor in (("k_scale", k, k_scale), ("v_scale", v, v_scale)):
        scales = _scale(name, factor, kv_pages, kv_heads)
        if quantised:
            if scales is not None and scales.ndim == 2:
                scales = scales[(slots // kv_pages.shape[1]).clamp(0, len(scales) - 1).long()]
            x = x.float() if scales is None else x.float() / scales[..., None]
            most = _MOST[kv_pages.dtype]
            x = x.clamp(-most, most)
            x = (x.round() if kv_pages.dtype == torch.int8 else x).to(kv_pages.dtype)
        rows.append(x.reshape(tokens, kv_heads * dim))
    if kv_pages.device.type == "xla":
        kernel_update(kv_pages, *rows, _i32(slots), kv_heads)
        return
    kv = torch.cat(rows, dim=1)
    pages, size, _ = kv_pages.shape
    for slot, row in zip(slots.tolist(), kv.detach()):
        if 0 <= slot < pages * size:
            kv_pages[slot // size, slot % size] = row


def combine_kv_pages(k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """``kv_pages`` from ``k_pages`` and ``v_pages [kv_heads, num_pages, page_size, head_dim]``, which
    JAX's and torch_xla's ``paged_attention`` take."""
    return _combine(k_pages, v_pages, torch)


def split_kv_pages(kv_pages: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`combine_kv_pages`.

    Raises:
        TypeError, ValueError: ``kv_pages`` is not a tensor of pages, or does not hold ``kv_heads`` heads.
    """
    _given("kv_pages", kv_pages)
    if kv_pages.ndim != 3:
        raise ValueError(
            f"kv_pages: got shape {tuple(kv_pages.shape)}, needs [num_pages, page_size, columns]"
        )
    if kv_heads < 1 or kv_pages.shape[2] % (2 * kv_heads):
        raise ValueError(
            f"kv_heads: got {kv_heads}, which must, doubled, divide the {kv_pages.shape[2]} columns"
        )
    return _split(kv_pages, kv_heads, torch)


def _given(name: str, x: object) -> object:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a torch.Tensor")
    return x


def _check(
    q: Tensor, kv_pages: Tensor, kv_lens: Tensor, page_indices: Tensor, layout: tuple[str, ...]
) -> None:
    for name, x in (("q", q), ("kv_pages", kv_pages), ("kv_lens", kv_lens), ("page_indices", page_indices)):
        _given(name, x)
    if q.ndim != len(layout) or 0 in q.shape:
        raise ValueError(f"q: got shape {tuple(q.shape)}, needs [{', '.join(layout)}], none of them 0")
    heads, dim = q.shape[-2:]
    if kv_pages.ndim != 3 or 0 in kv_pages.shape or kv_pages.shape[2] % (2 * dim):
        raise ValueError(
            f"kv_pages: got shape {tuple(kv_pages.shape)}, needs [num_pages, page_size, 2 * kv_heads * {dim}]"
        )
    check_tensor("q", q, q, tuple(q.shape), _QUERIES)
    check_tensor("kv_pages", kv_pages, q, tuple(kv_pages.shape), _CACHES)
    kv_heads = kv_pages.shape[2] // (2 * dim)
    if heads % kv_heads:
        raise ValueError(f"kv_pages: got {kv_heads} heads, which must divide the {heads} heads of q")
    _check_page_size(kv_pages)
    if page_indices.ndim != 2 or 0 in page_indices.shape:
        raise ValueError(f"page_indices: got shape {tuple(page_indices.shape)}, needs [seqs, pages_per_seq]")
    check_tensor("page_indices", page_indices, q, tuple(page_indices.shape), _INTEGERS)
    check_tensor("kv_lens", kv_lens, q, (page_indices.shape[0],), _INTEGERS)


def _check_page_size(kv_pages: Tensor) -> None:
    page_size = kv_pages.shape[1]
    if page_size not in PAGE_SIZES:
        raise ValueError(f"kv_pages: got pages of {page_size} tokens, allowed are {PAGE_SIZES}")
    if kv_pages.dtype in _EIGHT_BITS and page_size < 32:
        raise ValueError(f"kv_pages: got pages of {page_size} tokens in {kv_pages.dtype}, needs 32 or more")


def _static(
    q: Tensor,
    kv_pages: Tensor,
    scale: float | None,
    softcap: float | None,
    sliding_window: int | None,
    sinks: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    functions: Functions,
) -> tuple[PagedSpec, PagedOperands]:
    if softcap is not None and functions.score_mod is not None:
        raise ValueError("softcap: got one beside score_mod, which takes its place; write it there")
    heads, dim = q.shape[-2:]
    if sliding_window is not None and (
        isinstance(sliding_window, bool) or not isinstance(sliding_window, int)
    ):
        raise TypeError(f"sliding_window: got {type(sliding_window).__name__}, needs an int or None")
    spec = PagedSpec(
        scale=dim**-0.5 if scale is None else check_finite("scale", scale),
        softcap=None if softcap is None else check_finite("softcap", softcap, positive=True),
        sliding_window=sliding_window,
    )
    check_tensor("sinks", sinks, q, (heads,), _QUERIES)
    kv_heads = kv_pages.shape[2] // (2 * dim)
    scales = [_scale(n, x, kv_pages, kv_heads) for n, x in (("k_scale", k_scale), ("v_scale", v_scale))]
    return spec, PagedOperands(None if sinks is None else sinks.float(), *scales)


def _scale(name: str, x: float | Tensor | None, kv_pages: Tensor, kv_heads: int) -> Tensor | None:
    """``[kv_heads]`` or ``[num_pages, kv_heads]`` float32."""
    if x is None:
        return None
    if kv_pages.dtype not in _EIGHT_BITS:
        raise ValueError(f"{name}: got one for pages in {kv_pages.dtype}; only those of 8 bits have scales")
    if isinstance(x, Tensor):
        shape = (kv_heads,) if x.ndim == 1 else (kv_pages.shape[0], kv_heads)
        check_tensor(name, x, kv_pages, shape, (torch.float32,))
        return x
    return _constant(check_finite(name, x, positive=True), kv_heads, kv_pages.device)


@functools.lru_cache(maxsize=256)
def _constant(value: float, n: int, device: torch.device) -> Tensor:
    return torch.full((n,), value, device=device)


def _i32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32)


def _on_xla(
    kind: str,
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    operands: PagedOperands,
    spec: PagedSpec,
    functions: Functions,
    q_lens: Tensor | None = None,
    num_seqs: Tensor | None = None,
) -> Tensor:
    pages = (q, kv_pages, *map(_i32, (kv_lens, page_indices)))
    lens = {"q_lens": _i32(q_lens), "num_seqs": _i32(num_seqs)}
    if functions == Functions():
        return kernel_attention(kind, *pages, operands, spec, **lens)
    return _traced(kind, *pages, operands, spec, functions, lens)


# As of flex_attention: Dynamo cannot put what a closure captures into its graph.
@torch.compiler.disable
def _traced(
    kind: str,
    q: Tensor,
    kv_pages: Tensor,
    kv_lens: Tensor,
    page_indices: Tensor,
    operands: PagedOperands,
    spec: PagedSpec,
    functions: Functions,
    lens: dict[str, Tensor | None],
) -> Tensor:
    score, mask = (None if fn is None else trace(fn, name) for name, fn in functions._asdict().items())
    captured = captured_tensors(score, mask, "q", q.device)
    plan = make_paged_plan(score, mask, spec.softcap)
    windows = [n for n in (spec.sliding_window, plan.sliding_window) if n is not None]
    spec = dataclasses.replace(
        spec, sliding_window=min(windows, default=None), softcap=plan.softcap, score=plan.score
    )
    return kernel_attention(
        kind, q, kv_pages, kv_lens, page_indices, operands, spec, **lens, plan=plan, captured=captured
    )
