"""Searches block sizes by compiled schedule, and keeps the best in the table that the kernels choose by."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels.flash_attention import AttentionSpec, BackwardBlocks, BlockSizes, ForwardBlocks
from pallas_kernels.flash_attention.blocks import choose_backward, choose_forward, round_up, table_key
from pallas_kernels.masks import Causal, Full
from pallas_kernels.schedule import Tiling
from xla_attention.planner.attention_case import AttentionCase
from xla_attention.planner.compile import CompileError, compile_for_tpu, libtpu_version, write_atomically
from xla_attention.planner.kernels import flash_kernels
from xla_attention.planner.topology import Topology

Blocks = ForwardBlocks | BackwardBlocks

# The values that are tried of each field, in the order in which fields are searched: what matters most first.
# What keeps the kernel within VMEM (memory_kv, memory_q, chunk_q, single_buffer) is not searched.
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {
        "block_kv": (256, 512, 1024),
        "tile_q": (128, 256, 512, 1024),
        "mxu_row_sums": (False, True),
        "block_q": (512, 1024, 2048),
        "border": (128, 256),
        "border_kv": (128, 256, 512),
        "unroll": (1, 2, 4),
        "ahead": (1, 2, 4, 6),
    },
    "backward": {
        "transposed": (False, True),
        "tile_kv": (128, 256, 512),
        "tile_q": (128, 256, 512, 1024),
        "block_kv": (512, 1024, 2048),
        "block_q": (512, 1024, 2048),
        "ahead": (0, 1, 2, 3),
        "border": (128, 256),
    },
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One choice of blocks and its cycles with HBM stalls; None and ``error`` if the compiler refused it."""

    blocks: Blocks
    cycles: int | None
    error: str = ""


def default_blocks(case: AttentionCase, topology: Topology) -> Blocks:
    """What the kernels choose themselves."""
    sizes = (case.seq_len, case.seq_len, case.head_dim, case.head_dim)
    itemsize = jnp.dtype(case.dtype).itemsize
    if case.direction == "forward":
        simple = isinstance(case.mask, Causal | Full)
        return choose_forward(*sizes, itemsize, topology.hardware, simple=simple)
    return choose_backward(*sizes, case.heads // case.kv_heads, itemsize, topology.hardware)


def changed(case: AttentionCase, blocks: Blocks, change: dict[str, Any], default: Blocks) -> Blocks | None:
    """``blocks`` with other values of some fields; None if they then do not divide each other, or the length
    as the default pads it."""
    try:
        blocks = dataclasses.replace(blocks, **change)
        if isinstance(blocks, ForwardBlocks):
            rows, columns = round_up(case.seq_len, default.block_q), round_up(case.seq_len, default.block_kv)
            sizes = {
                "row_block": blocks.block_q,
                "memory": blocks.memory_kv or columns,
                "tile": blocks.block_kv,
            }
            if blocks.tile_q % blocks.border or blocks.border_kv % blocks.border:
                return None
        else:
            rows, columns = round_up(case.seq_len, default.block_kv), blocks.chunk_q or case.seq_len
            sizes = {"row_block": blocks.block_kv, "memory": blocks.memory_q, "tile": blocks.block_q}
        Tiling(rows=rows, columns=round_up(columns, sizes["memory"]), sub=blocks.border, **sizes)
    except ValueError:
        return None
    return blocks


def tune(
    case: AttentionCase,
    topology: Topology,
    *,
    limit: int,
    on_trial: Callable[[int, int, Blocks], None] = lambda done, total, blocks: None,
) -> list[Trial]:
    """Searches one field after the other, each from the best blocks so far, until a round brings nothing.

    Args:
        case: what to compute.
        topology: to compile for.
        limit: compilations at most.
        on_trial: called before each choice with those seen in this round, all of the round, and the choice.

    Returns:
        Every choice that was compiled, fewest cycles first, those refused last.

    Raises:
        CompileError: the default blocks do not compile.
    """
    fields = FIELDS[case.direction]
    of_round = sum(len(values) for values in fields.values())
    default = default_blocks(case, topology)
    trials: dict[Blocks, Trial] = {default: measure(case, topology, default)}
    if trials[default].cycles is None:
        raise CompileError(trials[default].error)

    def cycles(blocks: Blocks) -> float:
        return math.inf if trials[blocks].cycles is None else trials[blocks].cycles

    while True:
        before = current = min(trials, key=cycles)
        seen = 0
        for name, values in fields.items():
            choices = [changed(case, current, {name: value}, default) for value in values]
            for blocks in choices:
                on_trial(seen, of_round, blocks or current)
                seen += 1
                if blocks and blocks not in trials and len(trials) < limit:
                    trials[blocks] = measure(case, topology, blocks)
            current = min([current, *(blocks for blocks in choices if blocks in trials)], key=cycles)
        if current == before:
            break
    return sorted(trials.values(), key=lambda trial: cycles(trial.blocks))


def measure(case: AttentionCase, topology: Topology, blocks: Blocks) -> Trial:
    """Compiles one choice and counts its cycles."""
    spec = AttentionSpec(scale=case.scale, mask=case.mask, block_sizes=BlockSizes(**{case.direction: blocks}))
    kernels = flash_kernels(
        case.q_shape, case.kv_shape, dtype=case.dtype, spec=spec, hardware=topology.hardware
    )
    kernel = kernels[0 if case.direction == "forward" else 1]
    try:
        compiled = compile_for_tpu(kernel.fn, kernel.avals, topology, cycles=True)
    except CompileError as error:
        return Trial(blocks, None, str(error))
    return Trial(blocks, sum(kernel.total for kernel in compiled.kernels))


def key_of(case: AttentionCase, topology: Topology) -> str:
    """Of the table's entry for this case."""
    return table_key(topology.generation, case.direction, case.head_dim, case.seq_len, case.dtype)


def write_winner(
    path: Path, case: AttentionCase, topology: Topology, trials: list[Trial], command: str
) -> Mapping[str, Any]:
    """Puts the best of ``trials`` into the table, in place of what was there for the same key.

    Args:
        path: of the table; made if it is missing.
        case, topology: what was tuned.
        trials: as :func:`tune` returns them.
        command: that repeats the search.

    Returns:
        The entry: the searched fields of the blocks, their cycles and those of the default, how many choices
        compiled, and the command and libtpu that wrote it.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    winner, default = trials[0], default_blocks(case, topology)
    table[key_of(case, topology)] = entry = {
        "blocks": {name: getattr(winner.blocks, name) for name in FIELDS[case.direction]},
        "cycles": winner.cycles,
        "cycles_before": next(trial.cycles for trial in trials if trial.blocks == default),
        "choices": sum(trial.cycles is not None for trial in trials),
        "libtpu": libtpu_version(),
        "command": command,
    }
    text = json.dumps(dict(sorted(table.items())), indent=2)
    write_atomically(path, text + "\n")
    return entry
