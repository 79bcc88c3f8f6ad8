"""A configuration is checked whole, and an error says which key to change and what it may be."""

from pathlib import Path

import pytest
import yaml
from small import LLAMA, settings

from xla_attention.models import load_model_config
from xla_attention.training.config import ConfigError, load_config, save_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run")))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", r"stepz: unknown key; allowed here: model, data, .*steps"),
        ("optimizer.lrr=3", r"optimizer\.lrr: unknown key; allowed here: name, lr, betas"),
        ("optimizer.name=sgd", r"optimizer\.name: .*'adamw' or 'adafactor', got 'sgd'"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer: .*betas must lie in \[0, 1\)"),
        ("seq_len=0", r"seq_len: .*greater than 0, got 0"),
        ("compute_dtype=float16", r"compute_dtype: .*'float32' or 'bfloat16', got 'float16'"),
        (
            "activation_checkpointing=half",
            r"activation_checkpointing: .*'none', 'full' or 'selective', got 'half'",
        ),
        ("sharding.mesh.expert=2", r"sharding\.mesh\.expert: .*'fsdp', 'tensor' or 'context', got 'expert'"),
        ("sharding.strateg=fsdp", r"sharding\.strateg: unknown key; allowed here: strategy, mesh"),
        ("data.held_out=1", r"data\.held_out: .*less than 1"),
        ("steps.more=1", r"'steps.more=1': steps is a value"),
        ("steps", r"'steps' is not an override; write key=value"),
        ("steps=[", r"'\[' is not a YAML value"),
        ("model=nowhere.yaml", r"nowhere\.yaml: no such file"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(file, [override])


def test_all_mistakes_are_listed_at_once(file):
    with pytest.raises(ConfigError) as error:
        load_config(file, ["seq_len=-1", "nonsense=1"])
    assert "seq_len" in str(error.value) and "nonsense" in str(error.value)


def test_evaluation_needs_held_out_data(file):
    with pytest.raises(ConfigError, match=r"eval\.interval needs held-out data"):
        load_config(file, ["data.held_out=0", "eval.interval=5"])


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("steps: 3")
    with pytest.raises(ConfigError, match="batch_size: required, but not given"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not YAML"), ("- a", "expected `key: value` lines, got list")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_overrides_reach_into_sections(file):
    config = load_config(file, ["optimizer.lr=3e-4", "eval.interval=7", "data.train=[a.txt, b.txt]"])
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.warmup_steps == 3  # the rest of the section stays
    assert config.eval.interval == 7
    assert [Path(name).name for name in config.data.train] == ["a.txt", "b.txt"]


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(LLAMA))
    named = settings("runs/a", model="../model.yaml", tokenizer="../tok.json", data={"train": ["../*.txt"]})
    (tmp_path / "configs" / "train.yaml").write_text(yaml.safe_dump(named))
    monkeypatch.chdir(tmp_path / "configs")
    config = load_config("train.yaml", ["data.eval=[here.txt]", "model.num_hidden_layers=7"])
    assert config.model == LLAMA | {"num_hidden_layers": 7}
    assert config.tokenizer == str(tmp_path / "tok.json")
    assert config.data.train == [str(tmp_path / "*.txt")]
    assert config.data.eval == [str(tmp_path / "configs" / "here.txt")]
    assert config.out_dir == Path("runs/a")  # outputs go where the command is run


def test_a_saved_configuration_loads_as_the_same(file, tmp_path):
    config = load_config(file, ["activation_checkpointing=2"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("path", sorted((CONFIGS / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_of_the_repository_load(path):
    load_model_config(load_config(path).model)
