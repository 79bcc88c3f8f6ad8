"""Errors of attention against float64: our operator's, beside those of torch's own attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_xla
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xla_attention.device import pick_device
from xla_attention.ops import flash_attention

DTYPES = (torch.float32, torch.bfloat16)
QUANTITIES = ("o", "lse", "dq", "dk", "dv")

# (q_len, kv_len), head_dim and (heads, kv_heads). All lengths, causal and not, are 30 cases; 7 and 4 have no
# common divisor, so that going round the other two meanwhile meets every head_dim with every ratio of heads.
LENGTHS = (
    *((n, n) for n in (1, 7, 127, 129, 577, 600, 1023)),
    *((1, 577), (577, 1), (7, 129), (129, 7), (127, 1023), (1023, 127), (577, 600), (600, 577)),
)
HEAD_DIMS = (32, 64, 80, 96, 128, 160, 256)
HEADS = ((2, 2), (3, 1), (8, 2), (8, 1))

FLOAT32_LIMITS = {"o": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}
# Errors in bfloat16 may be this many times those of scaled_dot_product_attention.
BFLOAT16_RATIO = 1.5
# That returns no log-sum-exp. Ours is float32, but where the MXU sums probabilities (v4 and v6e) they are
# rounded to bfloat16 first, which moves a sum by a factor of at most 1 + 2^-9 and its logarithm by 2^-9.
BFLOAT16_LSE_LIMIT = 2**-9


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention. ``is_causal`` aligns top-left, as ``scaled_dot_product_attention`` does."""

    q_len: int
    kv_len: int
    head_dim: int
    heads: int
    kv_heads: int
    is_causal: bool

    def __str__(self) -> str:
        causal = " causal" if self.is_causal else ""
        return f"{self.q_len:>4} x {self.kv_len:<4} {self.head_dim:>3} {self.heads}/{self.kv_heads}{causal}"

    @property
    def one_key_each(self) -> bool:
        """Whether each query sees one key: ``o`` is then ``v``, and the gradients by q and k are zero."""
        return self.kv_len == 1 or (self.q_len == 1 and self.is_causal)


@dataclasses.dataclass(frozen=True)
class Error:
    """Errors of one result: Frobenius norm of the difference to float64, over that of the float64 result.

    Attributes:
        case: what was computed.
        dtype: in what.
        quantity: one of ``QUANTITIES``.
        ours: of our operator, on the XLA device.
        sdpa: of ``scaled_dot_product_attention`` on the CPU, as torch dispatches it; None for ``lse``.
        sdpa_math: of its math backend, which computes bfloat16 in float32 and rounds the results alone.
    """

    case: Case
    dtype: torch.dtype
    quantity: str
    ours: float
    sdpa: float | None
    sdpa_math: float | None

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        limit = FLOAT32_LIMITS[self.quantity]
        if self.dtype == torch.float32:
            return limit
        if self.sdpa is None:
            return BFLOAT16_LSE_LIMIT
        return max(BFLOAT16_RATIO * self.sdpa, limit)  # where theirs is exact, ours may be but for noise

    @property
    def passes(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.ours <= self.limit

    def ratio(self, theirs: float | None) -> float | None:
        """Ours over theirs; None where there are none, or where both are noise about an exact result."""
        return self.ours / theirs if theirs and not self.case.one_key_each else None


def grid(*, quick: bool = False) -> list[Case]:
    """The cases: all lengths, causal and not, each head_dim with each ratio of heads; or a few."""
    if quick:
        return [Case(129, 129, 64, 2, 2, True), Case(7, 129, 80, 8, 2, False), Case(127, 1, 32, 3, 1, True)]
    lengths = itertools.product((False, True), LENGTHS)
    return [
        Case(*q_and_kv, head_dim, *heads, is_causal)
        for (is_causal, q_and_kv), head_dim, heads in zip(
            lengths, itertools.cycle(HEAD_DIMS), itertools.cycle(HEADS)
        )
    ]


def measure(case: Case, dtype: torch.dtype) -> list[Error]:
    """The errors of one case, in the order of ``QUANTITIES``.

    Inputs and the gradient of ``o`` are normal, rounded to ``dtype`` before anybody computes with them.
    """
    generator = torch.Generator().manual_seed(0)
    queries, keys = (1, case.heads, case.q_len, case.head_dim), (1, case.kv_heads, case.kv_len, case.head_dim)
    inputs = [torch.randn(s, generator=generator).to(dtype) for s in (queries, keys, keys, queries)]
    device = torch_xla.device()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(q, k, v, is_causal=case.is_causal, return_lse=True)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=True), None

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        logits = q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT * case.head_dim**-0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) & case.is_causal
        return sdpa(q, k, v)[0], logits.masked_fill(hidden, -torch.inf).logsumexp(-1)

    got = _results(ours, [x.to(device) for x in inputs])
    want = _results(exact, [x.double() for x in inputs])
    theirs = _results(sdpa, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        in_math = _results(sdpa, inputs)

    errors = []
    for quantity, exact_result, *results in zip(QUANTITIES, want, got, theirs, in_math):
        # Zero gradients are sums that cancel; their terms are about as large as the gradient by v.
        zero = case.one_key_each and quantity in ("dq", "dk")
        size = (want[-1] if zero else exact_result).norm()
        of_each = [None if x is None else ((x.double() - exact_result).norm() / size).item() for x in results]
        errors.append(Error(case, dtype, quantity, *of_each))
    return errors


def _results(
    attention: Callable[..., tuple[Tensor, Tensor | None]], inputs: list[Tensor]
) -> list[Tensor | None]:
    """``QUANTITIES``, on the CPU; ``inputs`` are q, k, v and the gradient of o."""
    *qkv, do = inputs
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    o, lse = attention(*qkv)
    o.backward(do)
    torch_xla.sync()
    return [None if x is None else x.detach().cpu() for x in (o, lse, *(x.grad for x in qkv))]


def report(*, quick: bool = False) -> bool:
    """Measures and prints: a row for each case and dtype, then the worst of all.

    Returns:
        Whether every error is within its limit.
    """
    _, device = pick_device()
    console = Console()
    console.width = max(console.width, 120)  # a row stays on one line, in a file too
    cases = list(itertools.product(grid(quick=quick), DTYPES))
    rows = [measure(*case) for case in track(cases, "Measuring", console=console, transient=True)]
    console.print(_table_of_cases(rows, device), _table_of_worst(rows))
    failures = [error for row in rows for error in row if not error.passes]
    for error in failures:
        of = f"{error.case}, {_name(error.dtype)}, {error.quantity}"
        console.print(f"[red]over the limit:[/red] {of}: {error.ours:.2e}, limit {error.limit:.2e}")
    return not failures


def _table_of_cases(rows: list[list[Error]], device: str) -> Table:
    table = Table(
        title=f"Error of flash_attention on {device}; then, its ratio to that of SDPA on CPU",
        caption="case: queries x keys, head_dim, heads/kv_heads\n"
        "error: |ours - float64| / |float64| in the Frobenius norm; over |dv| where dq and dk are zero",
    )
    for name in ("case", "dtype", *QUANTITIES):
        table.add_column(name, justify="right" if name in QUANTITIES else "left", no_wrap=True)
    for row in rows:
        table.add_row(str(row[0].case), _name(row[0].dtype), *map(_cell, row))
    return table


def _cell(error: Error) -> str:
    ratio = error.ratio(error.sdpa)
    text = f"{error.ours:.1e}" + ("     " if ratio is None else f" {ratio:.2f}")
    return text if error.passes else f"[bold red]{text}[/bold red]"


def _table_of_worst(rows: list[list[Error]]) -> Table:
    table = Table(title="Worst of all cases")
    names = ("dtype", "of", "error", "limit", "SDPA's error", "ours / SDPA", "ours / SDPA math", "over limit")
    for name in names:
        table.add_column(name, justify="left" if name in ("dtype", "of") else "right")
    for dtype, (n, quantity) in itertools.product(DTYPES, enumerate(QUANTITIES)):
        errors = [row[n] for row in rows if row[n].dtype == dtype]
        relative = dtype == torch.bfloat16 and quantity != "lse"
        table.add_row(
            _name(dtype),
            quantity,
            f"{max(e.ours for e in errors):.1e}",
            f"{BFLOAT16_RATIO} x SDPA" if relative else f"{errors[0].limit:.1e}",
            _worst(".1e", [e.sdpa for e in errors]),
            _worst(".2f", [e.ratio(e.sdpa) for e in errors]),
            _worst(".2f", [e.ratio(e.sdpa_math) for e in errors]),
            str(sum(not e.passes for e in errors)),
        )
    return table


def _worst(form: str, values: list[float | None]) -> str:
    known = [x for x in values if x is not None]
    return format(max(known), form) if known else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
