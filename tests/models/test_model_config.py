from pathlib import Path

import pytest
import yaml
from random_models import CONFIGS

from xla_attention.models import GPTConfig, build_model, load_model_config

MODELS = Path(__file__).parents[2] / "configs" / "models"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


# As published: the model cards' parameter counts.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_the_configs_in_the_repository_have_the_published_size(name, parameters):
    model = build_model(load_model_config(MODELS / f"{name}.yaml"), device="meta")
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_in_the_repository_is_valid(path):
    config = load_model_config(path)
    assert load_model_config(config.model_dump()) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read(name, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    for ours_name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        assert getattr(ours, ours_name) == getattr(CONFIGS[name], ours_name)
    assert ours.tie_word_embeddings == CONFIGS[name].tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; use one of gpt2, llama, mistral"),
        ({"model_type": None}, "model_type=None"),
        ({"hiden_size": 64}, "hiden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 5}, "hidden_size=64 is not a multiple of num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "mistral"}, "num_key_value_heads"),
        ({"model_type": "qwen3", "num_key_value_heads": 2}, "head_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"sliding_window": 64}, "sliding_window=64: llama has none; mistral is llama with one"),
        (
            {"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2},
            "layer_types: mistral has none",
        ),
        (
            {"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["full_attention"]},
            "layer_types: got 1, num_hidden_layers is 2",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; only 1.0 is"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ValueError) as raised:
        load_model_config(LLAMA | changes)
    assert message in str(raised.value)


def test_a_gpt2_variant_that_is_computed_otherwise_is_refused(tmp_path):
    import transformers

    transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True is not supported; only False"):
        load_model_config(tmp_path)


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(LLAMA | {"hiden_size": 3}))
    with pytest.raises(ValueError, match=r"model\.yaml: .*\nhiden_size"):
        load_model_config(tmp_path / "model.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="expected a mapping of fields, got list"):
        load_model_config(tmp_path / "list.yaml")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: Expecting"):
        load_model_config(tmp_path)


def test_a_config_cannot_change():
    config = load_model_config(LLAMA)
    with pytest.raises(ValueError, match="frozen"):
        config.hidden_size = 8


def test_both_models_answer_to_the_same_names():
    gpt = GPTConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    llama = load_model_config(LLAMA | {"max_position_embeddings": 32})
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [getattr(gpt, name) for name in names] == [getattr(llama, name) for name in names]
