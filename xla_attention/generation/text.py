"""Text of tokens as they come: in whole characters, and up to a stop string."""

from collections.abc import Iterable, Iterator, Sequence

from xla_attention.text import Tokenizer

# Tokens before the new ones that are decoded with them: some tokenizers write the first one differently.
CONTEXT = 8
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes tokens one by one. A step decodes a few tokens, however long the text is.

    Args:
        tokenizer: decodes.
        prompt_ids: what comes before; its text is not given again.
        stop: strings that end the text. None of them, nor its beginning while it may become one, is given.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode = tokenizer.decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._shown = len(self._ids)  # of these, tokens whose text was given
        self._held = ""
        self._stop = tuple(stop)
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with one more token; `stopped` tells whether it ended."""
        self._ids.append(token)
        piece = self._new_text()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        del self._ids[: max(0, self._shown - CONTEXT)]
        self._shown = len(self._ids)
        return self._up_to_stop(piece, last=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._up_to_stop(self._new_text(), last=True)

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]

    def _up_to_stop(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def stream_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], new_ids: Iterable[int], stop: Sequence[str] = ()
) -> Iterator[str]:
    """The text of `new_ids` in pieces, each as soon as its bytes make whole characters."""
    stream = TextStream(tokenizer, prompt_ids, stop)
    for token in new_ids:
        if piece := stream.add(token):
            yield piece
        if stream.stopped:
            return
    if rest := stream.finish():
        yield rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
