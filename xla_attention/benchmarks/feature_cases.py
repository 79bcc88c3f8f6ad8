"""Attention in every combination of what hides keys and what changes scores, for each implementation's terms.

A mask here is its options for our operator beside a ``mask_mod`` for ``flex_attention``; both are written by
hand, from what the option is documented to mean.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pallas_kernels.flash_attention import BackwardBlocks, BlockSizes, ForwardBlocks
from xla_attention import masks

Options = dict[str, Any]
MaskMod = Callable[..., Tensor]  # of batch, head, query and key: whether the query sees the key

# Several blocks in sequences of a few hundred, of each of the kernels' forms.
_RESIDENT = BlockSizes(
    ForwardBlocks(block_q=128, tile_q=128, block_kv=128, border=128, border_kv=128, ahead=1),
    BackwardBlocks(block_kv=128, block_q=128, memory_q=128, tile_kv=128, tile_q=128, ahead=0),
)
_STREAMED = BlockSizes(
    dataclasses.replace(_RESIDENT.forward, memory_kv=128, mxu_row_sums=True),
    dataclasses.replace(_RESIDENT.backward, chunk_q=128, transposed=True),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of q, k and v, and the tiling, None for the operator's own."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    block_sizes: BlockSizes | None = None

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        blocks = {None: "", _RESIDENT: ", 128-blocks", _STREAMED: ", streamed 128-blocks"}
        lengths = f"{self.q_len} x {self.kv_len}"
        return f"{self.batch} x {self.heads}/{self.kv_heads}, {lengths}, {dims}{blocks[self.block_sizes]}"


SHAPES = (
    Shape(2, 2, 2, 65, 65, 32, 32),
    Shape(2, 4, 2, 129, 129, 64, 64, _RESIDENT),
    Shape(1, 4, 1, 100, 257, 16, 16, _STREAMED),
    Shape(2, 3, 1, 200, 77, 80, 80),
    Shape(2, 2, 1, 150, 150, 192, 128),
    Shape(1, 2, 1, 33, 70, 576, 512),
    Shape(2, 2, 2, 1, 130, 96, 48),
)


@dataclasses.dataclass(frozen=True)
class Score:
    """Changes of the scores; ``bias`` is its first two sizes, such as ``"1 x heads"``."""

    softcap: float | None = None
    bias: str | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None

    def __str__(self) -> str:
        changes = dataclasses.asdict(self) | {"bias": None}
        names = [name for name, value in changes.items() if value]
        return " + ".join(names + [f"bias {self.bias}"] * bool(self.bias)) or "plain"


SCORES = (
    Score(),
    Score(softcap=2.0),
    Score(bias="1 x heads"),
    Score(bias="batch x 1", scale=-0.3),
    Score(alibi=True),
    Score(sinks=True),
    Score(bias="batch x heads", softcap=2.0),
    Score(alibi=True, sinks=True),
    Score(softcap=2.0, sinks=True),
    Score(softcap=2.0, bias="1 x 1", alibi=True, sinks=True),
)


def everything(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    return {}, lambda b, h, q, kv: q >= 0


def causal(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    return {"is_causal": True}, lambda b, h, q, kv: kv <= q


def bottom_right(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    left_over = shape.kv_len - shape.q_len
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    return options, lambda b, h, q, kv: kv <= q + left_over


def window(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    return {"is_causal": True, "sliding_window": 40}, lambda b, h, q, kv: (kv <= q) & (kv > q - 40)


def two_sided_window(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    left_over = shape.kv_len - shape.q_len
    options = {"sliding_window": (50, 9), "causal_alignment": "bottom_right"}
    return options, lambda b, h, q, kv: (kv >= q + left_over - 50) & (kv <= q + left_over + 9)


def keys_ahead(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    return {"sliding_window": (0, None)}, lambda b, h, q, kv: kv >= q


def prefix(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    return {"mask": masks.prefix_lm(45)}, lambda b, h, q, kv: (kv < 45) | (kv <= q)


def chunks(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    options = {"is_causal": True, "mask": masks.Chunked(48)}
    return options, lambda b, h, q, kv: (kv <= q) & (kv // 48 == q // 48)


def composed(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    """Far keys, the first few, and none of those near: holes in the middle of tiles."""
    mask = ~masks.SlidingWindow(20, 20) | (masks.KeyLength(4) & masks.Chunked(64))
    return {"mask": mask}, lambda b, h, q, kv: ((q - kv).abs() > 20) | ((kv < 4) & (q // 64 == kv // 64))


def documents(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    q_ids, kv_ids = (
        torch.randint(0, 4, (shape.batch, n), generator=random).sort(dim=1).values
        for n in (shape.q_len, shape.kv_len)
    )
    if shape.q_len == shape.kv_len:
        options, kv_ids = {"segment_ids": q_ids}, q_ids
    else:
        options = {"segment_ids": (q_ids, kv_ids)}
    return options | {"is_causal": True}, lambda b, h, q, kv: (q_ids[b, q] == kv_ids[b, kv]) & (kv <= q)


def scattered_segments(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    q_ids, kv_ids = (
        torch.randint(0, 3, (shape.batch, n), generator=random, dtype=torch.int32)
        for n in (shape.q_len, shape.kv_len)
    )
    return {"segment_ids": (q_ids, kv_ids)}, lambda b, h, q, kv: q_ids[b, q] == kv_ids[b, kv]


def lengths(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    q_lens, kv_lens = (
        torch.randint(0, n + 1, (shape.batch,), generator=random) for n in (shape.q_len, shape.kv_len)
    )
    return {"q_lens": q_lens, "kv_lens": kv_lens}, lambda b, h, q, kv: (q < q_lens[b]) & (kv < kv_lens[b])


def dense(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    """By batch; some queries see nothing."""
    shown = torch.rand(shape.batch, 1, shape.q_len, shape.kv_len, generator=random) < 0.5
    shown[:, :, 10:20] = False
    return {"mask": shown}, lambda b, h, q, kv: shown[b, h * 0, q, kv]


def dense_of_heads(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    shown = torch.rand(1, shape.heads, shape.q_len, shape.kv_len, generator=random) < 0.3
    options = {"mask": shown, "is_causal": True}
    return options, lambda b, h, q, kv: shown[b * 0, h, q, kv] & (kv <= q)


def masks_of_heads(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    """Shared unevenly: the first two heads are local, the others alternate."""
    shown = masks.Causal(20), masks.SlidingWindow(40, 5)
    which = torch.tensor([1, 1, 0, 1, 0])[: shape.heads]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        local = (kv >= q - 40) & (kv <= q + 5)
        return torch.where(which[h] == 1, local, kv <= q + 20)

    return {"mask": masks.PerHead([shown[n] for n in which])}, mask_mod


def documents_and_masks_of_heads(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    """In packed documents: every head another chunk size, one of them all."""
    options, same_document = documents(shape, random)
    sizes = torch.tensor([1000, 33, 64, 17])[: shape.heads]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return same_document(b, h, q, kv) & (q // sizes[h] == kv // sizes[h])

    return options | {"mask": masks.PerHead([masks.Chunked(int(n)) for n in sizes])}, mask_mod


def windowed_documents(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    options, same_document = documents(shape, random)
    return options | {"sliding_window": 30}, lambda b, h, q, kv: same_document(b, h, q, kv) & (kv > q - 30)


def all_at_once(shape: Shape, random: torch.Generator) -> tuple[Options, MaskMod]:
    """Everything that hides keys: all must show one for it to be seen."""
    kinds = [kind(shape, random) for kind in (documents, lengths, dense, window)]
    options = {name: value for options, _ in kinds for name, value in options.items()}

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = kinds[0][1](b, h, q, kv)
        for _, mod in kinds[1:]:
            seen = seen & mod(b, h, q, kv)
        return seen

    return options, mask_mod


MASKS = (
    everything,
    causal,
    bottom_right,
    window,
    two_sided_window,
    keys_ahead,
    prefix,
    chunks,
    composed,
    documents,
    scattered_segments,
    lengths,
    dense,
    dense_of_heads,
    masks_of_heads,
    documents_and_masks_of_heads,
    windowed_documents,
    all_at_once,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention in one dtype."""

    mask: Callable[[Shape, torch.Generator], tuple[Options, MaskMod]]
    score: Score
    shape: Shape
    dtype: torch.dtype

    @property
    def names(self) -> dict[str, str]:
        """What the case is made of, in words."""
        mask = self.mask.__name__.replace("_", " ")
        dtype = str(self.dtype).removeprefix("torch.")
        return {"mask": mask, "score": str(self.score), "shape": str(self.shape), "dtype": dtype}

    def __str__(self) -> str:
        return "; ".join(self.names.values())

    def build(self) -> Problem:
        """The case's tensors, on the CPU; the same every time."""
        shape, random = self.shape, torch.Generator().manual_seed(0)
        queries = (shape.batch, shape.heads, shape.q_len)
        keys = (shape.batch, shape.kv_heads, shape.kv_len)
        sizes = {"q": (*queries, shape.head_dim), "k": (*keys, shape.head_dim), "v": (*keys, shape.value_dim)}
        if self.score.bias is not None:
            named = {"batch": shape.batch, "heads": shape.heads, "1": 1}
            first, second = (named[size] for size in self.score.bias.split(" x "))
            sizes["bias"] = (first, second, shape.q_len, shape.kv_len)
        if self.score.sinks:
            sizes["sinks"] = (shape.heads,)
        leaves = {
            name: torch.randn(size, generator=random).to(torch.float32 if name == "sinks" else self.dtype)
            for name, size in sizes.items()
        }
        options, mask_mod = self.mask(shape, random)
        if self.score.alibi:
            options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, shape.heads + 1)
        for name in ("softcap", "scale"):
            if getattr(self.score, name) is not None:
                options[name] = getattr(self.score, name)
        do = torch.randn(*queries, shape.value_dim, generator=random).to(self.dtype)
        return Problem(leaves, options, mask_mod, do, torch.randn(queries, generator=random))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tensors of a case.

    Attributes:
        leaves: what is differentiated: q, k, v, and bias and sinks where there are any.
        options: the operator's other arguments.
        mask_mod: for ``flex_attention``, the same mask.
        do, dlse: gradients of the results.
    """

    leaves: dict[str, Tensor]
    options: Options
    mask_mod: MaskMod
    do: Tensor
    dlse: Tensor

    @property
    def query_offset(self) -> int:
        """The position of query 0 among the keys."""
        bottom_right = self.options.get("causal_alignment") == "bottom_right"
        return self.leaves["k"].shape[2] - self.leaves["q"].shape[2] if bottom_right else 0


def grid(*, quick: bool = False) -> list[Case]:
    """Every mask with every score change in every dtype, or every 29th of these.

    Shapes take turns, so that each mask and each score change meets all of them.
    """
    kinds = itertools.product(enumerate(MASKS), enumerate(SCORES), (torch.float32, torch.bfloat16))
    cases = [
        Case(mask, score, SHAPES[(n + m) % len(SHAPES)], dtype) for (n, mask), (m, score), dtype in kinds
    ]
    return cases[::29] if quick else cases
