import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from xla_attention.generation import Sampling
from xla_attention.generation.sampling import SamplingRows, choose, probabilities

LOGITS = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))


def rows(sampling, uniform=(0.0,)):
    return SamplingRows.of([sampling] * len(uniform), uniform, LOGITS.shape[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 50, 80])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 0.95, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None])
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = probabilities(LOGITS[None], rows(Sampling(temperature, top_k, top_p)))[0]
    # Float32 sums in another order.
    torch.testing.assert_close(ours / ours.sum(), scores.softmax(-1)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=5), Sampling(2.0, top_p=0.6)])
def test_draws_follow_the_probabilities(sampling):
    expected = probabilities(LOGITS[None], rows(sampling))[0]
    expected /= expected.sum()
    uniform = ((torch.arange(4000) + 0.5) / 4000).tolist()
    draws = choose(LOGITS.expand(4000, -1), rows(sampling, uniform))
    frequencies = torch.bincount(draws, minlength=50) / 4000
    assert frequencies[expected == 0].sum() == 0
    # Of evenly spaced numbers an interval holds its share, to one at either end.
    assert (frequencies - expected).abs().max() <= 1.01 / 4000


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_interval_give_kept_tokens(uniform):
    sampling = Sampling(top_k=3)
    kept = set(LOGITS.topk(3).indices.tolist())
    assert int(choose(LOGITS[None], rows(sampling, (uniform,)))) in kept


def test_rows_choose_each_in_its_way():
    samplings = [Sampling(), Sampling(0), Sampling(top_k=1), Sampling(0, 3, 0.1), Sampling(top_p=1e-6)]
    together = SamplingRows.of(samplings, [0.001] * 5, 50)
    alone = [choose(LOGITS[None], SamplingRows.of([s], [0.001], 50)) for s in samplings]
    tokens = choose(LOGITS.expand(5, -1), together)
    assert tokens.tolist() == torch.cat(alone).tolist()
    assert tokens[0] != LOGITS.argmax()
    assert set(tokens[1:].tolist()) == {int(LOGITS.argmax())}


def test_the_same_on_xla():
    """Sums in another order could move a number across an edge between tokens; of these, none is so near."""
    samplings = [Sampling(), Sampling(0.5, top_k=4), Sampling(1.5, top_p=0.7), Sampling(0)] * 5
    how = SamplingRows.of(samplings, [(n + 0.5) / 20 for n in range(20)], 50)
    on_xla = choose(LOGITS.to("xla").expand(20, -1), how.to(torch.device("xla")))
    assert on_xla.tolist() == choose(LOGITS.expand(20, -1), how).tolist()


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
