"""Where the elements of an integer array lie in scalar memory."""

from __future__ import annotations

import math

import numpy as np


def words_of(array: np.ndarray) -> np.ndarray:
    """The array as 32-bit words in the layout of a kernel's operand.

    One dimension is linear; elements narrower than a word fill 128 words at a time, the first 128 in their
    lowest bits. More dimensions are tiled by 8 rows (fewer, if there are fewer) and 128 columns, and rows
    narrower than a word share it with their neighbours.

    Args:
        array: of 8, 16 or 32-bit integers.
    """
    bits = array.dtype.itemsize * 8
    packed = 32 // bits
    if array.ndim <= 1:
        position = np.arange(array.size)
        line, place = np.divmod(position, 128 * packed)
        word, part = (position, 0) if packed == 1 else (line * 128 + place % 128, place // 128)
    else:
        rows, columns = array.shape[-2:]
        tile = min(max(2 ** math.ceil(math.log2(rows)), packed), 8)
        outer, row, column = np.indices((math.prod(array.shape[:-2]), rows, columns)).reshape(3, -1)
        tiles = (outer * -(-rows // tile) + row // tile) * -(-columns // 128) + column // 128
        word = tiles * (tile // packed * 128) + row % tile // packed * 128 + column % 128
        part = row % packed
    words = np.zeros(int(word.max()) + 1 if array.size else 0, np.int64)
    np.bitwise_or.at(words, word, (array.ravel().astype(np.int64) & (2**bits - 1)) << (bits * part))
    return words.astype(np.uint32).view(np.int32)
