"""Flash and splash attention of ``jax.experimental.pallas.ops.tpu``, to compile beside ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jaxtyping import Array

from pallas_kernels.masks import Causal, Full, SlidingWindow
from xla_attention.planner.attention_case import AttentionCase

# (queries and keys in VMEM, keys computed at once): what is best somewhere between v4 and v6e, and smaller
# ones that fit where head_dim is large. Flash with 512 everywhere is what torch_xla's wrapper asks for.
_FLASH = {
    "forward": ((512, 512), (1024, 512), (1024, 1024)),
    "backward": ((512, 512), (1024, 512), (1024, 1024)),
}
_SPLASH = {
    "forward": ((512, 512), (1024, 256), (1024, 512)),
    "backward": ((512, 512), (1024, 512), (1024, 1024)),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a case.

    Attributes:
        name: of the implementation.
        blocks: its block sizes, for people.
        fn: a JAX function of arrays alone.
        avals: shape and dtype of each argument.
    """

    name: str
    blocks: str
    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]


def peers(case: AttentionCase) -> Iterator[Candidate]:
    """Every implementation of JAX's that computes the case, with each of a handful of block choices.

    Splash scales no logits and, forward, returns no log-sum-exp; neither is charged to it. Flash knows causal
    and full masks only, and as many heads of keys as of queries: keys and values are repeated for it.
    """
    if not isinstance(case.mask, SlidingWindow):
        for blocks in _fitting(_FLASH[case.direction], case.seq_len):
            yield _flash(case, *blocks)
    for fused in (False, True) if case.direction == "backward" else (False,):
        for blocks in _fitting(_SPLASH[case.direction], case.seq_len):
            yield _splash(case, *blocks, fused=fused)


def _fitting(choices: Iterable[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The choices, cut to the length; those that do not divide it left out."""
    cut = dict.fromkeys((min(block, length), min(compute, length)) for block, compute in choices)
    return [(block, compute) for block, compute in cut if length % block == 0 == block % compute]


def _flash(case: AttentionCase, block: int, compute: int) -> Candidate:
    sizes = flash.BlockSizes(
        block_b=1, block_q=block, block_k_major=block, block_k=compute,
        block_q_major_dkv=block, block_q_dkv=compute, block_k_major_dkv=block, block_k_dkv=compute,
        block_q_dq=block, block_k_major_dq=block, block_k_dq=compute,
    )  # fmt: skip
    group = case.heads // case.kv_heads

    def attention(q: Array, k: Array, v: Array) -> Array:
        k, v = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (k, v))
        return flash.flash_attention(
            q, k, v, causal=isinstance(case.mask, Causal), sm_scale=case.scale, block_sizes=sizes
        )

    return _candidate(case, "JAX flash", f"{block}, {compute}", attention)


def _splash(case: AttentionCase, block: int, compute: int, *, fused: bool) -> Candidate:
    sizes = {"block_q": block, "block_kv": block, "block_kv_compute": compute}
    name = "JAX splash"
    if case.direction == "backward":
        sizes |= {"block_q_dkv": block, "block_kv_dkv": block, "block_kv_dkv_compute": compute}
        sizes |= {"use_fused_bwd_kernel": True} if fused else {"block_q_dq": block, "block_kv_dq": block}
        name += ", fused" if fused else ", two kernels"
    shape = (case.seq_len, case.seq_len)
    match case.mask:
        case Causal():
            mask = splash_masks.CausalMask(shape)
        case Full():
            mask = splash_masks.FullMask(shape)
        case SlidingWindow(left=left):
            mask = splash_masks.LocalMask(shape, (left, 0), 0)
    kernel = splash.make_splash_mha_single_device(
        splash_masks.MultiHeadMask([mask] * case.heads), block_sizes=splash.BlockSizes(**sizes)
    )

    def attention(q: Array, k: Array, v: Array) -> Array:
        if case.batch == 1:  # no needless dimension of the grid
            return kernel(q[0], k[0], v[0])[None]
        return jax.vmap(kernel)(q, k, v)

    tables = jax.tree.leaves((kernel.dq_mask_info, kernel.dkv_mask_info))
    return _candidate(case, name, f"{block}, {compute}", attention, tables)


def _candidate(
    case: AttentionCase,
    name: str,
    blocks: str,
    attention: Callable[[Array, Array, Array], Array],
    tables: Sequence[Array] = (),
) -> Candidate:
    dtype = jnp.dtype(case.dtype)
    q, kv = jax.ShapeDtypeStruct(case.q_shape, dtype), jax.ShapeDtypeStruct(case.kv_shape, dtype)
    if case.direction == "forward":
        return Candidate(name, blocks, attention, (q, kv, kv))
    residuals, pullback = _pullback(attention, (q, kv, kv), tables)
    return Candidate(name, blocks, pullback, (q, *residuals))


def _pullback(
    fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], tables: Sequence[Array]
) -> tuple[list[jax.ShapeDtypeStruct], Callable[..., Any]]:
    """The backward pass alone, a function of the result's gradient and the residuals; and those.

    Compiled together with the forward pass, XLA would keep residuals in VMEM. Integer residuals are the
    ``tables`` that a kernel's schedule is made of, in order, and must stay constants.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *x: jax.vjp(fn, *x)[1], *avals))
    is_table = [jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves]

    def pullback(gradient: Array, *residuals: Array) -> Any:
        constants, arguments = iter(tables), iter(residuals)
        filled = [next(constants) if table else next(arguments) for table in is_table]
        return jax.tree.unflatten(structure, filled)(gradient)

    return [leaf for leaf, table in zip(leaves, is_table) if not table], pullback
