"""A traced score_mod and mask_mod -> what the flash kernels are asked: static parts, and operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.flash_attention import Operands
from pallas_kernels.masks import Mask
from xla_attention.flex import expression
from xla_attention.flex.expression import Node, constant, node, rebuild
from xla_attention.flex.functions import Reach, TracedScore
from xla_attention.flex.hoist import Hoisted, Sizes, along, compute, split
from xla_attention.flex.recognise import as_alibi, as_mask, as_softcap, terms
from xla_attention.flex.trace import Traced, connect

ALWAYS = constant(True)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernels are asked. Hashable: equal functions have equal plans.

    Attributes:
        mask: which tiles are visited, and what is hidden in them by indices alone.
        softcap: the core's, if the score_mod is one.
        score: the function of scores, if there is more to it than the core knows.
        reads: the operands of ``score``.
        named: the core's operands, by their names in ``Operands``.
        sizes: what indices run over.
    """

    mask: Mask
    softcap: float | None
    score: TracedScore | None
    reads: tuple[Hoisted, ...]
    named: tuple[tuple[str, Hoisted], ...]
    sizes: Sizes

    def names(self) -> list[str]:
        """Of the arrays that :meth:`operands` returns, in order; those of ``score`` come last."""
        return [name for name, _ in self.named] + ["score"] * len(self.reads)

    def arrays(self, captured: tuple[Array, ...]) -> list[Array]:
        """The arrays of :meth:`names`, from the captured tensors of score_mod and then of mask_mod."""
        found = {name: self._named(name, hoisted, captured) for name, hoisted in self.named}
        if "q_segment_ids" in found:  # the core keeps negative ids for padding
            ids = ("q_segment_ids", "kv_segment_ids")
            least = functools.reduce(jnp.minimum, (found[name].min() for name in ids))
            found |= {name: found[name] - least for name in ids}
        return [*found.values(), *(compute(hoisted, captured, self.sizes) for hoisted in self.reads)]

    def _named(self, name: str, hoisted: Hoisted, captured: tuple[Array, ...]) -> Array:
        x = compute(hoisted, captured, self.sizes)
        if name == "alibi_slopes":
            return jnp.broadcast_to(x[0], (self.sizes.heads,))
        return jnp.broadcast_to(x[:, 0], (self.sizes.batch, *x.shape[2:]))


def operands(names: list[str], arrays: list[Any]) -> Operands:
    """The arrays of a plan as the kernels' operands."""
    named = {name: x for name, x in zip(names, arrays, strict=True) if name != "score"}
    return Operands(**named, score=tuple(x for name, x in zip(names, arrays) if name == "score"))


def make_plan(
    score_mod: Traced | None, mask_mod: Traced | None, sizes: Sizes, trained: frozenset[int] = frozenset()
) -> Plan:
    """The plan of both functions.

    Args:
        score_mod, mask_mod: None for the score itself, and for all pairs.
        sizes: what indices run over.
        trained: numbers of captured tensors that want a gradient; those of mask_mod follow score_mod's.

    Raises:
        FlexTraceError: an operator that kernels do not have.
    """
    score = score_mod.result if score_mod else expression.inputs()["score"]
    condition = condition_of(score_mod, mask_mod)
    mask, named, rest = _split_condition(condition, sizes)

    alibi = as_alibi(score, mask)
    if alibi is not None and not alibi[1].captures & trained:
        score, slope = alibi
        named["alibi_slopes"] = Hoisted(slope, "head")
    if rest is not ALWAYS:
        score = node("where", rest, score, constant(-math.inf), dtype="float32")
    softcap = as_softcap(score)
    if softcap is not None:
        score = expression.inputs()["score"]
    function, reads = None, ()
    if score.op != "input":
        function, reads = split(score, "score_mod or mask_mod")
    return Plan(mask, softcap, function, reads, tuple(named.items()), sizes)


def condition_of(score_mod: Traced | None, mask_mod: Traced | None) -> Node:
    """What mask_mod shows, its captured tensors numbered behind score_mod's."""
    if mask_mod is None:
        return ALWAYS
    shift = len(score_mod.captured) if score_mod else 0
    return rebuild(mask_mod.result, lambda n: _renumbered(n, shift))


def _renumbered(n: Node, shift: int) -> Node | None:
    if n.op != "captured":
        return None
    return node("captured", n.args[0] + shift, dtype=n.dtype, shape=n.shape)


def _split_condition(condition: Node, sizes: Sizes) -> tuple[Mask, dict[str, Hoisted], Node]:
    """A static mask, the core's operands, and the condition that is left to the score function."""
    static, named, rest = ALWAYS, {}, ALWAYS
    for term in terms(condition, "and"):
        known = _as_operands(term)
        if not term.captures and not term.depends & {"b", "h"}:
            static = connect("and", static, term)
        elif known and not named.keys() & known.keys():
            named |= known
        else:
            rest = connect("and", rest, term)
    mask = as_mask(static)
    if rest is not ALWAYS:
        mask = mask & Reach(rest, sizes.batch, sizes.heads)
    return mask, named, rest


def _as_operands(term: Node) -> dict[str, Hoisted]:
    """Documents and lengths as the core's segments and lengths; nothing if it is neither."""
    if term.op not in ("eq", "lt", "le", "gt", "ge") or not all(isinstance(x, Node) for x in term.args):
        return {}
    a, b = term.args
    if "h" in term.depends or a.dtype != "int32" or b.dtype != "int32":
        return {}
    if term.op == "eq":
        sides = {along(x): x for x in (a, b)}
        if sides.keys() != {"query", "key"}:
            return {}
        return {
            "q_segment_ids": Hoisted(sides["query"], "query"),
            "kv_segment_ids": Hoisted(sides["key"], "key"),
        }
    if term.op in ("gt", "ge"):
        a, b = b, a
    if a.op != "input" or a.args[0] not in ("q", "kv") or along(b) != "head":
        return {}
    length = b if term.op in ("lt", "gt") else node("add", b, 1, dtype="int32")
    return {"q_lens" if a.args[0] == "q" else "kv_lens": Hoisted(length, "head")}
