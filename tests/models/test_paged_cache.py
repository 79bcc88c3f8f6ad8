"""A forward pass in parts, through pages, gives the logits of one over the whole text."""

import pytest
import torch
from random_models import COMMON, their_model, token_ids

from xla_attention.models import LlamaConfig, build_model
from xla_attention.models.attention import PagedCache, use_cache
from xla_attention.models.checkpoint import load_model

PAGE_SIZE, PAGES, SEQS = 8, 16, 3


def tensors(*values):
    return [torch.tensor(value, dtype=torch.int32) for value in values]


def caches(pages, lengths, chunks):
    """For each step, of the sequences one after the other: ids' places, positions, and the cache."""
    done = [0] * len(lengths)
    tables = [[3 * s + n for n in range(3)] for s in range(SEQS)]
    for chunk in chunks:
        took = [min(chunk, length - d) for length, d in zip(lengths, done)]
        places = [(s, d + i) for s, (d, n) in enumerate(zip(done, took)) for i in range(n)]
        slots = [tables[s][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for s, p in places]
        done = [d + n for d, n in zip(done, took)]
        cu = [sum(took[:s]) for s in range(SEQS + 1)]
        fields = tensors(slots, done, tables, cu, [SEQS])
        yield places, PagedCache(pages, *fields)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "gpt2"])
def test_in_parts_as_at_once(name, tmp_path):
    their_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path).eval()
    config = model.config
    lengths, ids = (20, 9, 24), token_ids(SEQS, 24)
    width = 2 * config.num_key_value_heads * config.head_dim
    pages = [torch.zeros(PAGES, PAGE_SIZE, width) for _ in range(config.num_hidden_layers)]
    with torch.no_grad():
        for places, cache in caches(pages, lengths, (7, 1, 16)):
            flat = torch.tensor([[int(ids[s, p]) for s, p in places]])
            positions = torch.tensor([[p for _, p in places]])
            with use_cache(cache):
                got = model(flat, position_ids=positions)
            whole = model(ids)
            wanted = torch.stack([whole[s, p] for s, p in places])
            # Float32 by two implementations.
            torch.testing.assert_close(got[0], wanted, atol=2e-4, rtol=0)


def test_a_cache_of_another_depth_is_an_error():
    model = build_model(LlamaConfig(**COMMON))
    width = 2 * model.config.num_key_value_heads * model.config.head_dim
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for layers, message in (
        (1, "has 1 layers, the model more"),
        (3, "3 layers, of which the model left out 1"),
    ):
        pages = [torch.zeros(PAGES, PAGE_SIZE, width) for _ in range(layers)]
        fields = tensors([0], [1], [[0]], [0, 1], [1])
        with pytest.raises(ValueError, match=message), use_cache(PagedCache(pages, *fields)), torch.no_grad():
            model(ids)
