"""Counts every Mosaic kernel in a folder of libtpu's dumps.

The folder is filled by compiling with

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"

and, to write the few files of some hundred that are read here, --xla_jf_dump_llo_pass_label_regex=DUMPS_READ.

libtpu shortens long names differently in each file name; what belongs together begins with the same stamp.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pallas_kernels.hardware import Hardware
from xla_attention.planner.cycles.hlo import Module, executions, operand_sizes, parse_hlo
from xla_attention.planner.cycles.parse import parse_bundles, parse_utilization
from xla_attention.planner.cycles.report import KernelCycles, count

DUMPS_READ = ".*(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization).*"
_HEADING = "*-schedule-analysis_packed-bundles-post-ra.txt"
_KERNEL = re.compile(
    r"%([\w.\-]+) = .*custom_call_target=\"tpu_custom_call\".*?(?:op_name=\"([^\"]*)\"|$)", re.M
)


@dataclasses.dataclass(frozen=True)
class KernelFiles:
    """The files of one kernel, its instruction in the HLO and the JAX operation that it comes from."""

    name: str
    op_name: str
    bundles: Path
    utilization: Path


def kernels_in(folder: Path) -> list[KernelFiles]:
    """The Mosaic kernels in a dump, in the order in which they were compiled."""
    found = []
    for heading in sorted(folder.glob(_HEADING)):
        stamp, rest = heading.name.split("-", 1)
        kernel = None if rest.startswith("TLP-") else _KERNEL.search(heading.read_text())
        if kernel is None:  # the program around the kernels, or an XLA operation
            continue
        bundles, utilization = (
            [path for path in folder.glob(f"{stamp}-*{ending}") if "schedule-analysis" not in path.name]
            for ending in (
                "-packed-bundles-post-ra.txt",
                "pre-delay_hlo-static-per-bundle-utilization.txt",
            )
        )
        found.append(KernelFiles(kernel[1], kernel[2] or "", bundles[0], utilization[0]))
    return found


def count_cycles(
    folder: Path, hardware: Hardware, operands: Sequence[Mapping[int, np.ndarray]] = ()
) -> list[KernelCycles]:
    """Static cycles of every Mosaic kernel in a dump.

    Args:
        folder: filled by one compilation.
        hardware: that it was compiled for.
        operands: contents of integer operands by index, for each kernel that may be there; a kernel's own are
            those of its operands' sizes. Constants in the dumped HLO need not be given.
    """
    modules = [parse_hlo(path.read_text()) for path in folder.glob("*-TLP-hlo.txt")]
    kernels = kernels_in(folder)
    given = _assigned(modules, [kernel.name for kernel in kernels], operands)
    return [
        count(
            parse_bundles(kernel.bundles.read_text()),
            parse_utilization(kernel.utilization.read_text()),
            hardware,
            [{**known, **mine} for known in _calls(modules, kernel.name)],
            name=kernel.name,
            op_name=kernel.op_name,
        )
        for kernel, mine in zip(kernels, given)
    ]


def _calls(modules: list[Module], kernel: str) -> list[dict[int, np.ndarray]]:
    """The kernel's known operands each time that it runs; once, without any, if no HLO was dumped."""
    return next(filter(None, (executions(module, kernel) for module in modules)), [{}])


def _assigned(
    modules: list[Module], kernels: Sequence[str], operands: Sequence[Mapping[int, np.ndarray]]
) -> list[Mapping[int, np.ndarray]]:
    """For each kernel those of ``operands`` that have the sizes of its own; where several do, in order."""
    left, given = list(operands), []
    for kernel in kernels:
        sizes = next(filter(None, (operand_sizes(module, kernel) for module in modules)), [])
        fits = [o for o in left if all(n < len(sizes) and x.size == sizes[n] for n, x in o.items())]
        given.append(fits[0] if fits else {})
        left = [o for o in left if o is not given[-1]]
    return given
