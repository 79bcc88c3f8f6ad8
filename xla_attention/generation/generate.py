"""Generation by running the model over the whole text for each new token.

No keys or values are kept between tokens. On an XLA device the text is padded to one of a few lengths, so
that few graphs are compiled: on the right, which the causal mask hides from every real position.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from xla_attention.generation.sampling import Sampling
from xla_attention.models import CausalLM
from xla_attention.text import Tokenizer

SHORTEST_PADDED = 64


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
        prompt_ids: at least one.
        max_new_tokens: give at most so many.
        sampling: how each is chosen from the logits.
        seed: the same seed and logits give the same tokens.
        stop_ids: end before one of these.
        vocab_size: choose only ids below it: the tokenizer's, where the model's vocabulary is padded.

    Raises:
        ValueError: an argument is out of range, or the text would outgrow the model's longest sequence.
    """
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= model.config.vocab_size:
        raise ValueError(f"vocab_size: got {vocab_size}, must be 1 to the model's {model.config.vocab_size}")
    if not prompt_ids:
        raise ValueError("prompt_ids: got none, needs at least one")
    if wrong := [i for i in prompt_ids if not 0 <= i < model.config.vocab_size]:
        raise ValueError(
            f"prompt_ids: {wrong[0]} is not below the model's vocab_size={model.config.vocab_size}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, must be at least 1")
    total = len(prompt_ids) + max_new_tokens
    if total > model.max_length:
        raise ValueError(
            f"max_new_tokens: {len(prompt_ids)} prompt tokens and {max_new_tokens} new ones make {total}, "
            f"but the model takes at most {model.max_length}"
        )
    return _generate(model, list(prompt_ids), max_new_tokens, sampling, seed, stop_ids, vocab_size)


def stream_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], new_ids: Iterable[int]) -> Iterator[str]:
    """The text of `new_ids` in pieces, each as soon as its bytes make whole characters."""
    ids = list(prompt_ids)
    shown = len(tokenizer.decode(ids))
    for token in new_ids:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and len(text) > shown:
            yield text[shown:]
            shown = len(text)
    rest = tokenizer.decode(ids)[shown:]
    if rest:
        yield rest


def _generate(
    model: CausalLM,
    ids: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: Collection[int],
    vocab_size: int,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        token = sampling.choose(_next_logits(model, ids)[:vocab_size], generator)
        if token in stop_ids:
            return
        yield token
        ids.append(token)


@torch.no_grad()
def _next_logits(model: CausalLM, ids: list[int]) -> Tensor:
    """Logits of what follows `ids`, `[vocab_size]`, float32, on the CPU."""
    device = next(model.parameters()).device
    length = _padded_length(len(ids), model.max_length) if device.type == "xla" else len(ids)
    input_ids = torch.zeros(1, length, dtype=torch.int64)
    input_ids[0, : len(ids)] = torch.tensor(ids)
    # The position is data, not a Python number in the graph: each length is compiled once.
    last = torch.tensor([len(ids) - 1]).to(device)
    hidden = model.hidden_states(input_ids.to(device)).index_select(1, last)
    return model.logits(hidden)[0, 0].float().cpu()


def _padded_length(length: int, limit: int) -> int:
    """The next power of two, at least `SHORTEST_PADDED` and at most `limit`."""
    return min(max(1 << (length - 1).bit_length(), SHORTEST_PADDED), limit)
