"""Errors of attention against float64: our operator's, beside those of torch's own attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import torch_xla
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xla_attention.ops import flash_attention

DTYPES = (torch.float32, torch.bfloat16)
QUANTITIES = ("o", "lse", "dq", "dk", "dv")

# (q_len, kv_len). With 7 head dims and 4 ratios, none of which divides another, cycling through all three lets
# 28 cases meet every head dim with every ratio, and every length with several of both.
LENGTHS = (
    *((n, n) for n in (1, 7, 127, 129, 577, 600, 1023)),
    *((1, 577), (577, 1), (7, 129), (129, 7), (127, 1023), (1023, 127), (577, 600), (600, 577)),
)
HEAD_DIMS = (32, 64, 80, 96, 128, 160, 256)
HEADS = {1: (2, 2), 3: (3, 1), 4: (8, 2), 8: (8, 1)}  # by their ratio

FLOAT32_LIMITS = {"o": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}
# In bfloat16, errors may be this many times those of scaled_dot_product_attention.
BFLOAT16_RATIO = 1.5
# That returns no log-sum-exp. Ours is float32 always; v4 and v6e sum probabilities that are rounded to bfloat16,
# which moves a sum by a factor of at most 1 + 2^-9 and its logarithm by 2^-9.
BFLOAT16_LSE_LIMIT = 2**-9


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention. ``is_causal`` aligns top-left, as ``scaled_dot_product_attention`` does."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.q_len:>4} x {self.kv_len:<4} {heads} {self.head_dim:>3}{' causal' * self.is_causal}"

    @property
    def softmax_is_constant(self) -> bool:
        """Whether each query sees one key, so that dq and dk are zero."""
        return self.kv_len == 1 or (self.q_len == 1 and self.is_causal)


@dataclasses.dataclass(frozen=True)
class Error:
    """Errors of one result, each the Frobenius norm of the difference over that of the float64 result.

    Attributes:
        case: what was computed.
        dtype: in what.
        quantity: ``"o"``, ``"lse"``, ``"dq"``, ``"dk"`` or ``"dv"``.
        ours: of our operator on the XLA device.
        sdpa: of ``scaled_dot_product_attention`` on the CPU, as torch dispatches it; None for lse.
        sdpa_math: of its definition in plain torch, which computes bfloat16 in float32 throughout.
    """

    case: Case
    dtype: torch.dtype
    quantity: str
    ours: float
    sdpa: float | None
    sdpa_math: float | None

    @property
    def limit(self) -> float:
        """What ``ours`` may be."""
        limit = FLOAT32_LIMITS[self.quantity]
        if self.dtype == torch.float32:
            return limit
        # The float32 limit is for results that are exact but for noise, where a ratio says nothing.
        return BFLOAT16_LSE_LIMIT if self.sdpa is None else max(BFLOAT16_RATIO * self.sdpa, limit)

    @property
    def passes(self) -> bool:
        return self.ours <= self.limit  # False for NaN


def grid(*, quick: bool = False) -> list[Case]:
    """The cases: each head dim with each ratio of heads, causal and not, over all lengths; few if ``quick``."""
    if quick:
        return [Case(129, 129, 2, 2, 64, True), Case(7, 129, 8, 2, 80, False), Case(127, 1, 3, 1, 32, True)]
    mixed = zip(itertools.cycle(LENGTHS), itertools.cycle(HEAD_DIMS), itertools.cycle(HEADS.values()))
    first = itertools.islice(mixed, len(HEAD_DIMS) * len(HEADS))
    return [
        Case(*lengths, *heads, head_dim, causal)
        for lengths, head_dim, heads in first
        for causal in (False, True)
    ]


def measure(case: Case, dtype: torch.dtype) -> Iterator[Error]:
    """Errors of one case, in the order of ``QUANTITIES``; inputs are normal, and rounded to ``dtype`` for all."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = (1, case.heads, case.q_len, case.head_dim), (1, case.kv_heads, case.kv_len, case.head_dim)
    inputs = [torch.randn(s, generator=generator).to(dtype) for s in (queries, keys, keys, queries)]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=True), None

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        logits = q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT * case.head_dim**-0.5
        if case.is_causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
        return sdpa(q, k, v)[0], logits.logsumexp(-1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(q, k, v, is_causal=case.is_causal, return_lse=True)

    device = torch_xla.device()
    got = _results(ours, [x.to(device) for x in inputs])
    want = _results(exact, [x.double() for x in inputs])
    theirs = _results(sdpa, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        math_ = _results(sdpa, inputs)
    for quantity, x, *others, y in zip(QUANTITIES, got, theirs, math_, want):
        vanishes = case.softmax_is_constant and quantity in ("dq", "dk")
        size = (
            want[-1] if vanishes else y
        ).norm()  # the gradient by v is of the size that dq and dk sum to zero
        errors = [None if z is None else ((z.double() - y).norm() / size).item() for z in (x, *others)]
        yield Error(case, dtype, quantity, *errors)


def _results(
    attention: Callable[..., tuple[Tensor, Tensor | None]], inputs: list[Tensor]
) -> list[Tensor | None]:
    """``o``, ``lse``, ``dq``, ``dk`` and ``dv`` on the CPU; ``inputs`` are q, k, v and the gradient of o."""
    *qkv, do = inputs
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    o, lse = attention(*qkv)
    o.backward(do)
    torch_xla.sync()
    return [None if x is None else x.detach().cpu() for x in (o, lse, *(x.grad for x in qkv))]


def report(*, quick: bool = False) -> bool:
    """Prints a row for each case and dtype, and the worst of all; returns whether all errors are in limits."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from xla_attention.device import pick_device

    _, device = pick_device()
    console = Console()
    console = Console(width=max(console.width, 120))  # a row is one line, in a file too
    cases = list(itertools.product(grid(quick=quick), DTYPES))
    rows = [list(measure(*case)) for case in track(cases, "Measuring", console=console, transient=True)]

    table = Table(
        title=f"Errors against float64, {device}: ours (times that of scaled_dot_product_attention on CPU)",
        caption="queries x keys, heads/key heads, head dim; |got - want| / |want|, Frobenius norms, or relative to "
        "|dv| where dq and dk are zero",
    )
    for name in ("case", "dtype", *QUANTITIES):
        table.add_column(name, justify="left" if name in ("case", "dtype") else "right", no_wrap=True)
    for row in rows:
        table.add_row(str(row[0].case), _name(row[0].dtype), *map(_cell, row))
    console.print(table)

    worst = Table(title="Worst of all cases")
    for name in ("dtype", "of", "ours", "limit", "times SDPA's", "times SDPA's math", "over the limit"):
        worst.add_column(name, justify="left" if name in ("dtype", "of") else "right")
    for dtype, (n, quantity) in itertools.product(DTYPES, enumerate(QUANTITIES)):
        errors = [row[n] for row in rows if row[n].dtype == dtype]
        worst.add_row(_name(dtype), quantity, *_summary(errors))
    console.print(worst)
    failures = [error for row in rows for error in row if not error.passes]
    for error in failures:
        console.print(
            f"[red]over the limit[/red]: {error.case} {_name(error.dtype)} {error.quantity}: "
            f"{error.ours:.2e}, limit {error.limit:.2e}"
        )
    return not failures


def _summary(errors: list[Error]) -> Iterator[str]:
    yield f"{max(e.ours for e in errors):.1e}"
    limits = {e.limit for e in errors}
    yield f"{limits.pop():.1e}" if len(limits) == 1 else f"{BFLOAT16_RATIO} x SDPA's"
    # Results that are exact but for noise have no ratio worth a word.
    counted = [e for e in errors if e.sdpa is not None and e.ours > FLOAT32_LIMITS[e.quantity] / 100]
    for name in ("sdpa", "sdpa_math"):
        yield f"{max((_ratio(e.ours, getattr(e, name)) for e in counted), default=math.nan):.2f}"
    yield str(sum(not e.passes for e in errors))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else (math.inf if ours else 1.0)


def _cell(error: Error) -> str:
    ratio = "" if error.sdpa is None else f" ({_ratio(error.ours, error.sdpa):.2f})"
    text = f"{error.ours:.1e}{ratio}"
    return text if error.passes else f"[bold red]{text}[/bold red]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
