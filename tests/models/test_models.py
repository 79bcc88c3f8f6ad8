import math

import pytest
import torch
from random_models import token_ids
from torch.utils.flop_counter import FlopCounterMode

from xla_attention.models import GPT, GPTConfig, Llama, LlamaConfig, build_model, next_token_loss
from xla_attention.models.gpt import positions_in_segments

GPT_CONFIG = GPTConfig(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=64)
LLAMA_CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
BOTH = pytest.mark.parametrize("config", [GPT_CONFIG, LLAMA_CONFIG], ids=["gpt2", "llama"])


@BOTH
def test_initial_weights(config):
    model = build_model(config, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
            std = 0.02 / math.sqrt(6) if residual else 0.02
            # The standard deviation of n normal numbers is within 5 sigma = 5 / sqrt(2n) of the true one.
            assert abs(parameter.std() / std - 1) < 5 / math.sqrt(2 * parameter.numel())


@BOTH
def test_initial_loss_is_that_of_a_guess(config):
    ids = token_ids(length=65)
    loss = build_model(config)(ids[:, :-1], ids[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(96)) < 0.1


@BOTH
def test_seed_decides_the_weights(config):
    first, same, other = (build_model(config, seed=seed)(token_ids()) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("model_class", "config"), [(GPT, GPT_CONFIG), (Llama, LLAMA_CONFIG)])
def test_the_constructor_and_the_meta_device_give_the_same_model(model_class, config):
    assert torch.equal(model_class(config)(token_ids()), build_model(config)(token_ids()))


@BOTH
def test_causal(config):
    model = build_model(config)
    ids = token_ids()
    changed = ids.clone()
    changed[:, 30:] = 5
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 30:], after[:, 30:], atol=1e-3)


@BOTH
def test_a_cast_model_stays_in_its_type(config):
    """And its logits are those of the same rounded weights in float32, up to bfloat16's 8 bits."""
    rounded = build_model(config, dtype=torch.bfloat16)
    logits = rounded(token_ids())
    assert logits.dtype == torch.bfloat16
    wide = rounded.float()(token_ids())
    error = (logits.float() - wide).norm() / wide.norm()
    assert 0 < error < 0.02


def test_rotary_tables_survive_a_cast():
    model = build_model(LLAMA_CONFIG)
    exact = model.model.rotary.cos.clone()
    for changed in (model.to(torch.bfloat16), model.float()):
        assert changed.model.rotary.cos.dtype == torch.float32
        assert torch.equal(changed.model.rotary.cos, exact)
    assert not any("rotary" in name for name in model.state_dict())


@pytest.mark.parametrize("length", [1, 2, 37])
def test_positions_start_again_with_each_segment(length):
    ids = torch.tensor([[0] * 5 + [1] + [2] * 20 + [7] * 11, [3] * 37])[:, :length]
    expected = [[row[:i].tolist().count(row[i]) for i in range(length)] for row in ids]
    assert positions_in_segments(ids).tolist() == expected


@BOTH
def test_segment_ids_of_another_shape_are_refused(config):
    with pytest.raises(ValueError, match=r"segment_ids: got shape \(1, 48\), needs .* \(2, 48\)"):
        build_model(config, device="meta")(token_ids(), segment_ids=torch.zeros(1, 48, dtype=torch.int32))


@BOTH
def test_blocks_can_be_wrapped_from_outside(config):
    model = build_model(config)
    expected = model(token_ids())
    calls = []

    class Wrapped(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args):
            calls.append(len(args))
            return torch.utils.checkpoint.checkpoint(self.block, *args, use_reentrant=False)

    for i, block in enumerate(model.blocks):
        model.blocks[i] = Wrapped(block)
    assert torch.equal(model(token_ids()), expected)
    assert len(calls) == 3


@BOTH
def test_flops_are_those_that_torch_counts(config):
    """torch counts the matrix products it runs: PaLM's formula, less norms and biases, which are below 1%."""
    length = 64
    model = build_model(config)
    ids = token_ids(batch=1, length=length)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert counter.get_total_flops() == pytest.approx(length * model.flops_per_token(length), rel=0.02)


def test_tied_embeddings_are_counted_once_and_multiplied():
    untied, tied = (
        build_model(LLAMA_CONFIG.model_copy(update={"tie_word_embeddings": tie})) for tie in (False, True)
    )
    assert untied.num_parameters() - tied.num_parameters() == 96 * 64
    assert untied.flops_per_token(64) == tied.flops_per_token(64)


def test_labels_of_minus_100_are_left_out():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.tensor([[1, 2, -100, 3, -100], [4, -100, 5, 6, 0]])
    chosen = logits.double().log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    torch.testing.assert_close(
        next_token_loss(logits, labels).double(), -chosen[labels >= 0].mean(), rtol=1e-6, atol=0
    )
    assert next_token_loss(logits, torch.full_like(labels, -100)) == 0


@BOTH
def test_too_long_a_sequence_is_refused(config):
    with pytest.raises(ValueError, match="input_ids: 65 positions, but the model's .* is 64"):
        build_model(config, device="meta")(token_ids(length=65))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, [40, 40, 40]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None, None]),
        ({"model_type": "qwen2"}, [None, None, None]),
        ({"model_type": "qwen2", "use_sliding_window": True}, [None, None, None]),  # from layer 28 on
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, [None, 40, 40]),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [40, None, 40],
        ),
    ],
)
def test_each_layer_has_its_window(changes, windows):
    values = LLAMA_CONFIG.model_dump() | {"sliding_window": 40, "num_hidden_layers": 3}
    model = build_model(LlamaConfig(**values | changes), device="meta")
    assert [block.self_attn.window for block in model.blocks] == windows


def test_a_window_hides_what_lies_before_it():
    """A token that no layer's window reaches changes nothing; the first that one does, does."""
    values = LLAMA_CONFIG.model_dump() | {"model_type": "mistral", "sliding_window": 5}
    model = build_model(LlamaConfig(**values))
    reach = 4 * LLAMA_CONFIG.num_hidden_layers  # each layer sees 4 tokens further back
    ids = token_ids(batch=1, length=40)
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 96
    with torch.no_grad():
        same = (model(ids) == model(changed)).all(-1)[0]
    assert same.tolist() == [not 10 <= n <= 10 + reach for n in range(40)]


@BOTH
def test_the_residual_stream_is_in_the_type_of_autocast(config):
    """Twice as wide, it would be twice the memory that the backward pass keeps."""
    model, seen = build_model(config), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with torch.no_grad():
        model(token_ids(batch=1, length=16))
        with torch.autocast("cpu", torch.bfloat16):
            model(token_ids(batch=1, length=16))
    layers = config.num_hidden_layers
    assert seen == [(torch.float32, torch.float32)] * layers + [(torch.bfloat16, torch.bfloat16)] * layers
