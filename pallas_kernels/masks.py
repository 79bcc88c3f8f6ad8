"""Masks as small lazy values: a predicate on indices, and what it says of a whole tile.

A mask never becomes an array of queries by keys. It answers two questions:

* ``visible(q, kv)``: the predicate itself, on broadcastable index arrays of any array library
  (NumPy in schedules, JAX in kernels, torch in the eager reference);
* ``bounds(q0, q1, kv0, kv1)``: for tiles ``[q0, q1) x [kv0, kv1)``, whether any pair, and whether every
  pair, is visible. Integer arrays broadcast, so one call answers for many tiles. The answer may be
  cautious (any when none, not every when every) only for composed masks; it costs work, never a result.

Masks compose with ``&``, ``|`` and ``~``. :class:`PerHead` holds one for each query head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Index = Any  # an integer array of NumPy, JAX or torch, or an int
Answer = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Subclasses are frozen, hashable and hold only static values."""

    def visible(self, q: Index, kv: Index) -> Any:
        """Whether query ``q`` sees key ``kv``: booleans of the broadcast shape."""
        raise NotImplementedError

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        """(any, every) pair of the tiles ``[q0, q1) x [kv0, kv1)`` visible; tiles are not empty."""
        raise NotImplementedError

    @property
    def shift_invariant(self) -> bool:
        """Whether ``visible`` depends on ``q - kv`` alone."""
        return False

    def hides_after(self, offset: int) -> bool:
        """Whether no query ``q`` sees a key after ``q + offset``; False if that is not known."""
        return False

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return self if isinstance(other, Full) else And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: Index, kv: Index) -> Any:
        return (q == q) & (kv == kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        yes = np.ones(np.broadcast_shapes(np.shape(q0), np.shape(kv0)), bool)
        return yes, yes

    @property
    def shift_invariant(self) -> bool:
        return True

    def __and__(self, other: Mask) -> Mask:
        return other if isinstance(other, Mask) else NotImplemented


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Query ``q`` sees keys up to ``q + offset``.

    ``offset=0`` aligns the diagonal top-left, as ``scaled_dot_product_attention(is_causal=True)`` does;
    ``offset=kv_len - q_len`` aligns it bottom-right, as decoding and FlashAttention do.
    """

    offset: int = 0

    def visible(self, q: Index, kv: Index) -> Any:
        return kv <= q + self.offset

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        return np.asarray(kv0 <= q1 - 1 + self.offset), np.asarray(kv1 - 1 <= q0 + self.offset)

    @property
    def shift_invariant(self) -> bool:
        return True

    def hides_after(self, offset: int) -> bool:
        return self.offset <= offset


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query ``q`` sees keys from ``q + offset - left`` to ``q + offset + right``; None leaves a side open.

    Mistral's window of ``n`` tokens, itself among them, is ``left=n - 1, right=0``.
    """

    left: int | None
    right: int | None = 0
    offset: int = 0

    def visible(self, q: Index, kv: Index) -> Any:
        seen = (q == q) & (kv == kv)
        if self.left is not None:
            seen = seen & (kv >= q + (self.offset - self.left))
        if self.right is not None:
            seen = seen & (kv <= q + (self.offset + self.right))
        return seen

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        some, every = Full().bounds(q0, q1, kv0, kv1)
        if self.left is not None:
            some = some & (kv1 - 1 >= q0 + self.offset - self.left)
            every = every & (kv0 >= q1 - 1 + self.offset - self.left)
        if self.right is not None:
            some = some & (kv0 <= q1 - 1 + self.offset + self.right)
            every = every & (kv1 - 1 <= q0 + self.offset + self.right)
        return some, every

    @property
    def shift_invariant(self) -> bool:
        return True

    def hides_after(self, offset: int) -> bool:
        return self.right is not None and self.offset + self.right <= offset


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Query and key lie in one chunk of ``size`` positions; with ``Causal``, Llama 4's local attention."""

    size: int

    def visible(self, q: Index, kv: Index) -> Any:
        return q // self.size == kv // self.size

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        q_first, q_last = np.asarray(q0) // self.size, (np.asarray(q1) - 1) // self.size
        kv_first, kv_last = np.asarray(kv0) // self.size, (np.asarray(kv1) - 1) // self.size
        every = (q_first == kv_last) & (q_last == kv_first)
        return (q_first <= kv_last) & (kv_first <= q_last), every


@dataclasses.dataclass(frozen=True)
class KeyLength(Mask):
    """Every query sees the first ``length`` keys."""

    length: int

    def visible(self, q: Index, kv: Index) -> Any:
        return (kv < self.length) & (q == q)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        shape = np.broadcast_shapes(np.shape(q0), np.shape(kv0))
        return np.broadcast_to(kv0 < self.length, shape), np.broadcast_to(kv1 <= self.length, shape)


def prefix_lm(prefix: int, offset: int = 0) -> Mask:
    """Every query sees the first ``prefix`` keys, and later ones causally (T5, arXiv:1910.10683)."""
    return Causal(offset) | KeyLength(prefix)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Pairs that both masks show."""

    left: Mask
    right: Mask

    def visible(self, q: Index, kv: Index) -> Any:
        return self.left.visible(q, kv) & self.right.visible(q, kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        (some, every), (some_, every_) = (m.bounds(q0, q1, kv0, kv1) for m in (self.left, self.right))
        return some & some_, every & every_

    @property
    def shift_invariant(self) -> bool:
        return self.left.shift_invariant and self.right.shift_invariant

    def hides_after(self, offset: int) -> bool:
        return self.left.hides_after(offset) or self.right.hides_after(offset)


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Pairs that either mask shows."""

    left: Mask
    right: Mask

    def visible(self, q: Index, kv: Index) -> Any:
        return self.left.visible(q, kv) | self.right.visible(q, kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        (some, every), (some_, every_) = (m.bounds(q0, q1, kv0, kv1) for m in (self.left, self.right))
        return some | some_, every | every_

    @property
    def shift_invariant(self) -> bool:
        return self.left.shift_invariant and self.right.shift_invariant


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """Pairs that the mask hides."""

    mask: Mask

    def visible(self, q: Index, kv: Index) -> Any:
        return ~self.mask.visible(q, kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        some, every = self.mask.bounds(q0, q1, kv0, kv1)
        return ~every, ~some

    @property
    def shift_invariant(self) -> bool:
        return self.mask.shift_invariant


@dataclasses.dataclass(frozen=True)
class Shifted(Mask):
    """The mask of another part of the sequence: query ``q`` sees what ``q + offset`` sees in ``mask``.

    Attributes:
        mask: of the whole.
        offset: position of query 0, less that of key 0.
    """

    mask: Mask
    offset: int

    def visible(self, q: Index, kv: Index) -> Any:
        return self.mask.visible(q + self.offset, kv)

    def bounds(self, q0: Index, q1: Index, kv0: Index, kv1: Index) -> Answer:
        return self.mask.bounds(q0 + self.offset, q1 + self.offset, kv0, kv1)

    @property
    def shift_invariant(self) -> bool:
        return self.mask.shift_invariant

    def hides_after(self, offset: int) -> bool:
        return self.mask.hides_after(offset - self.offset)


@dataclasses.dataclass(frozen=True)
class PerHead:
    """A mask for each query head, such as local attention in some heads and global in others.

    What splash attention calls ``MultiHeadMask``. ``&``, ``|`` and ``~`` work head by head; a single mask on
    the other side stands for all heads.

    Attributes:
        masks: one for each query head, in order; any sequence is taken.

    Raises:
        TypeError: an element is no single mask.
        ValueError: there is none, or two of these that are combined have different numbers of heads.
    """

    masks: Sequence[Mask]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        if not self.masks:
            raise ValueError("masks: got none, needs one for each query head")
        for head, mask in enumerate(self.masks):
            if not isinstance(mask, Mask):
                raise TypeError(f"masks: got {type(mask).__name__} for head {head}, needs a Mask")

    def __and__(self, other: Mask | PerHead) -> PerHead:
        return self._combined(lambda mine, theirs: mine & theirs, other)

    def __rand__(self, other: Mask) -> PerHead:
        return self._combined(lambda mine, theirs: theirs & mine, other)

    def __or__(self, other: Mask | PerHead) -> PerHead:
        return self._combined(lambda mine, theirs: mine | theirs, other)

    def __ror__(self, other: Mask) -> PerHead:
        return self._combined(lambda mine, theirs: theirs | mine, other)

    def __invert__(self) -> PerHead:
        return PerHead([~mask for mask in self.masks])

    def _combined(self, combine: Callable[[Mask, Mask], Mask], other: Mask | PerHead) -> PerHead:
        if not isinstance(other, Mask | PerHead):
            return NotImplemented
        theirs = other.masks if isinstance(other, PerHead) else (other,) * len(self.masks)
        if len(theirs) != len(self.masks):
            raise ValueError(f"masks: got {len(self.masks)} heads and {len(theirs)}, which must be equal")
        return PerHead([combine(mine, its) for mine, its in zip(self.masks, theirs)])


def of_heads(mask: Mask | PerHead) -> tuple[Mask, ...]:
    """The mask of each head, or the one of all."""
    return mask.masks if isinstance(mask, PerHead) else (mask,)
