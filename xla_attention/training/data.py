"""Training data: documents packed into one row of tokens, cut into blocks, shuffled by seed.

Nothing here keeps state: a batch follows from the seed and a position (the number of sequences already
taken), so a resumed run sees exactly the batches that the uninterrupted one would have seen.
"""

import fnmatch
import functools
import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xla_attention.ops.placement import to_zigzag
from xla_attention.text import Tokenizer
from xla_attention.training.config import ConfigError, DataConfig, expand_stdlib


class DataError(ValueError):
    """Data that cannot be trained on; the message says which file or key to change."""


@dataclass(frozen=True)
class PackedTokens:
    """Documents end to end, cut into blocks of `seq_len + 1` tokens: inputs, and the same shifted by one.

    Neighbouring blocks share one token, so each token is a target once an epoch.

    Args:
        tokens: [n] unsigned integers, in memory or a memmap.
        seq_len: inputs of one block.
        vocab_size: ids must be below it.
        name: what the tokens are, for messages.
    """

    tokens: np.ndarray
    seq_len: int
    vocab_size: int
    name: str

    @property
    def blocks(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Blocks by index: [len(indices), seq_len + 1] int64."""
        rows = [self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in indices]
        batch = np.stack(rows).astype(np.int64)
        if batch.max() >= self.vocab_size:
            raise DataError(
                f"{self.name}: token id {batch.max()} is not below the model's vocab_size {self.vocab_size}; "
                "use the tokenizer the data was made with, and check data.dtype of a .bin file"
            )
        return batch

    def fingerprint(self) -> str:
        """Tells one data set from another, without reading all of a large one."""
        mebi = 2**20
        digest = hashlib.sha256(f"{len(self.tokens)} {self.tokens.dtype} {self.seq_len}".encode())
        digest.update(self.tokens[:mebi].tobytes())
        digest.update(self.tokens[-mebi:].tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """What a model is given of a batch of blocks.

    Attributes:
        input_ids: [batch, seq_len] int64.
        labels: [batch, seq_len] int64: the token that follows, or -100 where it begins another document.
        segment_ids: [batch, seq_len] int32, which count the documents of a row from 0; None where documents
            see each other.
        position_ids: [batch, seq_len] int32, the place of each token in its document; None where tokens are
            in their natural order.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray | None
    position_ids: np.ndarray | None = None


def as_batch(blocks: np.ndarray, end_id: int | None) -> Batch:
    """Inputs, targets and documents of blocks.

    Args:
        blocks: [batch, seq_len + 1] int64.
        end_id: the last token of each document, or None if documents see each other.
    """
    input_ids, labels = blocks[:, :-1], blocks[:, 1:]
    if end_id is None:
        return Batch(input_ids, labels, None)
    ends = input_ids == end_id
    documents_before = ends.cumsum(axis=1) - ends  # an end belongs to the document that it ends
    return Batch(input_ids, np.where(ends, -100, labels), documents_before.astype(np.int32))


def in_zigzag(batch: Batch, shards: int) -> Batch:
    """The batch in the order in which shards of the sequence hold it; see `ops.placement.to_zigzag`."""
    places = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
    starts = np.zeros_like(places)
    if batch.segment_ids is not None:
        begins = np.diff(batch.segment_ids, axis=1, prepend=0) != 0
        starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    positions = (places - starts).astype(np.int32)

    def reordered(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else to_zigzag(torch.from_numpy(array), shards).numpy()

    return Batch(*map(reordered, (batch.input_ids, batch.labels, batch.segment_ids, positions)))


def document_end(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """The id that ends a document, or None if documents see each other.

    Raises:
        ConfigError: documents shall be masked, and the tokenizer has no such id.
    """
    if config.mask_documents and tokenizer.eos_id is None:
        raise ConfigError(
            "data.mask_documents: the tokenizer has no end-of-text id that would show where documents end; "
            "set it to false, or name an eos_token in the tokenizer_config.json"
        )
    return None if config.mask_documents is False else tokenizer.eos_id


def training_batch(
    data: PackedTokens, batch_size: int, position: int, seed: int, rows: Iterable[int] | None = None
) -> np.ndarray:
    """The batch that starts at a position of the endless, shuffled row of blocks.

    Args:
        position: sequences taken before, over all epochs.
        seed: with the epoch, sets that epoch's order.
        rows: those of the batch that this process is to load; None for all.

    Returns:
        [batch_size or len(rows), seq_len + 1] int64.
    """
    rows = range(batch_size) if rows is None else rows
    places = (divmod(position + int(row), data.blocks) for row in rows)
    return data.take([_order(data.blocks, seed, epoch)[place] for epoch, place in places])


def evaluation_batches(
    data: PackedTokens, batch_size: int, batches: int, rows: Iterable[int] | None = None
) -> Iterator[np.ndarray]:
    """At most `batches` batches, spread evenly over the held-out blocks: the same at every evaluation.

    Args:
        rows: those of each batch that this process is to load; None for all.
    """
    count = min(batches, data.blocks // batch_size)
    places = np.linspace(0, data.blocks - 1, count * batch_size).astype(int)
    for batch in places.reshape(count, batch_size):
        yield data.take(batch if rows is None else batch[rows])


def load_data(
    config: DataConfig, tokenizer: Tokenizer, *, seq_len: int, batch_size: int, vocab_size: int, seed: int
) -> tuple[PackedTokens, PackedTokens | None]:
    """Reads, tokenizes and packs.

    Args:
        batch_size: the fewest blocks that training and held-out data must hold.
        vocab_size: the model's.
        seed: chooses the files that are held out.

    Returns:
        Training data, and held-out data (None if the configuration holds none out).

    Raises:
        DataError: a glob without files, no text in them, a file that is not text, or too little data.
    """
    files = find_files(config.train, config.exclude, "data.train")
    if config.eval:
        train = _read(files, config, tokenizer)
        held_out = _read(find_files(config.eval, config.exclude, "data.eval"), config, tokenizer)
    elif config.held_out == 0:
        train, held_out = _read(files, config, tokenizer), None
    elif len(files) == 1:
        tokens = _read(files, config, tokenizer)
        cut = round(len(tokens) * (1 - config.held_out))
        train, held_out = tokens[:cut], tokens[cut:]
    else:
        shuffled = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
        count = max(1, round(len(files) * config.held_out))
        train = _read(sorted(shuffled[count:]), config, tokenizer)
        held_out = _read(sorted(shuffled[:count]), config, tokenizer)

    def packed(tokens: np.ndarray, name: str, remedy: str) -> PackedTokens:
        data = PackedTokens(tokens, seq_len, vocab_size, name)
        if data.blocks < batch_size:
            raise DataError(
                f"{name}: {len(tokens)} tokens make {data.blocks} blocks of seq_len {seq_len}, and a batch "
                f"takes {batch_size}; {remedy}, or lower batch_size or seq_len"
            )
        return data

    return (
        packed(train, "training data", "give data.train more text"),
        None if held_out is None else packed(held_out, "held-out data", "raise data.held_out"),
    )


def find_files(patterns: Sequence[str], exclude: Sequence[str], key: str) -> list[Path]:
    """Files that any of the globs names, sorted, without those excluded.

    Raises:
        DataError: a glob names no file, or a `.bin` file is not the only one. `key` is the one to blame.
    """
    unwanted = [expand_stdlib(pattern) for pattern in exclude]
    files: set[str] = set()
    for pattern in map(expand_stdlib, patterns):
        found = {file for file in glob.glob(pattern, recursive=True) if Path(file).is_file()}
        if not found:
            raise DataError(f"{key}: no file matches {pattern!r}")
        files |= {file for file in found if not any(fnmatch.fnmatch(file, glob_) for glob_ in unwanted)}
    if not files:
        raise DataError(f"{key}: data.exclude leaves no file of {', '.join(patterns)}")
    if len(files) > 1 and any(file.endswith(".bin") for file in files):
        raise DataError(f"{key}: a .bin file stands alone, got {len(files)} files")
    return [Path(file) for file in sorted(files)]


def tokenize_files(files: Sequence[Path], tokenizer: Tokenizer) -> np.ndarray:
    """Packs text files: their tokens in order, each file ended by the tokenizer's end-of-text id, if any.

    Returns:
        [n] uint16, or uint32 where the vocabulary asks for it.

    Raises:
        DataError: all files are empty, or one is not UTF-8 text.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    texts = filter(None, map(_text, files))  # an empty file is no document
    documents = [np.asarray(tokenizer.encode(text) + end, dtype) for text in texts]
    if not documents:
        raise DataError(
            f"no text: {', '.join(map(str, files[:3]))} {'is' if len(files) == 1 else 'are'} empty"
        )
    return np.concatenate(documents)


def _read(files: Sequence[Path], config: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    if files[0].suffix != ".bin":
        return tokenize_files(files, tokenizer)
    size, item = files[0].stat().st_size, np.dtype(config.dtype).itemsize
    if size == 0 or size % item:
        raise DataError(f"{files[0]}: {size} bytes are not a row of {config.dtype}; check data.dtype")
    return np.memmap(files[0], dtype=config.dtype, mode="r")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error}); leave it out with data.exclude") from None


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _order(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(blocks)
