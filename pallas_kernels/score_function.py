"""A function of scores as a value: what a kernel applies to each tile of logits, and what it reads.

The kernels know nothing of how such a function is written: they hand it a tile of scores, the indices of the
tile, and the values of its operands there, and differentiate it with ``jax.vjp``. An operand says along what
it varies, so that a kernel fetches no more of it than a tile needs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Along = Literal["head", "query", "key", "distance", "pair"]


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """A change of attention scores. Subclasses are frozen and hashable: a kernel is compiled once for each.

    Attributes:
        operands: along what each array that it reads varies, beside batch and head. Arrays are float32 or
            int32, those of pairs also bfloat16; batch and head may be 1 where the values are the same:

            * ``"head"``: nothing; ``[batch, heads]``
            * ``"query"``: ``[batch, heads, q_len]``
            * ``"key"``: ``[batch, heads, kv_len]``
            * ``"distance"``: ``[batch, heads, q_len + kv_len - 1]``, element i where ``q - kv = i - (kv_len -
              1)``
            * ``"pair"``: ``[batch, heads, q_len, kv_len]``
    """

    operands: tuple[Along, ...]

    def __call__(self, score: Any, batch: Any, head: Any, q: Any, kv: Any, operands: tuple[Any, ...]) -> Any:
        """The new scores, elementwise: queries and keys may lie along either axis.

        Args:
            score: ``scale * q k^T``, float32.
            batch, head: indices of the score's batch and query head, int32, broadcastable to it.
            q, kv: indices of its queries and keys, likewise.
            operands: values of the operands there, likewise; bfloat16 has become float32.

        Returns:
            Like ``score``, natural units. At or below ``HIDDEN``, -inf included, the pair is hidden.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class OfShard(ScoreFunction):
    """A function of scores on a part of the batch and of the heads, whose indices count from its own first.

    It reads, before the operands of ``function``, the true indices of batch ``[batch, 1]`` and of heads
    ``[1, heads]``, int32.

    Attributes:
        function: on the whole.
    """

    function: ScoreFunction

    @classmethod
    def of(cls, function: ScoreFunction) -> OfShard:
        return cls(("head", "head", *function.operands), function)

    def __call__(self, score: Any, batch: Any, head: Any, q: Any, kv: Any, operands: tuple[Any, ...]) -> Any:
        return self.function(score, operands[0], operands[1], q, kv, operands[2:])
