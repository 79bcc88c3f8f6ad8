"""Errors of every feature of attention, alone and combined, against float64 and against flex_attention.

In bfloat16 also beside those of ``scaled_dot_product_attention``, where that can compute the case.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable

import torch
import torch_xla
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from xla_attention.benchmarks.accuracy import BFLOAT16_RATIO, FLOAT32_LIMITS
from xla_attention.benchmarks.feature_cases import Case, Problem, grid
from xla_attention.benchmarks.feature_sdpa import SdpaError, sdpa_errors
from xla_attention.device import pick_device
from xla_attention.ops import flash_attention

QUANTITIES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
Results = dict[str, Tensor]  # by quantity, on the CPU
Attention = Callable[[Problem, dict[str, Tensor]], tuple[Tensor, Tensor]]

# bfloat16 rounds to within 2^-9. Probabilities are rounded, and so is o; of a gradient, so are two factors,
# one of which, P (dP - delta), is a difference. Of lse, only what the MXU sums is rounded (v4, v6e). A sink's
# gradient is one sum over all queries: what o's rounding adds to its terms stays when they cancel. Where SDPA
# computes the case, its error says how large ours may be; a result is never better than its own rounding.
BFLOAT16_LIMITS = {"o": 2**-8, "lse": 2**-9} | dict.fromkeys(QUANTITIES[2:], 2**-7) | {"dsinks": 2**-5}
LIMITS = {
    torch.float32: FLOAT32_LIMITS | {"dbias": 1e-5, "dsinks": 1e-5},
    torch.bfloat16: BFLOAT16_LIMITS,
}
BFLOAT16_ROUNDING = 2**-9


@dataclasses.dataclass(frozen=True)
class Error:
    """Errors of one result of our operator: Frobenius norm of the difference, over that of the other's.

    Attributes:
        case: what was computed.
        quantity: one of ``QUANTITIES``.
        definition: error against the definition in float64.
        flex: error against ``flex_attention``, which also computes in float64 here.
        sdpa: errors of ``scaled_dot_product_attention`` in the same dtype, where it has the result.
    """

    case: Case
    quantity: str
    definition: float
    flex: float
    sdpa: SdpaError | None = None

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        limit = LIMITS[self.case.dtype][self.quantity]
        if self.sdpa is None:
            return limit
        return min(limit, max(BFLOAT16_RATIO * self.sdpa.fused, BFLOAT16_ROUNDING))

    @property
    def passes(self) -> bool:
        """Whether both errors are within the limit; NaN is not."""
        return self.definition <= self.limit and self.flex <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.quantity} is off by {self.definition:.2e} of the definition's and by "
            f"{self.flex:.2e} of flex_attention's, limit {self.limit:.1e}"
        )


def measure(case: Case) -> list[Error]:
    """The errors of one case, in the order of ``QUANTITIES``; inputs are rounded to the dtype for all."""
    torch._dynamo.reset()  # flex_attention is traced, and each case has a score_mod of its own
    problem = case.build()
    got = _results(_operator, problem, device=torch_xla.device())
    torch_xla.sync()
    definition, flex = (_results(f, problem, dtype=torch.float64) for f in (_operator, _flex))
    sdpa = sdpa_errors(problem) if case.dtype == torch.bfloat16 else {}
    return [
        Error(case, name, _distance(x, definition[name]), _distance(x, flex[name]), sdpa.get(name))
        for name, x in ((name, got[name].cpu()) for name in QUANTITIES if name in got)
    ]


def _operator(problem: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ours: the kernels on an XLA device, their definition in plain torch elsewhere."""
    device = leaves["q"].device

    def moved(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(moved(x) for x in value)
        return value.to(device) if isinstance(value, Tensor) else value

    return flash_attention(**leaves, **{n: moved(x) for n, x in problem.options.items()}, return_lse=True)


def _flex(problem: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (leaves[name] for name in "qkv")
    bias, sinks, slopes, softcap = (
        (leaves | problem.options).get(name) for name in ("bias", "sinks", "alibi_slopes", "softcap")
    )
    offset = problem.query_offset

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, kv_at: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (q_at + offset - kv_at).abs()
        if bias is not None:
            score = score + bias[b % bias.shape[0], h % bias.shape[1], q_at, kv_at]
        return score

    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled, and that return_lse has a new name
        o, lse = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=create_block_mask(problem.mask_mod, *sizes, device="cpu"),
            scale=problem.options.get("scale"),
            enable_gqa=True,
            return_lse=True,
        )
    if sinks is None:
        return o, lse
    with_sink = torch.logaddexp(lse, sinks[:, None])  # flex_attention has none: one more key, of value zero
    return o * torch.exp(lse - with_sink)[..., None], with_sink


def _results(attention: Attention, problem: Problem, **to: object) -> Results:
    leaves = {name: x.to(**to).detach().requires_grad_() for name, x in problem.leaves.items()}
    o, lse = attention(problem, leaves)
    device = o.device
    seen = torch.isfinite(lse)  # where nothing is seen, lse is constant
    loss = (o * problem.do.to(device)).sum() + (torch.where(seen, lse, 0.0) * problem.dlse.to(device)).sum()
    loss.backward()
    gradients = {f"d{name}": x.grad for name, x in leaves.items()}
    return {"o": o.detach(), "lse": lse.detach()} | gradients


def _distance(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; infinite if -inf is in other places."""
    got = got.double()
    if not torch.equal(got.isneginf(), want.isneginf()):
        return math.inf
    got, want = (torch.where(x.isneginf(), 0.0, x) for x in (got, want))
    return ((got - want).norm() / (want.norm() or 1.0)).item()


def report(*, quick: bool = False, verbose: bool = False) -> bool:
    """Measures and prints the worst errors by feature, and whatever is over its limit.

    Args:
        quick: a few cases only.
        verbose: print a row for each case too.

    Returns:
        Whether every error is within its limit.
    """
    _, device = pick_device()
    console = Console()
    console.width = max(console.width, 240 if verbose else 140)  # a row stays on one line, in a file too
    cases = grid(quick=quick)
    rows, complaints = [], []
    for case in track(cases, "Measuring", console=console, transient=True):
        try:
            rows.append(measure(case))
        except Exception as error:  # counts as a failure; the others are measured all the same
            complaints.append(f"{case}: {type(error).__name__}: {error}")
            continue
        complaints += [str(error) for error in rows[-1] if not error.passes]
    if verbose:
        console.print(_table_of_cases(rows))
    for dtype in LIMITS:
        console.print(_table_of_worst([row for row in rows if row[0].case.dtype == dtype], dtype, device))
    console.print(_table_beside_sdpa(rows))
    for complaint in complaints:
        console.print(f"[red]failed:[/red] {escape(complaint)}", soft_wrap=True)
    results = sum(map(len, rows))
    console.print(
        f"{len(cases)} cases, {len(rows)} measured: {results} results, each compared with the definition "
        f"and with flex_attention; {len(complaints)} failures"
    )
    return not complaints


def _table_of_cases(rows: list[list[Error]]) -> Table:
    table = Table(
        title="Error against the definition / against flex_attention, both in float64",
        caption="batch x heads/kv_heads, queries x keys, head_dim/value_dim",
    )
    table.add_column("case", no_wrap=True)
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right", no_wrap=True)
    for row in rows:
        cells = {e.quantity: f"{e.definition:.1e}/{e.flex:.1e}" for e in row}
        cells |= {e.quantity: f"[bold red]{cells[e.quantity]}[/bold red]" for e in row if not e.passes}
        table.add_row(str(row[0].case), *(cells.get(quantity, "") for quantity in QUANTITIES))
    return table


def _table_of_worst(rows: list[list[Error]], dtype: torch.dtype, device: str) -> Table:
    """The worst errors of every mask, score change and shape."""
    table = Table(
        title=f"{str(dtype).removeprefix('torch.')}: worst error of flash_attention on {device}",
        caption="|ours - theirs| / |theirs| in the Frobenius norm; theirs: of the definition and of "
        "flex_attention, in float64",
    )
    table.add_column("with")
    for name in ("cases", *QUANTITIES):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in ("mask", "score", "shape"):
        names = dict.fromkeys(row[0].case.names[kind] for row in rows)
        for name in names:
            of_name = [row for row in rows if row[0].case.names[kind] == name]
            table.add_row(name, str(len(of_name)), *_worst(itertools.chain(*of_name)))
        table.add_section()
    table.add_row("all", str(len(rows)), *_worst(itertools.chain(*rows)))
    table.add_row("limit", "", *(f"{LIMITS[dtype][quantity]:.1e}" for quantity in QUANTITIES))
    return table


def _table_beside_sdpa(rows: list[list[Error]]) -> Table:
    """The largest ratios of our errors in bfloat16 to those of torch's attention."""
    table = Table(
        title="bfloat16: ours / SDPA's error on CPU, largest of the cases",
        caption="flash: what torch dispatches to for one head dim (v is padded)\n"
        "math: computes in float32, rounds the results alone\n"
        f"limit: {BFLOAT16_RATIO} of flash, or 2^-9; softcap: no SDPA",
    )
    for name in ("of", "cases", "ours", "SDPA flash", "SDPA math", "ours / flash", "ours / math"):
        table.add_column(name, justify="left" if name == "of" else "right", no_wrap=True)
    for quantity in QUANTITIES:
        errors = [e for row in rows for e in row if e.quantity == quantity and e.sdpa]
        errors = [e for e in errors if min(e.sdpa) > 0]  # where each query sees one key, o is exact
        if errors:
            cells = [max(x) for x in zip(*((e.definition, *e.sdpa) for e in errors))]
            ratios = [max(x) for x in zip(*((e.definition / y for y in e.sdpa) for e in errors))]
            form = [f"{x:.1e}" for x in cells] + [f"{x:.2f}" for x in ratios]
            table.add_row(quantity, str(len(errors)), *form)
    return table


def _worst(errors: Iterable[Error]) -> list[str]:
    """The largest error of each quantity; NaN counts as infinite."""
    worst: dict[str, float] = {}
    for e in errors:
        error = max(math.inf if math.isnan(x) else x for x in (e.definition, e.flex))
        worst[e.quantity] = max(error, worst.get(e.quantity, 0.0))
    return [f"{worst[quantity]:.1e}" if quantity in worst else "" for quantity in QUANTITIES]
