"""Compiles JAX functions for a TPU with none attached: does it fit, what memory does it take, how long."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xla_attention.bridge import Sharding, lower
from xla_attention.cache import cache_folder
from xla_attention.planner.cycles import (
    DUMPS_READ,
    KernelCycles,
    count_cycles,
    counter_version,
    kernel_operands,
)
from xla_attention.planner.topology import Topology

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask what TPU this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


class CompileError(RuntimeError):
    """The TPU compiler refused; the message is its own, such as which VMEM allocation was too large."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said of one function on one chip, or on each of those that it is sharded over.

    Attributes:
        seconds: time of the compilation, when it was made.
        argument_bytes: device memory of the arguments.
        output_bytes: device memory of the results.
        temp_bytes: device memory of what is between, kernels' VMEM not counted.
        alias_bytes: of the results that take the place of arguments.
        cached: whether an earlier compilation of the same module gave this.
        kernels: static cycles of each Mosaic kernel, where they were asked for.
    """

    seconds: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    cached: bool
    kernels: tuple[KernelCycles, ...] = ()
    alias_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Device memory that it needs, arguments and results included."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compile_for_tpu(
    fn: Callable[..., Any],
    avals: Sequence[jax.ShapeDtypeStruct],
    topology: Topology,
    *,
    sharding: Sharding | None = None,
    dump_to: Path | None = None,
    cycles: bool = False,
) -> Compiled:
    """Compiles ``fn`` for one chip of ``topology``, or several, in a process of its own.

    Results, refusals among them, are kept by content in ``cache_folder()``: the lowered module, libtpu's
    version and flags, and the topology.

    Args:
        fn: a JAX function of arrays alone.
        avals: shape and dtype of each argument.
        topology: whose chip to compile for.
        sharding: how arguments and results lie on as many chips of it; ``fn`` is then given one chip's parts.
        dump_to: a folder for the compiler's text dumps, optimized HLO and each kernel's VLIW bundles; made if
            it is missing. Compiles even if the result is cached.
        cycles: count the static cycles of the kernels.

    Raises:
        CompileError: the compiler refused, or died.
        ValueError: a sharding over more chips than there are.
    """
    devices = math.prod(size for _, size in sharding.axes) if sharding else 1
    if devices > topology.chips:
        raise ValueError(f"topology: {topology} has {topology.chips} chips, needs {devices}")
    module = lower(fn, avals, "tpu", sharding).mlir_module_serialized
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    entry = cache_folder() / "compile" / f"{_key(module, libtpu_version(), topology, flags)}.json"
    if dump_to is None and entry.exists():
        answer = json.loads(entry.read_text())
        if not cycles or "error" in answer or answer.get("counted") == counter_version():
            return _compiled(answer, topology, cached=True)
    if dump_to is not None:
        dump_to.mkdir(parents=True, exist_ok=True)
    with nullcontext(dump_to) if dump_to or not cycles else tempfile.TemporaryDirectory() as folder:
        if folder is not None:
            flags += _dump_flags(folder, everything=dump_to is not None)
        answer = _run_worker(module, topology, devices, flags)
        if cycles and "error" not in answer:
            known = [] if sharding else kernel_operands(fn, avals)  # else of unsharded shapes
            _count_kernels(answer, Path(folder), topology, known)
    write_atomically(entry, json.dumps(answer))
    return _compiled(answer, topology, cached=False)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler made of a program over all chips of a slice.

    Attributes:
        compiled: time, and memory of one chip, and the cycles of kernels where they were asked for.
        hlo: text of the optimized, partitioned module.
        places: coordinates of the chips in the slice, in the order of the module's devices.
    """

    compiled: Compiled
    hlo: str
    places: tuple[tuple[int, ...], ...]


def compile_step(
    module: bytes,
    topology: Topology,
    *,
    cycles: bool = False,
    flags: Sequence[str] = (),
    auto_mesh: Sequence[int] = (),
) -> CompiledStep:
    """Partitions a program over all chips of ``topology`` and compiles it, in a process of its own.

    State takes the place of state: results whose shape and sharding are those of an argument are written over
    it. Results are kept as those of :func:`compile_for_tpu` are.

    Args:
        module: a serialized HLO module with sharding annotations, as torch_xla stages it.
        topology: whose chips are the devices, in their order.
        cycles: count the static cycles of the kernels, of which those that are alike are counted once.
        flags: of libtpu, behind those of ``$LIBTPU_INIT_ARGS``.
        auto_mesh: sizes of the axes over which XLA's auto-sharding places every tensor; empty: as annotated.

    Raises:
        CompileError: the compiler refused, or died.
    """
    auto = [json.dumps(list(auto_mesh))] if auto_mesh else []
    flag_line = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *flags])
    key = _key(module, libtpu_version(), topology, flag_line, "step", *auto)
    entry = cache_folder() / "compile" / f"{key}.json"
    text = entry.with_suffix(".hlo")
    answer = json.loads(entry.read_text()) if entry.exists() and text.exists() else {}
    cached = bool(answer) and (not cycles or "error" in answer or answer.get("counted") == counter_version())
    if not cached:
        with tempfile.NamedTemporaryFile(suffix=".hlo") as hlo, tempfile.TemporaryDirectory() as folder:
            dump = _dump_flags(folder) if cycles else ""
            answer = _run_worker(module, topology, topology.chips, flag_line + dump, hlo.name, *auto)
            if cycles and "error" not in answer:
                _count_kernels(answer, Path(folder), topology)
            write_atomically(text, Path(hlo.name).read_text())
        write_atomically(entry, json.dumps(answer))
    compiled = _compiled(answer, topology, cached=cached)
    return CompiledStep(compiled, text.read_text(), tuple(map(tuple, answer["places"])))


def libtpu_version() -> str:
    """The version of the libtpu that compiles: that of ``$TPU_LIBRARY_PATH``, else the installed one."""
    library = os.environ.get("TPU_LIBRARY_PATH")
    if not library:
        return metadata.version("libtpu")
    packages = str(Path(library).resolve().parents[1])
    found = next(iter(metadata.distributions(name="libtpu", path=[packages])), None)
    return found.version if found else f"at {library}, {Path(library).stat().st_size} bytes"


def _dump_flags(folder: str | Path, everything: bool = False) -> str:
    flags = f" --xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
    return flags if everything else f"{flags} --xla_jf_dump_llo_pass_label_regex={DUMPS_READ}"


def _count_kernels(
    answer: dict[str, Any], folder: Path, topology: Topology, known: Sequence[Mapping[int, np.ndarray]] = ()
) -> None:
    counts = count_cycles(folder, topology.hardware, known)
    answer["kernels"] = [dataclasses.asdict(kernel) for kernel in counts]
    answer["counted"] = counter_version()


def _run_worker(module: bytes, topology: Topology, devices: int, flags: str, *rest: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".mlir") as file:
        file.write(module)
        file.flush()
        options = json.dumps(topology.jax_options())
        process = subprocess.run(
            [
                *(sys.executable, "-m", "xla_attention.planner.compile_worker"),
                *(file.name, options, str(devices), *rest),
            ],
            env={**os.environ, **_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
        )
    if process.returncode:  # libtpu aborts on what it did not foresee
        raise CompileError(
            f"the compiler for {topology} ended with status {process.returncode}:\n{process.stderr[-2000:]}"
        )
    return json.loads(process.stdout.splitlines()[-1])


def _compiled(answer: dict[str, Any], topology: Topology, *, cached: bool) -> Compiled:
    if "error" in answer:
        raise CompileError(f"compilation for {topology} failed: {answer['error']}")
    fields = {name: answer[name] for name in ("seconds", "argument_bytes", "output_bytes", "temp_bytes")}
    kernels = tuple(KernelCycles.from_json(kernel) for kernel in answer.get("kernels", ()))
    alias_bytes = answer.get("alias_bytes", 0)
    return Compiled(**fields, cached=cached, kernels=kernels, alias_bytes=alias_bytes)


def _key(module: bytes, *rest: object) -> str:
    return hashlib.sha256(module + repr([str(x) for x in rest]).encode()).hexdigest()[:32]


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
