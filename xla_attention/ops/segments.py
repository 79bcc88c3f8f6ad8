"""Segment ids of packed documents."""

import torch
from torch import Tensor


def segment_ids_from_lengths(lengths: Tensor, total: int) -> Tensor:
    """Segment ids of documents that lie end to end in sequences of ``total`` positions.

    The positions left over behind the last document are a segment of their own. Ids do not decrease, so the
    kernels of ``flash_attention(segment_ids=...)`` skip the tiles between documents.

    Args:
        lengths: ``[documents]`` or ``[batch, documents]`` integers, the lengths in order; zeros are no
            documents, so rows with fewer are filled up with them. Their values are read, which on an XLA
            device waits for it: call this where batches are made, on the CPU.
        total: positions of a sequence.

    Returns:
        ``[total]`` or ``[batch, total]`` int32.

    Raises:
        TypeError: ``lengths`` is no tensor of integers, or ``total`` no int.
        ValueError: a shape or length that does not fit, or documents longer than ``total`` together.
    """
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: got {got}, needs a tensor of int32 or int64")
    if isinstance(total, bool) or not isinstance(total, int):
        raise TypeError(f"total: got {type(total).__name__}, needs an int")
    if lengths.ndim not in (1, 2) or total < 1:
        raise ValueError(
            f"lengths: got shape {tuple(lengths.shape)} and total {total}, needs [documents] or "
            "[batch, documents] and at least 1"
        )
    ends = lengths.long().cumsum(-1)
    if (lengths < 0).any() or (ends > total).any():
        raise ValueError(
            f"lengths: got {lengths.tolist()}, each must be at least 0 and their sum at most total={total}"
        )
    # One at each position where a document has just ended; their running sum counts the documents before.
    after = torch.zeros(*lengths.shape[:-1], total + 1, dtype=torch.int64, device=lengths.device)
    after.scatter_add_(-1, ends, torch.ones_like(ends))
    return after.cumsum(-1)[..., :total].int()
