"""Generation of one text: the engine with a single request."""

from collections.abc import Collection, Iterator, Sequence

from xla_attention.generation.engine import Engine
from xla_attention.generation.request import Request
from xla_attention.generation.sampling import Sampling
from xla_attention.models import CausalLM

SHORTEST = 64


def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Token ids that follow `prompt_ids`, each as soon as it is known.

    Args:
        model: on the device to compute on.
        prompt_ids, max_new_tokens, sampling, seed, stop_ids: as of `Request`.
        vocab_size: choose only ids below it: the tokenizer's, where the model's vocabulary is padded.

    Raises:
        ValueError: an argument is out of range, or the text would outgrow the model's longest sequence.
    """
    request = Request(tuple(prompt_ids), max_new_tokens, sampling, seed, frozenset(stop_ids))
    length = rounded_length(len(prompt_ids) + max_new_tokens, model.max_length)
    engine = Engine(model, max_seqs=1, max_length=length, vocab_size=vocab_size)
    engine.submit(request)
    return (output.token for output in engine.run() if output.token is not None)


def rounded_length(length: int, limit: int) -> int:
    """The next power of two, at least `SHORTEST` and at most `limit`: similar lengths share graphs."""
    return min(max(1 << (length - 1).bit_length(), SHORTEST), limit)
