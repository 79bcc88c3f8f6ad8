"""Block sizes of the flash attention kernels, and the choice of them where the caller makes none."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from pallas_kernels.hardware import Hardware

LANES = 128  # elements of a register's minor dimension: what VMEM pads head_dim to
TABLE = Path(__file__).with_name("block_table.json")  # written by `xla-attention tune`


def _check_positive(blocks: Any) -> None:
    for field in dataclasses.fields(blocks):
        value = getattr(blocks, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            least, unit = (
                (0, 1) if field.name == "ahead" else (1, 1) if field.name == "unroll" else (LANES, LANES)
            )
            if value < least or value % unit:
                raise ValueError(f"{field.name}: got {value}, must be a multiple of {unit}, at least {least}")


def _check_divides(blocks: Any, part: str, whole: str) -> None:
    if getattr(blocks, whole) % getattr(blocks, part):
        raise ValueError(f"{part}: got {getattr(blocks, part)}, must divide {whole}={getattr(blocks, whole)}")


@dataclasses.dataclass(frozen=True)
class ForwardBlocks:
    """Tiling of the forward pass; numbers are elements of the sequence.

    Attributes:
        block_q: queries of one grid step.
        tile_q: queries whose softmax is computed at once; divides ``block_q``.
        block_kv: keys of one step of the online softmax.
        memory_kv: keys in VMEM at a time; None keeps all of a head there.
        unroll: key blocks that one loop iteration computes.
        border: side of the sub-tiles in which partly visible tiles are cut; empty ones are never computed.
        border_kv: most keys of one softmax on a border.
        ahead: rectangles of the border whose logits are issued before they are needed.
        single_buffer: keep K and V in one buffer each, so that twice as many keys fit; the fetch of the next
            head's is then not hidden.
        mxu_row_sums: sum the probabilities on the MXU, by rows of ones beside V^T. They are then summed as
            rounded to V's type.
    """

    block_q: int = 1024
    tile_q: int = 256
    block_kv: int = 512
    memory_kv: int | None = None
    unroll: int = 1
    border: int = 128
    border_kv: int = 256
    ahead: int = 4
    single_buffer: bool = False
    mxu_row_sums: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divides(self, "tile_q", "block_q")
        _check_divides(self, "border", "block_q")
        _check_divides(self, "border", "block_kv")
        if self.memory_kv is not None:
            _check_divides(self, "block_kv", "memory_kv")


@dataclasses.dataclass(frozen=True)
class BackwardBlocks:
    """Tiling of the backward pass; numbers are elements of the sequence.

    Attributes:
        block_kv: keys of one grid step.
        block_q: queries of one iteration of its inner loop.
        memory_q: queries in VMEM at a time; a multiple of ``block_q``.
        chunk_q: queries whose dq is summed in VMEM; None takes all. Several chunks are several passes over
            the keys.
        tile_kv, tile_q: sides of the tiles whose probabilities are computed at once.
        border: side of the sub-tiles in which partly visible tiles are cut; empty ones are never computed.
        ahead: tiles by which the exponentials run ahead of the products.
        single_buffer: keep Q, O and dO in one buffer each, so that twice as many queries fit; the fetch of
            the next ones is then not hidden.
        transposed: keep the gradients transposed. P and dS are then the stationary operands and fill a
            256-wide MXU, where an operand that is head_dim = 128 wide would fill half.
    """

    block_kv: int = 1024
    block_q: int = 1024
    memory_q: int = 4096
    chunk_q: int | None = None
    tile_kv: int = 256
    tile_q: int = 512
    border: int = 128
    ahead: int = 1
    single_buffer: bool = False
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divides(self, "tile_kv", "block_kv")
        _check_divides(self, "tile_q", "block_q")
        _check_divides(self, "border", "block_q")
        _check_divides(self, "border", "block_kv")
        _check_divides(self, "block_q", "memory_q")
        if self.chunk_q is not None:
            _check_divides(self, "memory_q", "chunk_q")


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tiling of both passes; None lets the kernel choose."""

    forward: ForwardBlocks | None = None
    backward: BackwardBlocks | None = None


FORWARD = {
    "v4": ForwardBlocks(tile_q=512, block_kv=256, unroll=2, mxu_row_sums=True),
    "v5e": ForwardBlocks(),
    "v5p": ForwardBlocks(),
    "v6e": ForwardBlocks(tile_q=512, unroll=2, border=256, border_kv=512, mxu_row_sums=True),
    # Few large pieces: each is several XLA operations.
    "interpreter": ForwardBlocks(block_q=512, tile_q=512, border=256, border_kv=512, ahead=1),
}

# Queries of a step where the program is small: for each piece of the border it holds code of its own.
LARGE_Q = {"v5e": 2048, "v5p": 2048}

BACKWARD = {
    "v4": BackwardBlocks(),
    "v5e": BackwardBlocks(),
    "v5p": BackwardBlocks(),
    "v6e": BackwardBlocks(block_kv=2048, tile_q=256, border=256, ahead=3, transposed=True),
    "interpreter": BackwardBlocks(block_kv=512, block_q=512, tile_kv=512, border=256, ahead=0),
}


def round_up(n: int, unit: int) -> int:
    """The least multiple of ``unit`` that is at least ``n``."""
    return -(-n // unit) * unit


def _even(length: int, block: int) -> int:
    """A block of at most ``block`` that pads ``length`` little: equal parts, in whole registers."""
    parts = -(-length // block)
    return min(block, round_up(-(-length // parts), LANES if parts == 1 else 2 * LANES))


def _divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is whole registers and at most ``most``."""
    return max(d for d in range(LANES, max(most, LANES) + 1, LANES) if n % d == 0)


def _spills(tile_kv: int, tile_q: int, itemsize: int) -> int:
    """Bytes of VMEM that registers spill to; measured, for these tiles are as large as registers allow.

    A float32 product is several passes of the MXU over parts of its operands, and the parts spill too.
    """
    return tile_kv * tile_q * (24 if itemsize == 2 else 76)


def table_key(generation: str, direction: str, head_dim: int, length: int, dtype: str) -> str:
    """Key of an entry of the tuned table; the length is the power of two at or above the true one."""
    return f"{generation}/{direction}/{head_dim}/{2 ** math.ceil(math.log2(length))}/{dtype}"


@functools.cache
def _tuned(generation: str, direction: str, dtype: str) -> dict[tuple[int, int], dict[str, Any]]:
    """What ``xla-attention tune`` found best, by (head_dim, length)."""
    entries = {}
    for key, entry in json.loads(TABLE.read_text()).items():
        *of, head_dim, length, dtype_ = key.split("/")
        if (*of, dtype_) == (generation, direction, dtype):
            entries[int(head_dim), int(length)] = entry["blocks"]
    return entries


def _base(direction: str, hardware: Hardware, length: int, head_dim: int, itemsize: int) -> Any:
    """The blocks to begin with: those tuned for the next head dim above and the nearest length, else
    a generation's own.

    float32 gets tiles that it does not spill out of VMEM.
    """
    base = (FORWARD if direction == "forward" else BACKWARD)[hardware.name]
    tuned = _tuned(hardware.name, direction, "bfloat16" if itemsize == 2 else "float32")
    if above := [dim for dim, _ in tuned if dim >= head_dim]:
        lengths = (n for dim, n in tuned if dim == min(above))
        nearest = min(lengths, key=lambda n: abs(math.log2(n) - math.log2(length)))
        base = dataclasses.replace(base, **tuned[min(above), nearest])
    if itemsize == 4 and not hardware.interpret:
        base = dataclasses.replace(base, tile_q=min(base.tile_q, 256))
    return base


def choose_forward(
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    hardware: Hardware,
    bias_itemsize: int = 0,
    out_itemsize: int | None = None,
    simple: bool = False,
) -> ForwardBlocks:
    """Blocks for these lengths and head dims that fit the hardware's VMEM.

    Args:
        q_len, kv_len: true lengths.
        head_dim, value_dim: of q and k, and of v.
        itemsize: bytes of an element of q, k and v.
        hardware: what to compile for.
        bias_itemsize: bytes of an element of the bias, 0 without one.
        out_itemsize: bytes of an element of the results, if not those of q.
        simple: nothing but a full or causal mask. Larger blocks then do not take minutes to compile.
    """
    base = _base("forward", hardware, q_len, head_dim, itemsize)
    own, large = FORWARD[hardware.name].block_q, LARGE_Q.get(hardware.name, base.block_q)
    small = itemsize == 2 and max(head_dim, value_dim) <= LANES and not (q_len | kv_len) % large
    # Keys beyond VMEM come in pieces: more kinds of steps, and again a large program.
    whole = round_up(kv_len, LANES) * 6 * LANES * itemsize < 0.5 * hardware.vmem_bytes
    if simple and small and whole and base.block_q == own:
        base = dataclasses.replace(base, block_q=large)
    block_q = _even(q_len, base.block_q)
    # Key blocks that divide query blocks keep one border for every row of a causal mask.
    block_kv = min(
        round_up(kv_len, LANES), _divisor(block_q, base.block_kv) if block_q >= 256 else base.block_kv
    )
    border = base.border if block_q % base.border == block_kv % base.border == 0 else LANES
    key_bytes = itemsize * (round_up(head_dim, LANES) + round_up(value_dim, LANES))
    resident = round_up(kv_len, block_kv) * key_bytes
    transposed = round_up(kv_len, block_kv) * value_dim * itemsize
    # q and o in two buffers, O^T and the logits
    fixed = block_q * (2 * key_bytes + 4 * (round_up(value_dim, LANES) + block_kv))
    fixed += 2 * block_q * round_up(value_dim, LANES) * ((out_itemsize or itemsize) - itemsize)
    fixed += _spills(base.tile_q, block_kv, itemsize)
    vmem = min(0.65 * hardware.vmem_bytes, 0.98 * hardware.vmem_bytes - fixed)
    memory_kv, single_buffer = None, False
    if 2 * resident + transposed > vmem:
        if resident + transposed <= vmem:
            single_buffer = True
        else:
            unit = max(block_q, block_kv)
            memory_kv = max(int(0.25 * hardware.vmem_bytes) // (2 * key_bytes) // unit, 1) * unit
    if bias_itemsize:
        most = int(0.2 * hardware.vmem_bytes) // (2 * block_q * bias_itemsize)
        if most < (memory_kv or kv_len):
            memory_kv = max(most // block_kv, 1) * block_kv
    return dataclasses.replace(
        base,
        block_q=block_q,
        tile_q=_divisor(block_q, base.tile_q),
        block_kv=block_kv,
        memory_kv=memory_kv,
        single_buffer=single_buffer,
        border=border,
    )


def choose_backward(
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int,
    group: int,
    itemsize: int,
    hardware: Hardware,
    bias_itemsize: int = 0,
    out_itemsize: int | None = None,
) -> BackwardBlocks:
    """Blocks of the backward pass, as :func:`choose_forward`; ``group``: query heads of one key head."""
    base = _base("backward", hardware, q_len, head_dim, itemsize)
    lanes, value_lanes = round_up(head_dim, LANES), round_up(value_dim, LANES)
    # k, v and their gradients, each in two buffers, the sums of the gradients, and the dq that leaves
    out = out_itemsize or itemsize
    key_bytes = (lanes + value_lanes) * (2 * itemsize + 2 * out + 4) + 2 * out * lanes
    dq_bytes = 4 * group * (head_dim if base.transposed else lanes)
    column_bytes = itemsize * (lanes + 2 * value_lanes)  # of q, o and do

    while base.block_kv > LANES and (
        base.block_kv * key_bytes > 0.25 * hardware.vmem_bytes
        or min(base.block_q, q_len) * dq_bytes > 0.2 * hardware.vmem_bytes
        or 2 * base.block_kv * base.block_q * bias_itemsize > 0.3 * hardware.vmem_bytes
    ):
        half = max(base.block_q // 2, LANES)
        base = dataclasses.replace(
            base,
            block_kv=base.block_kv // 2,
            block_q=half,
            tile_q=min(base.tile_q, half),
            tile_kv=min(base.tile_kv, base.block_kv // 2),
        )
    block_kv, block_q = _even(kv_len, base.block_kv), _even(q_len, base.block_q)
    # Memory in whole key blocks lets the dq that a key block completes leave at once.
    unit = block_kv if block_kv % block_q == 0 and q_len > block_q else block_q
    q_padded = round_up(q_len, unit)
    fixed = block_kv * key_bytes + _spills(base.tile_kv, base.tile_q, itemsize)
    vmem = min(0.75 * hardware.vmem_bytes, 0.98 * hardware.vmem_bytes - fixed)
    memory_q, chunk_q, single_buffer = q_padded, None, False
    column_bytes += block_kv * bias_itemsize
    if bias_itemsize and q_padded > 2048:
        memory_q = max(2048 // unit, 1) * unit
    elif q_padded * (2 * column_bytes + dq_bytes) > vmem:
        if q_padded * (column_bytes + dq_bytes) <= vmem:
            single_buffer = True
        else:
            memory_q = max(int(0.3 * hardware.vmem_bytes) // (2 * column_bytes) // unit, 1) * unit
            if round_up(q_len, memory_q) * dq_bytes + 2 * memory_q * column_bytes > vmem:
                most = min(memory_q // 2, int(vmem) // (2 * column_bytes + dq_bytes))
                memory_q = max(most // unit, 1) * unit
                parts = round_up(q_len, memory_q) // memory_q
                most = max(int(vmem - 2 * memory_q * column_bytes) // dq_bytes // memory_q, 1)
                chunks = -(-parts // most)  # alike, so that the last is not padding
                chunk_q = None if chunks == 1 else -(-parts // chunks) * memory_q
    border = base.border if block_q % base.border == block_kv % base.border == 0 else LANES
    return dataclasses.replace(
        base,
        block_kv=block_kv,
        block_q=block_q,
        memory_q=memory_q,
        chunk_q=chunk_q,
        single_buffer=single_buffer,
        tile_kv=_divisor(block_kv, base.tile_kv),
        tile_q=_divisor(block_q, base.tile_q),
        border=border,
    )
