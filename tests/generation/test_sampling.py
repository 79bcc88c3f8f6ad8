import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from xla_attention.generation import Sampling

LOGITS = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50, 80])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 0.95, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None])
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = Sampling(temperature, top_k, top_p).probabilities(LOGITS)
    # Float32 sums in another order.
    torch.testing.assert_close(ours / ours.sum(), scores.softmax(-1)[0], rtol=1e-5, atol=1e-7)


def test_draws_follow_the_probabilities():
    sampling = Sampling(temperature=1.0, top_k=5)
    expected = sampling.probabilities(LOGITS)
    random = generator()
    draws = torch.tensor([sampling.choose(LOGITS, random) for _ in range(4000)])
    frequencies = torch.bincount(draws, minlength=50) / 4000
    assert frequencies[expected == 0].sum() == 0
    # Five standard deviations of a frequency of 1/2, the widest.
    assert (frequencies - expected).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_temperature_zero_takes_the_most_likely_whatever_the_rest():
    assert Sampling(temperature=0, top_k=3, top_p=0.1).choose(LOGITS, generator()) == LOGITS.argmax()
    assert Sampling(temperature=0).choose(LOGITS.to(torch.bfloat16), generator()) == LOGITS.argmax()


def test_the_seed_decides():
    def draws(seed):
        random = generator(seed)
        return [Sampling().choose(LOGITS, random) for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_values_that_mean_nothing(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value}"):
        Sampling(**{field: value})
