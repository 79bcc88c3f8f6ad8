"""Strategies: patterns, what they refuse, and that those of the package cover every model."""

import re
from pathlib import Path

import pytest

from xla_attention.models.registry import build_model, load_model_config
from xla_attention.sharding.config import ShardingConfig
from xla_attention.sharding.mesh import AXES
from xla_attention.sharding.sharding import start_spmd, state_spec
from xla_attention.sharding.strategy import (
    ShardingError,
    Strategy,
    activation_specs,
    built_in_strategies,
    check_batch,
    load_strategy,
    match,
    parameter_specs,
)
from xla_attention.training.config import load_config

ROOT = Path(__file__).parents[2]
NAMED = [name for name in built_in_strategies() if name != "auto"]
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = [LLAMA | {"model_type": kind} for kind in ("llama", "mistral", "qwen2", "qwen3")]
MODELS += [
    LLAMA | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
]


def model(config):
    return build_model(load_model_config(config), device="meta")


def shapes(config):
    return {name: tuple(parameter.shape) for name, parameter in model(config).named_parameters()}


def sizes(data=1, fsdp=1, tensor=1, context=1):
    return dict(zip(AXES, (data, fsdp, tensor, context)))


def test_the_named_strategies():
    assert {*NAMED, "auto"} == {"replicated", "fsdp", "2d", "hsdp", "fsdp_context", "auto"}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["model_type"])
def test_every_parameter_of_every_model_has_a_place(name, config):
    strategy = load_strategy(name)
    mesh = strategy.mesh.sizes(8)
    specs = parameter_specs(strategy, shapes(config), mesh)
    assert specs.keys() == shapes(config).keys()
    assert activation_specs(strategy, dict(model(config).named_modules()))
    matrices = [spec for tensor, spec in specs.items() if len(shapes(config)[tensor]) == 2]
    if name != "replicated":  # no matrix is whole on every device
        assert all(any("fsdp" in axes for axes in spec) for spec in matrices)
    check_batch(strategy, 8, 64, mesh)


def test_megatron_pairs():
    """The first matrix of a pair is cut by its outputs (rows of the weight), the second by its inputs."""
    specs = parameter_specs(load_strategy("2d"), shapes(MODELS[0]), sizes(fsdp=4, tensor=2))
    for first, second in (("self_attn.q_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")):
        assert specs[f"model.layers.1.{first}.weight"] == (("tensor",), ("fsdp",))
        assert specs[f"model.layers.1.{second}.weight"] == (("fsdp",), ("tensor",))


def test_a_wildcard_stays_between_two_dots_and_the_first_pattern_counts():
    patterns = {"a.*.b": ((),), "a.*.[bc]": (("fsdp",),), "a.*": (("data",),)}
    assert match(patterns, "a.0.b") == ((),)
    assert match(patterns, "a.0.c") == (("fsdp",),)
    assert match(patterns, "a.0") == (("data",),)
    assert match(patterns, "a.0.1.b") is None


def test_a_parameter_without_a_pattern_is_an_error_and_so_is_one_that_does_not_divide():
    strategy = Strategy(
        parameters={"a.weight": ["tensor", ["data", "fsdp"]], "b.weight": ["fsdp"], "c": [None]}
    )
    given = {"a.weight": (6, 12), "b.weight": (8, 8), "d.bias": (3,), "c": (5,)}
    with pytest.raises(ShardingError) as error:
        parameter_specs(strategy, given, sizes(data=2, fsdp=4, tensor=4))
    lines = str(error.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "a.weight [6, 12]: dimension 0 of 6 does not divide by tensor=4; the next that does is 8",
        "a.weight [6, 12]: dimension 1 of 12 does not divide by data=2 x fsdp=4; the next that does is 16",
        "b.weight [8, 8]: 2 dimensions, but its pattern gives axes for 1",
        "d.bias [3]: no pattern matches; add one, [null, ...] to replicate it",
    ]


def test_a_batch_that_does_not_divide():
    with pytest.raises(ShardingError, match=r"dimension 0 of 12 does not divide by data=1 x fsdp=8"):
        check_batch(load_strategy("fsdp"), 12, 64, sizes(fsdp=8))
    with pytest.raises(ShardingError, match=r"seq_len=36 must be a multiple of 8"):
        check_batch(load_strategy("fsdp_context"), 8, 36, sizes(fsdp=2, context=4))


def test_an_activation_pattern_that_names_no_module():
    strategy = Strategy(activations={"model.layer.*": [None, None, None], "transformer.h.*": [None]})
    with pytest.raises(ShardingError, match=r"activations\.model\.layer\.\* matches no module"):
        activation_specs(strategy, ["model", "model.layers", "model.layers.0"])


def test_a_strategy_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "mesh: {fsdp: 2}\nparameters:\n  '*.weight': [[fsdp, data], null]\ninputs: [fsdp, null]\n"
    )
    strategy = load_strategy(path)
    assert match(strategy.parameters, "x.weight") == (("fsdp", "data"), ())
    assert strategy.mesh.fsdp == 2


def test_the_strategies_and_runs_of_the_repository_fit_its_models():
    own = load_strategy(ROOT / "configs" / "sharding" / "fsdp-embedding-whole.yaml")
    run = load_config(ROOT / "examples" / "pod_slice" / "train.yaml")
    assert run.model["num_hidden_layers"] == 32
    for strategy in (own, run.sharding.load()):
        mesh = strategy.mesh.sizes(16)
        parameter_specs(strategy, shapes(run.model), mesh)
        activation_specs(strategy, dict(model(run.model).named_modules()))
        check_batch(strategy, run.batch_size, run.seq_len, mesh)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: {a: [expert]}", r"axis 'expert': allowed are data, fsdp, tensor, context and null"),
        ("parameters: {a: [fsdp, fsdp]}", r"axis 'fsdp' shards two dimensions"),
        ("parameters: {a: fsdp}", r"expected a list"),
        ("inputs: [data]", r"a batch has two dimensions"),
        ("weights: {}", r"weights"),
        ("mesh: {fsdp: two}", r"mesh\.fsdp"),
        ("[", r"is not YAML"),
    ],
)
def test_a_file_that_is_no_strategy(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ShardingError, match=message) as error:
        load_strategy(path)
    assert str(path) in str(error.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ShardingError, match=re.escape(", ".join(built_in_strategies()))):
        load_strategy("fdsp")
    with pytest.raises(ShardingError, match="no such file"):
        load_strategy(tmp_path / "none.yaml")


def test_optimizer_state_lies_as_its_parameter():
    spec = (("tensor",), ("fsdp",))
    assert state_spec((8, 4), (8, 4), spec) == spec
    assert state_spec((8, 1), (8, 4), spec) == (("tensor",), ())  # Adafactor's row means
    assert state_spec((), (8, 4), spec) == ()


def test_auto_is_refused_where_xla_has_no_such_pass():
    with pytest.raises(ShardingError, match=r"sharding.strategy=auto: .*TPU compiler, got device CPU"):
        start_spmd(ShardingConfig(strategy="auto"))
