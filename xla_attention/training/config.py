"""The training configuration: a YAML file with `key=value` changes, checked by pydantic."""

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from xla_attention.remote import is_url
from xla_attention.sharding.config import ShardingConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key, and what is allowed."""


class Section(BaseModel):
    """A group of keys: unknown ones are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    """Where the tokens come from.

    Attributes:
        train: globs of text files, or one `.bin` file of token ids (`xla-attention tokenize` writes it).
            `{stdlib}` stands for the folder of the running Python's standard library.
        exclude: globs of files to leave out; they must match the whole path, and `*` crosses folders.
        eval: held-out files, as for `train`. Empty: `held_out` of the training files are held out.
        held_out: share of the files (of the tokens, if there is only one file) to hold out. 0 with an
            empty `eval` means no evaluation.
        dtype: integer type of the `.bin` files.
        mask_documents: tokens attend within their document alone, in training and evaluation, and the first
            token of a document is no target, as nothing that it sees precedes it. Borders lie behind the
            tokenizer's end-of-text ids. None: if the tokenizer has such an id.
    """

    train: list[str] = Field(min_length=1)
    exclude: list[str] = []
    eval: list[str] = []
    held_out: float = Field(default=0.05, ge=0, lt=1)
    dtype: Literal["uint16", "uint32"] = "uint16"
    mask_documents: bool | None = None


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule.

    Attributes:
        lr: peak learning rate, reached after `warmup_steps`.
        betas: AdamW's moment decays; Adafactor has none.
        weight_decay: of matrices and embeddings; norms and biases are not decayed.
        schedule: `cosine` falls to `min_lr_ratio * lr` at the last step, `constant` stays at `lr`.
        max_grad_norm: gradients are scaled down to this global L2 norm; None never scales.
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    lr: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.1
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: PositiveFloat | None = 1.0

    @model_validator(mode="after")
    def _betas_below_one(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        return self


class EvalConfig(Section):
    """Evaluate on at most `batches` held-out batches every `interval` steps (None: only at the end)."""

    interval: PositiveInt | None = None
    batches: PositiveInt = 20


class CheckpointConfig(Section):
    """Save every `interval` steps (None: only at the end), and keep the last `keep_last`."""

    interval: PositiveInt | None = None
    keep_last: PositiveInt = 2


class ProfileConfig(Section):
    """Write a profiler trace of `steps` steps after step `start`. 0 steps: no trace."""

    start: PositiveInt = 10
    steps: NonNegativeInt = 0


class TrainConfig(Section):
    """Everything a training run needs; `xla-attention train` prints it back into each checkpoint.

    Attributes:
        model: a model's configuration (a mapping in Hugging Face's names, or a YAML file that holds it), or
            a Hugging Face checkpoint folder whose weights are the start.
        tokenizer: `bytes`, a `tokenizer.json`, or a folder that holds one.
        seq_len: tokens of one sequence.
        batch_size: sequences of one micro batch.
        grad_accumulation: micro batches of one step.
        steps: optimizer steps in all.
        compute_dtype: `float32` multiplies in float32, for which a TPU takes six bfloat16 passes. `bfloat16`
            computes in bfloat16 with float32 parameters, gradients and optimizer state.
        activation_checkpointing: blocks whose activations are recomputed in the backward pass: `none`,
            `full` (all), or a number n (every n-th). With `scan_layers` also `selective`: of each block, what
            costs less to compute than to keep.
        scan_layers: run the blocks in a loop, so that the program does not grow with their number.
        log_interval: steps between two reports. Losses are fetched only then.
        sharding: how model and batch lie on several devices; `batch_size` is that of all of them.
        out_dir: where everything is written, a folder or the URL of one in a bucket.
        device: `xla` is the TPU if there is one, else the CPU through XLA; `eager` is plain torch on the CPU.
    """

    model: dict[str, Any] | str
    data: DataConfig
    tokenizer: str = "bytes"
    seq_len: PositiveInt
    batch_size: PositiveInt
    grad_accumulation: PositiveInt = 1
    steps: PositiveInt
    optimizer: OptimizerConfig = OptimizerConfig()
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: Literal["none", "full", "selective"] | PositiveInt = "none"
    scan_layers: bool = False
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_interval: PositiveInt = 10
    profile: ProfileConfig = ProfileConfig()
    seed: NonNegativeInt = 0
    device: Literal["xla", "eager"] = "xla"
    sharding: ShardingConfig = ShardingConfig()
    out_dir: Annotated[Path | str, BeforeValidator(lambda place: place if is_url(place) else Path(place))]

    @model_validator(mode="after")
    def _something_to_evaluate_on(self) -> "TrainConfig":
        if self.eval.interval and not self.data.eval and self.data.held_out == 0:
            raise ValueError("eval.interval needs held-out data: give data.eval, or data.held_out above 0")
        return self

    @model_validator(mode="after")
    def _devices_to_shard_over(self) -> "TrainConfig":
        if self.device == "eager" and self.sharding.strategy != "none":
            raise ValueError("sharding.strategy needs device xla, got eager")
        return self

    @model_validator(mode="after")
    def _loop_over_layers(self) -> "TrainConfig":
        if self.scan_layers and self.device == "eager":
            raise ValueError("scan_layers needs device xla, got eager")
        if self.scan_layers and isinstance(self.activation_checkpointing, int):
            raise ValueError("with scan_layers, activation_checkpointing is none, selective or full")
        if not self.scan_layers and self.activation_checkpointing == "selective":
            raise ValueError("activation_checkpointing=selective needs scan_layers=true")
        if self.scan_layers and self.optimizer.name == "adafactor":
            raise ValueError("scan_layers needs optimizer adamw: adafactor's steps depend on whole weights")
        return self

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.grad_accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a configuration.

    Args:
        path: a YAML file. The model, tokenizer and data that it names are relative to it; `out_dir` is
            relative to the working directory.
        overrides: `key=value`, with dots into sections (`optimizer.lr=3e-4`) and values in YAML. Paths in
            them are relative to the working directory.

    Raises:
        ConfigError: no such file, not YAML, an unknown key or a value that is not allowed.
    """
    return parse_config(read_yaml(Path(path)), Path(path).parent, overrides, source=str(path))


def parse_config(
    raw: dict[str, Any], folder: Path, overrides: Sequence[str] = (), *, source: str
) -> TrainConfig:
    """A configuration from the mapping that a file holds; the arguments are otherwise `load_config`'s.

    Args:
        raw: is changed.
        folder: that the paths in `raw` are relative to.
        source: its name, for errors.

    Raises:
        ConfigError: an unknown key or a value that is not allowed.
    """
    _anchor_paths(raw, folder)
    for override in overrides:
        _apply_override(raw, override)
    _anchor_paths(raw, Path())
    _expand_model(raw)
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, source, TrainConfig)) from None


def save_config(config: TrainConfig, path: Path) -> None:
    """Writes `config` as YAML that `load_config` reads back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def expand_stdlib(pattern: str) -> str:
    """Puts the folder of the running interpreter's standard library in place of `{stdlib}`."""
    return pattern.replace("{stdlib}", sysconfig.get_paths()["stdlib"])


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file. Raises ConfigError if there is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(raw).__name__}")
    return raw


def _anchor_paths(raw: dict[str, Any], folder: Path) -> None:
    """Makes the paths of inputs absolute; relative ones start at `folder`."""

    def anchor(text: Any) -> Any:
        if not isinstance(text, str) or text.startswith("{stdlib}"):
            return text
        return os.path.abspath(folder / text)

    if isinstance(raw.get("model"), str):
        raw["model"] = anchor(raw["model"])
    if raw.get("tokenizer", "bytes") != "bytes":
        raw["tokenizer"] = anchor(raw["tokenizer"])
    sharding = raw.get("sharding")
    if isinstance(sharding, dict) and Path(str(sharding.get("strategy"))).suffix in (".yaml", ".yml"):
        sharding["strategy"] = anchor(sharding["strategy"])
    data = raw.get("data")
    for key in ("train", "eval"):
        if isinstance(data, dict) and isinstance(data.get(key), list):
            data[key] = [anchor(pattern) for pattern in data[key]]


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override; write key=value, for example optimizer.lr=3e-4")
    *sections, last = key.split(".")
    target = raw
    for section in sections:
        if section == "model":
            _expand_model(raw)
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{override!r}: {section} is a value, not a section with keys")
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: {text!r} is not a YAML value") from None


def _expand_model(raw: dict[str, Any]) -> None:
    """Replaces the name of a model's YAML file by its contents, so that the configuration stands alone."""
    model = raw.get("model")
    if isinstance(model, str) and Path(model).suffix in (".yaml", ".yml"):
        raw["model"] = read_yaml(Path(model))


def explain(error: ValidationError, source: str, root: type[BaseModel]) -> str:
    """Every problem of a file of type `root`, with its key and what is allowed, a line each."""
    lines = []
    for problem in error.errors():
        # A union adds the name of each of its types, which is no key of the file.
        where = [str(part) for part in problem["loc"] if isinstance(part, int) or part.isidentifier()]
        if problem["type"] == "extra_forbidden":
            allowed = ", ".join(_section_at(root, where[:-1]).model_fields)
            lines.append(f"{'.'.join(where)}: unknown key; allowed here: {allowed}")
        elif problem["type"] == "missing":
            lines.append(f"{'.'.join(where)}: required, but not given")
        else:
            lines.append(f"{'.'.join(where)}: {problem['msg']}, got {problem['input']!r}")
    return "\n".join([f"{source} cannot be used:", *(f"  {line}" for line in lines)])


def _section_at(root: type[BaseModel], where: Sequence[str]) -> type[BaseModel]:
    section = root
    for name in where:
        if isinstance(section, type) and issubclass(section, BaseModel) and name in section.model_fields:
            section = section.model_fields[name].annotation
    # Of a list of sections, or of one among other types, the section.
    while not (isinstance(section, type) and issubclass(section, BaseModel)):
        section = next(each for each in get_args(section) if each not in (str, int, type(None)))
    return section
