"""FlexAttention's kernels by the TPU compiler: that they compile, and their cycles beside built-in forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp
import rich.box
from rich.table import Table

from pallas_kernels.flash_attention import AttentionSpec, Operands
from pallas_kernels.masks import Causal, Mask, SlidingWindow
from xla_attention.benchmarks.flex_functions import functions
from xla_attention.flex.variants import VARIANTS
from xla_attention.planner.compile import CompileError, compile_for_tpu
from xla_attention.planner.flex_kernels import flex_kernels
from xla_attention.planner.kernels import Kernel, flash_kernels
from xla_attention.planner.topology import Topology

LIMIT = 1.1  # of a built-in form's cycles, that the same in torch code may take


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """What of ``flash_attention``'s options a variant is.

    Attributes:
        mask, softcap: of the spec.
        segments, slopes: whether there are segment ids, and ALiBi slopes.
    """

    mask: Mask
    softcap: float | None = None
    segments: bool = False
    slopes: bool = False


def built_in(name: str, seq_len: int) -> BuiltIn | None:
    """The variant as built in, if it is."""
    known = {
        "causal": BuiltIn(Causal()),
        "sliding_window": BuiltIn(SlidingWindow(seq_len // 4 - 1)),
        "documents": BuiltIn(Causal(), segments=True),
        "softcap": BuiltIn(Causal(), softcap=1.5),
        "alibi": BuiltIn(Causal(), slopes=True),
    }
    return known.get(name)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of one variant.

    Attributes:
        variant, kernel: their names.
        cycles: of its static schedule, stalls included; None if it does not compile.
        built_in: the same of the built-in form, where there is one.
        error: the compiler's, if it does not compile.
    """

    variant: str
    kernel: str
    cycles: int | None
    built_in: int | None = None
    error: str = ""

    @property
    def passes(self) -> bool:
        """Whether it compiles, and to no more than ``LIMIT`` of the built-in form's cycles."""
        return self.cycles is not None and (self.built_in is None or self.cycles <= LIMIT * self.built_in)


def measure_flex(
    topology: Topology,
    *,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
    dtype: str,
    names: Sequence[str] = tuple(VARIANTS),
    cycles: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Iterable[Row]:
    """Compiles both kernels of each variant; sizes are those of self-attention of one sequence.

    Args:
        topology: to compile for.
        names: of the variants, or of the further functions of ``bench flex``.
        cycles: count them, and compile the built-in forms too.
        say: told before each compilation what is compiled.

    Raises:
        ValueError: an unknown variant.
    """
    known_names = VARIANTS | functions()
    for name in names:
        if name not in known_names:
            raise ValueError(f"variant: got {name!r}, known are {', '.join(known_names)}")
    shapes = (1, heads, seq_len, head_dim), (1, kv_heads, seq_len, head_dim)
    for name in names:
        ours = flex_kernels(known_names[name], *shapes, dtype=dtype, hardware=topology.hardware)
        known = built_in(name, seq_len) if cycles else None
        theirs = _built_in_kernels(known, *shapes, dtype, topology) if known else []
        for kernel, other in zip_longest(ours, theirs):
            say(f"compiling for {topology}: {name}, {kernel.name}")
            try:
                found = _cycles(kernel, topology, cycles)
                yield Row(name, kernel.name, found, other and _cycles(other, topology, True))
            except CompileError as error:
                yield Row(name, kernel.name, None, error=str(error))


def _built_in_kernels(
    known: BuiltIn, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: str, topology: Topology
) -> list[Kernel]:
    _, heads, seq_len, head_dim = q_shape
    reads = []
    if known.segments:
        reads = [jax.ShapeDtypeStruct((1, seq_len), jnp.int32)] * 2
    if known.slopes:
        reads = [jax.ShapeDtypeStruct((heads,), jnp.float32)]
    names = ("q_segment_ids", "kv_segment_ids") if known.segments else ("alibi_slopes",)
    return flash_kernels(
        q_shape,
        kv_shape,
        dtype=dtype,
        spec=AttentionSpec(scale=head_dim**-0.5, mask=known.mask, softcap=known.softcap),
        hardware=topology.hardware,
        reads=reads,
        operands=lambda *arrays: Operands(**dict(zip(names, arrays))),
    )


def _cycles(kernel: Kernel, topology: Topology, count: bool) -> int:
    compiled = compile_for_tpu(kernel.fn, kernel.avals, topology, cycles=count)
    return sum(k.total for k in compiled.kernels)


def flex_table(rows: Sequence[Row], topology: Topology) -> Table:
    """The rows as a table."""
    table = Table(
        title=f"flex_attention on {topology}: cycles of the static schedule, HBM stalls included",
        caption="XLA operations around the kernels are not counted; nothing ran on a TPU",
        box=rich.box.SIMPLE_HEAD,
    )
    for column in ("variant", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("cycles", "built in", "flex / built in"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.cycles is None:
            table.add_row(row.variant, row.kernel, "does not compile")
            continue
        ratio = f"{row.cycles / row.built_in:.3f}" if row.built_in else ""
        table.add_row(
            row.variant,
            row.kernel,
            f"{row.cycles:,}" if row.cycles else "compiles",
            f"{row.built_in:,}" if row.built_in else "",
            ratio if row.passes else f"[bold red]{ratio}[/bold red]",
        )
    return table
