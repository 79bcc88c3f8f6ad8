"""Model configurations, with the field names of a Hugging Face `config.json`.

A field exists here when it changes what the model computes. The models have no dropout, so dropout rates are
not fields; a `config.json` may carry them, and anything else, in `other`, which is written back and not used.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

STRICT = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

# Keys of a config.json that change the maths in a way not built here, with the values that leave it alone.
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}


class LinearRope(BaseModel):
    """Positions divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595)."""

    model_config = STRICT
    rope_type: Literal["linear"] = "linear"
    factor: float = Field(ge=1)


class Llama3Rope(BaseModel):
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    model_config = STRICT
    rope_type: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> "Llama3Rope":
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")
        return self


RopeScaling = Annotated[LinearRope | Llama3Rope, Field(discriminator="rope_type")]


class ModelConfig(BaseModel):
    """What every model has.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's `vocab_size`.
        tie_word_embeddings: the embedding is also the output projection.
        initializer_range: standard deviation of fresh weights.
        other: keys of a `config.json` that the model does not use.
    """

    model_config = STRICT
    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    other: dict[str, Any] = Field(default_factory=dict)


class GPTConfig(ModelConfig):
    """GPT-2 (Radford et al., 2019). Properties give the names that `LlamaConfig` uses for the same facts."""

    model_type: Literal["gpt2"] = "gpt2"
    n_embd: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_positions: PositiveInt
    n_inner: PositiveInt | None = None
    activation_function: Literal["gelu_new", "gelu"] = "gelu_new"
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> "GPTConfig":
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        return self

    @property
    def hidden_size(self) -> int:
        return self.n_embd

    @property
    def num_hidden_layers(self) -> int:
        return self.n_layer

    @property
    def num_attention_heads(self) -> int:
        return self.n_head

    @property
    def num_key_value_heads(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def max_position_embeddings(self) -> int:
        return self.n_positions


class LlamaConfig(ModelConfig):
    """LLaMA, and what is LLaMA by config: Mistral, Qwen2 (bias on q, k and v), Qwen3 (norms on q and k).

    Attributes:
        num_key_value_heads: left out, a `llama` has one for each head; the other types must say.
        head_dim: left out, `hidden_size // num_attention_heads`; `qwen3` must say.
        attention_bias: bias on q, k, v and o. Qwen2 has one on q, k and v whatever this says.
        sliding_window: keys that a query sees, itself included, in every layer of Mistral; in Qwen only if
            `use_sliding_window`, and then in the layers that `layer_types` calls `"sliding_attention"`, or,
            without `layer_types`, from layer `max_window_layers` on.
    """

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: NonNegativeInt = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if rope := values.pop("rope_parameters", None):  # transformers 5 writes one key for theta and scaling
            rope = dict(rope)
            values["rope_theta"] = rope.pop("rope_theta", values.get("rope_theta", 10000.0))
            values["rope_scaling"] = rope
        kind, heads, hidden = (
            values.get(key) for key in ("model_type", "num_attention_heads", "hidden_size")
        )
        if values.get("num_key_value_heads") is None and kind in (None, "llama"):
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None and kind != "qwen3" and heads and hidden:
            if hidden % heads:
                raise ValueError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
            values["head_dim"] = hidden // heads
        return values

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _one_name_for_the_type(cls, scaling: Any) -> Any:
        if not isinstance(scaling, dict):
            return scaling
        scaling = dict(scaling)
        old_name = scaling.pop("type", None)
        kind = scaling.setdefault("rope_type", old_name)
        return None if kind == "default" else scaling

    @model_validator(mode="after")
    def _consistent(self) -> "LlamaConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embedding")
        if self.model_type == "llama" and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window}: llama has none; mistral is llama with one"
            )
        if self.layer_types is not None:
            if not self.model_type.startswith("qwen"):
                raise ValueError(f"layer_types: {self.model_type} has none, only qwen2 and qwen3")
            if len(self.layer_types) != self.num_hidden_layers:
                raise ValueError(
                    f"layer_types: got {len(self.layer_types)}, num_hidden_layers is {self.num_hidden_layers}"
                )
        return self

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included; None for all before it."""
        if self.model_type == "mistral":
            return self.sliding_window
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        else:
            slides = layer >= self.max_window_layers
        return self.sliding_window if self.use_sliding_window and slides else None
