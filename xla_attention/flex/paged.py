"""A traced score_mod and mask_mod over a paged cache -> what the paged kernel is asked.

There ``b`` is the sequence, ``q`` and ``kv`` are positions in it. A query never sees keys behind itself.
"""

from __future__ import annotations

import dataclasses
import math

from jaxtyping import Array, Int

from pallas_kernels.masks import Causal, Full, SlidingWindow
from xla_attention.flex import expression
from xla_attention.flex.expression import Node, constant, node
from xla_attention.flex.functions import TracedScore
from xla_attention.flex.hoist import Hoisted, compute_of_tokens, split
from xla_attention.flex.plan import ALWAYS, condition_of
from xla_attention.flex.recognise import as_mask, as_softcap, terms
from xla_attention.flex.trace import Traced, connect


@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """What the kernel is asked. Hashable: equal functions have equal plans.

    Attributes:
        sliding_window: keys that a query sees at most, its own the last, if mask_mod says so.
        softcap: the kernel's, if the score_mod is one.
        score: the function of scores, if there is more to it.
        reads: the operands of ``score``.
    """

    sliding_window: int | None = None
    softcap: float | None = None
    score: TracedScore | None = None
    reads: tuple[Hoisted, ...] = ()

    def arrays(
        self,
        captured: tuple[Array, ...],
        sequence: Int[Array, " t"],
        position: Int[Array, " t"],
        head: Int[Array, " h"],
        keys: int,
    ) -> tuple[Array, ...]:
        """What ``score`` reads of some tokens, as ``PagedOperands.score`` wants it.

        Args:
            captured: of score_mod and then of mask_mod.
            sequence, position: of the tokens.
            head: query heads.
            keys: how many, from the first on.
        """
        return tuple(compute_of_tokens(x, captured, sequence, position, head, keys) for x in self.reads)


def make_paged_plan(
    score_mod: Traced | None, mask_mod: Traced | None, softcap: float | None = None
) -> PagedPlan:
    """The plan of both functions.

    Args:
        score_mod, mask_mod: None for the score itself, and for all pairs.
        softcap: of the scores, where there is no score_mod.

    Raises:
        FlexTraceError: an operator that kernels do not have.
    """
    score = score_mod.result if score_mod else _softcapped(softcap)
    window, rest = None, ALWAYS
    for term in terms(condition_of(score_mod, mask_mod), "and"):
        known, left = _as_window(term)
        if not known:
            rest = connect("and", rest, term)
        elif left is not None:
            window = left + 1 if window is None else min(window, left + 1)
    if rest is not ALWAYS:
        score = node("where", rest, score, constant(-math.inf), dtype="float32")
    softcap = as_softcap(score)
    if softcap is not None or score.op == "input":
        return PagedPlan(window, softcap)
    return PagedPlan(window, None, *split(score, "score_mod or mask_mod"))


def _as_window(term: Node) -> tuple[bool, int | None]:
    """Whether the condition is, beside causality, none but a number of keys before the query's own."""
    if term.captures or term.depends & {"b", "h"}:
        return False, None
    mask = as_mask(term)
    if isinstance(mask, Full):
        return True, None
    if isinstance(mask, Causal):
        return mask.offset >= 0, None
    if isinstance(mask, SlidingWindow):
        left = None if mask.left is None else mask.left - mask.offset
        right = mask.right is None or mask.right + mask.offset >= 0
        return right and (left is None or left >= 0), left
    return False, None


def _softcapped(softcap: float | None) -> Node:
    score = expression.inputs()["score"]
    if softcap is None:
        return score
    inner = node("mul", score, 1 / softcap, dtype="float32")
    return node("mul", node("tanh", inner, dtype="float32"), softcap, dtype="float32")
