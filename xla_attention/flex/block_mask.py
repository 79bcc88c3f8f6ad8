"""``create_block_mask`` without a matrix of queries by keys: intervals decide blocks, chunks the rest.

The result is a ``BlockMask`` of torch's, and whatever takes those takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from xla_attention.flex import expression, operators
from xla_attention.flex.bounds import Interval, bounds
from xla_attention.flex.expression import Node, evaluate
from xla_attention.flex.hoist import Hoisted, Sizes, compute, split
from xla_attention.flex.trace import Traced, trace

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CHUNK = 2**22  # pairs that are evaluated at once


class BlockMask(TorchBlockMask):
    """torch's ``BlockMask``, which also prints, and is indexed, on an XLA device.

    torch's own methods scatter in types that XLA does not mix; here they run on a copy on the CPU.
    """

    @classmethod
    def of(cls, mask: TorchBlockMask, device: torch.device | str) -> BlockMask:
        """``mask`` on ``device``; as torch's ``.to``, this leaves what its mask_mod captures where it is."""
        moved = (x.to(device) if isinstance(x, Tensor) else x for x in mask.as_tuple(flatten=False))
        return cls(*moved)

    def to(self, device: torch.device | str) -> BlockMask:
        return self.of(self, device)

    def to_dense(self) -> Tensor:
        return TorchBlockMask.to_dense(self.to("cpu")).to(self.kv_indices.device)

    def __getitem__(self, index: Any) -> BlockMask:
        return self.of(super(BlockMask, self.to("cpu")).__getitem__(index), self.kv_indices.device)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        adjusted = super(BlockMask, self.to("cpu"))._adjust(new_q_len, new_kv_len)
        return self.of(adjusted, self.kv_indices.device)


# Dynamo has fake modes of its own, and would look into ours.
@torch.compiler.disable
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The block mask of ``mask_mod``, as torch's ``create_block_mask``, for any device.

    Blocks that interval arithmetic decides, on indices and on captured data along queries or keys, are never
    looked into; the others are evaluated on the CPU, a few at a time. So memory is that of the result:
    131072 x 131072 takes its 2 x 1024 x 1024 indices.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, on scalars. The values of tensors that it captures are
            read, which on an XLA device waits for them.
        B, H: batch and heads; None or 1 where the mask is the same for all.
        Q_LEN, KV_LEN: lengths of query and of key.
        device: where the block lists are put.
        BLOCK_SIZE: queries and keys of a block, or one number for both.

    Raises:
        ValueError: a size below 1, or a function that cannot be translated (FlexTraceError).
    """
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    sizes = Sizes(1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    for name, size in (("B", sizes.batch), ("H", sizes.heads), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: got {size!r}, needs at least 1")
    if len(block) != 2 or any(not isinstance(n, int) or n < 1 for n in block):
        raise ValueError(f"BLOCK_SIZE: got {BLOCK_SIZE!r}, needs a positive int or two of them")
    some, every = block_states(trace(mask_mod, "mask_mod"), sizes, block)
    num, indices = _ordered(some & ~every)
    full_num, full_indices = _ordered(every)
    lists = map(torch.from_numpy, (num, indices, full_num, full_indices))
    made = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN))
    return made.to(device)


def block_states(traced: Traced, sizes: Sizes, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Whether any, and whether every, pair of each block is visible: ``[B, H, rows, columns]``.

    A block that reaches over the end is not visible whole.
    """
    starts = [np.arange(0, n, size) for n, size in zip((sizes.q_len, sizes.kv_len), block)]
    ends = [np.minimum(at + size, n) for at, size, n in zip(starts, block, (sizes.q_len, sizes.kv_len))]
    whole = (ends[0] - starts[0] == block[0])[:, None] & (ends[1] - starts[1] == block[1])
    with jax.default_device(jax.devices("cpu")[0]):
        captured = tuple(on_host(x) for x in traced.captured)
        function, hoisted = split(traced.result, "mask_mod")
        operands = [_small(h, captured, sizes) for h in hoisted]
        exact = _exact(traced, captured, sizes, block)
        shape = (sizes.batch, sizes.heads, len(starts[0]), len(starts[1]))
        some, every = np.zeros(shape, bool), np.zeros(shape, bool)
        varies = [n if _varies(traced, name) else 1 for name, n in (("b", shape[0]), ("h", shape[1]))]
        for b, h in np.ndindex(*varies):
            inputs: dict[Any, Interval] = {
                "b": (b, b),
                "h": (h, h),
                "q": (starts[0][:, None], ends[0][:, None] - 1),
                "kv": (starts[1][None, :], ends[1][None, :] - 1),
            }
            for n, (h_, x) in enumerate(zip(hoisted, operands)):
                if x is not None:
                    inputs[n] = _interval(h_, x[min(b, len(x) - 1)][min(h, x.shape[1] - 1)], starts)
            surely, maybe = (np.broadcast_to(x, shape[2:]) for x in bounds(function.result, inputs))
            here = some[b, h], every[b, h]
            here[0][...], here[1][...] = surely, surely
            rows, columns = np.nonzero(maybe & ~surely)
            here[0][rows, columns], here[1][rows, columns] = exact(b, h, starts[0][rows], starts[1][columns])
        for state in (some, every):
            state[...] = state[: varies[0], : varies[1]]
    return some, every & whole


def listed_mask(block_mask: TorchBlockMask) -> MaskMod:
    """A mask_mod that shows what the lists of a block mask show."""
    listed = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is not None:
        listed = listed | _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    while listed.ndim < 4:
        listed = listed[None]
    (rows, columns), one = block_mask.BLOCK_SIZE, [n == 1 for n in listed.shape[:2]]

    def in_lists(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return listed[0 if one[0] else b, 0 if one[1] else h, q_idx // rows, kv_idx // columns]

    return in_lists


def _dense(num: Tensor, indices: Tensor) -> Tensor:
    """Which blocks ``num [..., rows]`` and ``indices [..., rows, columns]`` list."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=num.device) < num[..., None]
    at = torch.where(listed, indices, columns).long()
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.int32, device=num.device)
    return dense.scatter(-1, at, 1)[..., :columns] > 0


def _ordered(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """torch's lists: how many blocks of each row, and all columns, those first."""
    return dense.sum(-1, dtype=np.int32), np.argsort(~dense, axis=-1, kind="stable").astype(np.int32)


def on_host(x: Tensor) -> jax.Array:
    """A tensor of any device as a JAX array, floats as float32."""
    x = x.detach().cpu()
    return jnp.asarray((x.float() if x.is_floating_point() else x).numpy())


def _varies(traced: Traced, name: str) -> bool:
    return name in traced.result.depends


def _small(hoisted: Hoisted, captured: tuple[jax.Array, ...], sizes: Sizes) -> np.ndarray | None:
    """The values of what varies along queries, or keys, or neither."""
    if hoisted.along not in ("head", "query", "key"):
        return None
    return np.asarray(compute(hoisted, captured, sizes))


def _interval(hoisted: Hoisted, x: np.ndarray, starts: list[np.ndarray]) -> Interval:
    if hoisted.value.dtype == "bool":
        x = x != 0
    if hoisted.along == "head":
        return x, x
    axis = 0 if hoisted.along == "query" else 1
    low, high = (fn.reduceat(x, starts[axis]) for fn in (np.minimum, np.maximum))
    return tuple(np.expand_dims(end, 1 - axis) for end in (low, high))


def _exact(
    traced: Traced, captured: tuple[jax.Array, ...], sizes: Sizes, block: tuple[int, int]
) -> Callable[[int, int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A function that looks into blocks: ``(b, h, first queries, first keys) -> any, every``."""
    at_once = max(CHUNK // (block[0] * block[1]), 1)

    def exact(b: int, h: int, q0: np.ndarray, kv0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [np.zeros((2, 0), bool)]
        for start in range(0, len(q0), at_once):
            firsts = [x[start : start + at_once] for x in (q0, kv0)]
            size = len(firsts[0])
            # In few shapes: each is compiled.
            padded = [np.pad(x, (0, _power_of_two(size) - size)).astype(np.int32) for x in firsts]
            seen = _look(captured, np.int32(b), np.int32(h), *padded, traced.result, sizes, block)
            found.append(np.stack([np.asarray(x)[:size] for x in seen]))
        return tuple(np.concatenate(found, axis=1))

    return exact


def _power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _look(
    captured: tuple[jax.Array, ...],
    b: jax.Array,
    h: jax.Array,
    q0: jax.Array,
    kv0: jax.Array,
    result: Node,
    sizes: Sizes,
    block: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Whether any, and whether every, pair of the blocks that begin at ``q0``, ``kv0`` is visible."""
    given = expression.inputs()
    fixed = {
        n: captured[n.args[0]].astype(operators.DTYPES[n.dtype])
        for n in expression.leaves(result)
        if n.op == "captured"
    }

    def pair(q: jax.Array, kv: jax.Array) -> jax.Array:
        indices = {given["b"]: b, given["h"]: h, given["q"]: q, given["kv"]: kv}
        return jnp.asarray(evaluate(result, fixed | indices, operators.apply))

    def look(q0: jax.Array, kv0: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, kv = q0 + jnp.arange(block[0]), kv0 + jnp.arange(block[1])
        seen = jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(q, kv)
        inside = (q < sizes.q_len)[:, None] & (kv < sizes.kv_len)
        return jnp.any(seen & inside), jnp.all(seen | ~inside)

    return jax.vmap(look)(q0, kv0)
