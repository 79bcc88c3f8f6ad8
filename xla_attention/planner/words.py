"""What a prediction says and leaves out, in words."""

from __future__ import annotations

from collections import defaultdict

from xla_attention.planner.accounting import Account, Cost
from xla_attention.planner.collectives import KINDS

MODELLED = (
    "every instruction of the step as XLA compiles and schedules it for this slice, as often as it runs",
    "matrix products, fusions and copies by XLA's own estimate of their cycles",
    "attention kernels by their compiled schedules, with waits for HBM",
    "collectives by their bytes over the links of their axes and a microsecond a hop, beside other work "
    "where the schedule has them so",
)
NOT_MODELLED = (
    "the host: input, Python, dispatch",
    "collectives that hinder each other, or the chip's memory traffic",
    "clocks that fall under load, and how far XLA's estimates are off",
    "evaluation and checkpoints; the network between slices",
)
# Where the compiler gives no estimate.
_BY_BYTES = "by bytes over HBM's bandwidth, a lower bound"


def largest_in_words(account: Account, peak_flops: float, count: int = 3) -> list[str]:
    """The largest costs of a step, those that are alike together.

    Args:
        account: of a step.
        peak_flops: of a chip, for how well its products use it.
        count: how many.
    """
    groups: dict[tuple[str, float], list[Cost]] = defaultdict(list)
    for cost in account.costs:
        groups[_alike(cost)].append(cost)
    ranked = sorted(groups.items(), key=lambda item: -sum(cost.total for cost in item[1]))
    return [_sentence(what, costs, account.seconds, peak_flops) for (what, _), costs in ranked[:count]]


def _alike(cost: Cost) -> tuple[str, float]:
    """What a cost is, and what it has in common with others like it."""
    if cost.cause == "matmul":
        return "matrix products", cost.flops
    if cost.cause == "attention":
        return "attention kernels", cost.seconds
    if cost.cause == "communication":
        names = f"{cost.opcode} {cost.name}"
        if "all-reduce-scatter" in names:
            return "waits for reduce-scatters", 0
        return next((f"waits for {kind}s" for kind in KINDS if kind in names), "waits for collectives"), 0
    if cost.cause == "copy":
        return "copies and changes of layout", 0
    if cost.opcode == "fusion":
        return "element-wise work and reductions", 0
    return f"{cost.opcode}s", 0


def _sentence(what: str, costs: list[Cost], step: float, peak_flops: float) -> str:
    total = sum(cost.total for cost in costs)
    times = sum(cost.times for cost in costs)
    text = f"{times:,} {what}"
    if costs[0].cause == "matmul":
        text += f" of {costs[0].flops / 1e9:,.4g} GFLOP each"
    text += f": {milliseconds(total)}, {total / step:.0%} of the step"
    flops = sum(cost.times * cost.flops for cost in costs)
    if flops and total:
        text += f", at {flops / total / peak_flops:.0%} of peak"
    hidden = sum(cost.times * cost.hidden for cost in costs)
    if hidden:
        text += f"; {milliseconds(hidden)} more pass beside other work"
    if all(cost.basis == "bytes" for cost in costs):
        text += f" ({_BY_BYTES})"
    return text


def milliseconds(seconds: float) -> str:
    """Four digits of it."""
    return f"{seconds * 1e3:,.4g} ms"
