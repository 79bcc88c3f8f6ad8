"""A variant as a picture: the scores that it lets through, and which blocks it empties or fills."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from pallas_kernels.flash_attention.score_tiles import apply_to_block
from xla_attention.flex.block_mask import block_states, on_host
from xla_attention.flex.hoist import Sizes, compute, split
from xla_attention.flex.trace import trace
from xla_attention.flex.variants import Problem, Variant

matplotlib.use("Agg")
from matplotlib import colors, pyplot  # noqa: E402

_STATES = colors.ListedColormap(["#ffffff", "#f4a261", "#264653"])


def draw(variant: Variant, problem: Problem, path: Path, *, title: str, block: int, head: int) -> None:
    """Draws one head of batch 0 as a PNG.

    Args:
        variant: made for ``problem``, on the CPU.
        problem: its sizes.
        path: of the PNG.
        title: of the picture.
        block: side of the blocks, in queries and keys.
        head: which is drawn.
    """
    sizes = Sizes(problem.batch, problem.heads, problem.q_len, problem.kv_len)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    image = left.imshow(_scores(variant, sizes)[head], cmap="viridis")
    left.set(title="scores, hidden ones white", xlabel="kv_idx", ylabel="q_idx")
    figure.colorbar(image, ax=left, shrink=0.8)
    some, every = _blocks(variant, sizes, block)
    right.imshow(some[head].astype(int) + every[head], cmap=_STATES, vmin=0, vmax=2)
    right.set(title=f"blocks of {block}: empty, partial, full", xlabel="key block", ylabel="query block")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _scores(variant: Variant, sizes: Sizes) -> np.ndarray:
    """``[heads, q_len, kv_len]`` of batch 0, NaN where hidden; before the score_mod they are smooth waves."""
    q, kv = jnp.arange(sizes.q_len), jnp.arange(sizes.kv_len)
    scores = 2 * jnp.sin(q / 17)[:, None] * jnp.cos(kv / 11)[None]
    scores = jnp.broadcast_to(scores, (sizes.batch, sizes.heads, *scores.shape))
    if variant.score_mod is not None:
        traced = trace(variant.score_mod, "score_mod")
        function, hoisted = split(traced.result, "score_mod")
        captured = tuple(map(on_host, traced.captured))
        operands = [compute(h, captured, sizes) for h in hoisted]
        scores = apply_to_block(function, scores, operands, q, sizes.kv_len)
    seen = _blocks(variant, sizes, 1)[0]
    return np.where(seen & np.isfinite(scores[0]), scores[0], np.nan)


def _blocks(variant: Variant, sizes: Sizes, block: int) -> tuple[np.ndarray, np.ndarray]:
    if variant.mask_mod is None:
        shape = (sizes.heads, -(-sizes.q_len // block), -(-sizes.kv_len // block))
        return np.ones(shape, bool), np.ones(shape, bool)
    with jax.default_device(jax.devices("cpu")[0]):
        some, every = block_states(trace(variant.mask_mod, "mask_mod"), sizes, (block, block))
    return some[0], every[0]
