"""Neighbourhood attention: a pixel sees a square around it, within the image (NATTEN, arXiv:2204.07143)."""

import math
from collections.abc import Callable

from torch import Tensor

from xla_attention.flex.variants.variant import Problem, Variant


def natten(height: int, width: int, kernel: int) -> Callable[..., Tensor]:
    """A mask_mod for pixels in rows of ``width``; the square's side ``kernel`` is odd."""
    reach = kernel // 2

    def neighbours(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        centre_y = (q_idx // width).clamp(reach, max(height - 1 - reach, reach))
        centre_x = (q_idx % width).clamp(reach, max(width - 1 - reach, reach))
        y, x = kv_idx // width, kv_idx % width
        return ((centre_y - y).abs() <= reach) & ((centre_x - x).abs() <= reach)

    return neighbours


def example(problem: Problem) -> Variant:
    """As good as a square image, and a third of its side."""
    width = math.ceil(math.sqrt(problem.q_len))
    return Variant(mask_mod=natten(width, width, max(width // 3, 1) | 1))
