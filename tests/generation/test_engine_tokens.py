"""Greedy tokens are those of transformers, whatever else is in the batch, and wherever it is computed."""

from pathlib import Path

import pytest
from engine_cases import assert_same, engine_and_tokens, expected_tokens, random_requests, save_checkpoint
from spmd import run_spmd

from xla_attention.models import load_model

# A request takes up to 11 pages of 8 tokens; eight are in the batch.
AMPLE, SCARCE = {"pages": 96}, {"pages": 11}
NAMES = ["llama", "mistral", "qwen3", "gpt2"]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A checkpoint, requests, and their tokens by transformers; made once for each name and count."""
    made = {}

    def of(name, count):
        if (name, count) not in made:
            folder = tmp_path_factory.mktemp(name)
            save_checkpoint(name, folder)
            requests = random_requests(count)
            expected = expected_tokens(folder, requests)
            # Near ties are rare: most of what is generated is compared.
            asked = sum(request.max_new_tokens for request in requests)
            assert sum(map(len, expected)) > 0.9 * asked
            made[name, count] = folder, requests, expected
        return made[name, count]

    return of


def check(case, name, device, sizes, count):
    folder, requests, expected = case(name, count)
    engine, tokens = engine_and_tokens(load_model(folder).to(device).eval(), requests, **sizes)
    assert_same(tokens, expected)
    counts = engine.counts
    assert counts.pages_allocated == counts.pages_freed > 0
    assert (counts.preemptions > 0) == (sizes["pages"] == SCARCE["pages"])
    assert counts.graphs <= counts.most_graphs
    assert (counts.graphs > 0) == (device == "xla")


@pytest.mark.parametrize("sizes", [AMPLE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("name", NAMES)
def test_a_few_prompts_eager(case, name, sizes):
    check(case, name, "cpu", sizes, 10)


def test_a_few_prompts_on_xla(case):
    check(case, "mistral", "xla", SCARCE | {"max_tokens": 8}, 10)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [AMPLE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", NAMES)
def test_64_prompts(case, name, device, sizes):
    check(case, name, device, sizes, 64)


SHARDED = """
import sys
sys.path.insert(0, VARIABLES["here"])
import torch_xla
from engine_cases import engine_and_tokens, random_requests
from xla_attention.device import pick_device
from xla_attention.models import load_model
from xla_attention.sharding.config import ShardingConfig
from xla_attention.sharding.sharding import Sharding, start_spmd

config = ShardingConfig(strategy=VARIABLES["strategy"])
strategy = start_spmd(config)
device, _ = pick_device()
sharding = Sharding(strategy)
model = load_model(VARIABLES["folder"])
sharding.check_parameters(model)
model.to(device).eval()
sharding.place_parameters(model)
results = []
for sizes in VARIABLES["sizes"]:
    engine, tokens = engine_and_tokens(model, random_requests(VARIABLES["count"]), sharding=sharding, **sizes)
    counts = engine.counts
    places = torch_xla._XLAC._get_xla_sharding_spec(engine._steps._layers[0])
    results.append([tokens, vars(counts), places])
print(json.dumps(results))
"""


def check_sharded(case, name, strategy, sizes, count):
    folder, _, expected = case(name, count)
    here = str(Path(__file__).parent)
    results = run_spmd(SHARDED, 8, here=here, folder=str(folder), strategy=strategy, sizes=sizes, count=count)
    for tokens, counts, place in results:
        assert_same(tokens, expected)
        assert counts["pages_allocated"] == counts["pages_freed"] > 0
        assert counts["graphs"] <= counts["most_graphs"]
        if strategy == "2d":  # two kv heads over tensor=2
            assert place.startswith("{devices=[1,1,2,4]")
        else:
            assert place == "{replicated}"
    return results


def test_a_few_prompts_on_8_devices(case):
    check_sharded(case, "llama", "2d", [SCARCE | {"max_tokens": 8}], 10)


@pytest.mark.slow
@pytest.mark.parametrize("name, strategy", [*((name, "2d") for name in NAMES), ("llama", "fsdp")])
def test_64_prompts_on_8_devices(case, name, strategy):
    ample, scarce = check_sharded(case, name, strategy, [AMPLE, SCARCE], 64)
    assert ample[1]["preemptions"] == 0 < scarce[1]["preemptions"]
