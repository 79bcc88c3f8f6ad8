"""One attention problem to compile and count: shapes, type, mask, and the FLOPs that are useful in it."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

import numpy as np

from pallas_kernels.masks import Causal, Full, Mask, SlidingWindow

Direction = Literal["forward", "backward"]
# Products of queries by keys by head_dim: S and O; S again, dV, dP, dQ and dK.
_PRODUCTS = {"forward": 2, "backward": 5}
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Self-attention of ``q [batch, heads, seq_len, head_dim]``, in one direction.

    Attributes:
        batch, heads, kv_heads, seq_len, head_dim: sizes; ``kv_heads`` divides ``heads``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        mask: which keys each query sees; a function of their distance.
        direction: ``"forward"``, or ``"backward"``: the gradients by q, k and v.

    Raises:
        ValueError: an attribute is not as above; the message names it.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: str
    mask: Mask
    direction: Direction

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "seq_len", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, must divide heads={self.heads}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, allowed are {', '.join(_DTYPES)}")
        if self.direction not in get_args(Direction):
            raise ValueError(f"pass: got {self.direction!r}, allowed are {', '.join(get_args(Direction))}")
        if not self.mask.shift_invariant:
            raise ValueError(f"mask: got {self.mask}, which depends on more than the distance")

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, {self.heads} heads on {self.kv_heads} of keys, length {self.seq_len}, "
            f"head_dim {self.head_dim}, {self.dtype}, {self.mask}"
        )

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.seq_len, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.kv_heads, self.seq_len, self.head_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one head."""
        distance = np.arange(1 - self.seq_len, self.seq_len)
        seen = np.broadcast_to(self.mask.visible(distance, np.zeros_like(distance)), distance.shape)
        return int((self.seq_len - np.abs(distance)) @ seen)

    @property
    def useful_flops(self) -> int:
        """FLOPs of the matrix products, for the visible pairs alone."""
        products = _PRODUCTS[self.direction]
        return 2 * products * self.visible_pairs * self.head_dim * self.batch * self.heads


def parse_mask(name: str) -> Mask:
    """The mask called ``causal``, ``full``, or ``window:N``: causal, each query sees N keys, itself included.

    Raises:
        ValueError: no such mask.
    """
    if window := re.fullmatch(r"window:([1-9]\d*)", name):
        return SlidingWindow(left=int(window[1]) - 1)
    masks = {"causal": Causal(), "full": Full()}
    if name not in masks:
        raise ValueError(f"mask: got {name!r}, allowed are causal, full and window:N")
    return masks[name]
