"""Random requests of every kind: what an engine promises holds whatever it is asked for."""

import random

import pytest
import torch_xla
from engine_cases import VOCABULARY, random_requests
from torch_xla.debug import metrics

from xla_attention.generation import Engine, Request, Sampling
from xla_attention.models import LlamaConfig, build_model
from xla_attention.text import ByteTokenizer

CONFIG = LlamaConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=96,
    initializer_range=0.3,
)
SIZES = {"max_seqs": 6, "max_tokens": 16, "page_size": 8, "pages": 16}


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, seed=3).eval()


def mixed(count):
    """Requests of all kinds of sampling and of stop conditions."""
    draw = random.Random(count)
    for request in random_requests(count, longest=70):
        sampling = Sampling(
            draw.choice([0, 0, 0.7, 1.5]), draw.choice([None, 1, 20]), draw.choice([None, 0.3, 0.95])
        )
        stop_ids = draw.choice([(), (3, 200), range(0, 264, 9)])
        stop = draw.choice([(), ("a",), ("\n", "zz")])
        yield Request(
            request.prompt_ids, request.max_new_tokens, sampling, draw.randrange(99), stop_ids, stop
        )


def check_random_requests(model, device, count):
    engine = Engine(model.to(device), ByteTokenizer(), **SIZES)
    draw, waiting, completions = random.Random(1), list(mixed(count)), []
    torch_xla.sync()
    before = (metrics.metric_data("CompileTime") or [0])[0]
    while waiting or any(c.finish_reason is None for c in completions[-40:]):
        for _ in range(draw.choice([0, 1, 2])):
            if waiting:
                completions.append(engine.submit(waiting.pop()))
        for output in engine.step():
            assert output.token is None or output.token < ByteTokenizer.vocab_size
        if draw.random() < 0.1 and completions:
            engine.cancel(draw.choice(completions[-8:]))
    list(engine.run())
    counts = engine.counts
    assert counts.pages_allocated == counts.pages_freed > 0
    assert counts.preemptions > 0
    assert {c.finish_reason for c in completions} == {"stop", "length", "cancelled"}
    assert counts.tokens == sum(len(c.tokens) for c in completions)
    if device == "xla":
        # Lengths 8 and 16, greedy and sampled, and the cache, which was made before.
        assert counts.most_graphs == 5
        assert metrics.metric_data("CompileTime")[0] - before == counts.graphs - 1 <= 4
    else:
        assert counts.graphs == counts.most_graphs == 0


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_60_random_requests(model, device):
    check_random_requests(model, device, 60)


@pytest.mark.slow
def test_1000_random_requests(model):
    check_random_requests(model, "xla", 1000)


def test_a_sampled_text_depends_on_its_seed_alone(model):
    """Alone, in a batch, and preempted in a batch: the same tokens."""
    model.to("cpu")
    requests = [Request(r.prompt_ids, 20, Sampling(1.0, top_k=50), seed=n) for n, r in
                enumerate(random_requests(8, longest=70))]  # fmt: skip

    def tokens(requests, **sizes):
        engine = Engine(model, **(SIZES | sizes))
        completions = [engine.submit(request) for request in requests]
        list(engine.run())
        return engine, [c.tokens for c in completions]

    alone = [tokens([request])[1][0] for request in requests]
    ample, scarce = tokens(requests, pages=96), tokens(requests, pages=13)
    assert alone == ample[1] == scarce[1]
    assert ample[0].counts.preemptions == 0 < scarce[0].counts.preemptions
    again = Request(requests[0].prompt_ids, 20, Sampling(1.0, top_k=50), seed=99)
    assert tokens([again])[1][0] != alone[0]


def test_text_ends_before_a_stop_string(model):
    model.to("cpu")

    def run(**arguments):
        engine = Engine(model, ByteTokenizer(), **SIZES)
        completion = engine.submit(Request(tuple(b"hello"), 40, Sampling(1.0), 4, **arguments))
        return completion, "".join(output.text for output in engine.run())

    whole, pieces = run()
    assert pieces == whole.text == ByteTokenizer().decode(whole.tokens)
    stop = whole.text[15:18]
    stopped, pieces = run(stop=(stop,))
    assert pieces == stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) < 40


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_seqs": 0}, "max_seqs: got 0"),
        ({"max_tokens": 5}, "max_tokens: got 5, must be at least max_seqs=6"),
        ({"page_size": 12}, "page_size: got 12, allowed are"),
        ({"pages": 0}, "pages: got 0"),
        ({"max_length": 97}, "max_length: got 97, must be 1 to the model's 96"),
        ({"vocab_size": 265}, "vocab_size: got 265"),
    ],
)
def test_sizes_that_mean_nothing(model, sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **(SIZES | sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": (1, 264)}, "prompt_ids: 264 is not below the model's vocab_size=264"),
        ({"max_new_tokens": 95}, "max_new_tokens: 2 prompt tokens and 95 new ones make 97.* 96"),
        ({"max_new_tokens": 32}, "2 prompt tokens and 32 new ones make 34.* the cache has pages for 32"),
        ({"stop": ("a",)}, "stop: strings need a tokenizer"),
        ({"stop": ("",)}, "stop: got an empty string"),
    ],
)
def test_what_can_never_fit_is_refused(model, arguments, message):
    engine = Engine(model.to("cpu"), **(SIZES | {"pages": 4}))
    fits = {"prompt_ids": (1, 2), "max_new_tokens": 31}  # the last token needs no place in the cache
    engine.submit(Request(**fits))
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**(fits | arguments)))
    list(engine.run())
    assert engine.counts.pages_allocated == engine.counts.pages_freed == 4


def test_only_its_own_completions_are_cancelled(model):
    first, second = (Engine(model.to("cpu"), **SIZES) for _ in range(2))
    completion = first.submit(Request((VOCABULARY,), 2))
    with pytest.raises(ValueError, match="not submitted to this engine"):
        second.cancel(completion)
    first.cancel(completion)
    first.cancel(completion)
    assert completion.finish_reason == "cancelled"
    assert list(first.run()) == []
