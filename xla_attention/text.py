"""Tokenizers behind one small interface: raw bytes, or any `tokenizer.json` (the `tokenizers` library)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

END_OF_TEXT = "<|endoftext|>"
# Tried in this order when no tokenizer_config.json beside the tokenizer.json names the end-of-text token.
USUAL_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What training and generation need of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id `encode` can give, `eos_id` included. A model's own
            `vocab_size` may be larger (padded), never smaller.
        eos_id: id that ends a document; None when the tokenizer has none.
    """

    vocab_size: int
    eos_id: int | None

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of `text`.

        Args:
            special_tokens: add what the tokenizer itself puts around a text (Llama: a begin-of-text id). A
                prompt wants that; training does not, and puts `eos_id` after each document.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out, bytes that are not UTF-8 shown as U+FFFD.

        Raises:
            ValueError: an id is negative or not below `vocab_size`.
        """

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` into an existing `folder`.

        `load_tokenizer(folder)` and transformers' `AutoTokenizer` read them.
        """


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return bytes(i for i in ids if i != self.eos_id).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        # The same mapping written as a byte-level BPE without merges, so that other libraries read it too.
        vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
        one_by_one = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([one_by_one, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_config(folder, END_OF_TEXT)


class FileTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library.

    Args:
        path: the `tokenizer.json`. A `tokenizer_config.json` beside it, if any, names the end-of-text token.

    Raises:
        ValueError: the file is not a tokenizer, or its config names an end token that it lacks.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises a bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self._eos_token = _end_token(self._tokenizer, path)
        self.eos_id = None if self._eos_token is None else self._tokenizer.token_to_id(self._eos_token)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))
        _write_config(folder, self._eos_token)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Finds a tokenizer.

    Args:
        source: `"bytes"`, the path of a `tokenizer.json`, or a folder that holds one.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no `tokenizer.json`.
        ValueError: the file is not a tokenizer.
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer: {path} does not exist; give 'bytes', a tokenizer.json, or a folder that holds one"
        )
    return FileTokenizer(path)


def _end_token(tokenizer: HFTokenizer, path: Path) -> str | None:
    config_path = path.with_name("tokenizer_config.json")
    if config_path.is_file():
        token = json.loads(config_path.read_text(encoding="utf-8")).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and tokenizer.token_to_id(token) is None:
            raise ValueError(f"{config_path}: eos_token {token!r} is not in {path.name}")
        return token
    return next((token for token in USUAL_END_TOKENS if tokenizer.token_to_id(token) is not None), None)


def _write_config(folder: Path, eos_token: str | None) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_symbols() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if printable, else the next stand-in."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(symbol): symbol for symbol in alphabet if ord(symbol) < 256}
    stand_ins = (symbol for symbol in alphabet if ord(symbol) >= 256)
    return [printable[byte] if byte in printable else next(stand_ins) for byte in range(256)]


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ValueError(f"ids: {wrong[0]} is not an id of this tokenizer (0 to {vocab_size - 1})")
