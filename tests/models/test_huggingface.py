"""Checkpoints of transformers, loaded as they are and written back, give transformers' logits."""

import json

import pytest
import torch
import transformers
from random_models import CONFIGS, their_model, token_ids
from safetensors.torch import load_file, save_file

from xla_attention.models import load_model, save_model
from xla_attention.text import ByteTokenizer

# Both compute in float32; logits are of order 1 to 10, and sums run in different orders.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@torch.no_grad()
def their_logits(model):
    return model(token_ids()).logits


@torch.no_grad()
def our_logits(model):
    return model(token_ids())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_and_survive_the_way_back(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    expected = their_logits(theirs)
    assert expected.std() > 0.1  # a model that says nothing would agree with anything
    torch.testing.assert_close(our_logits(ours), expected, **TOLERANCE)

    save_model(ours, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(back) is type(theirs)
    assert getattr(back.config, "sliding_window", None) == getattr(theirs.config, "sliding_window", None)
    assert torch.equal(their_logits(back), expected)


@pytest.mark.parametrize("name", ["llama3_scaling", "gpt2", "qwen2_tied"])
def test_sharded_files(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), **TOLERANCE)

    save_model(ours, tmp_path / "ours", max_shard_size="60KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(their_logits(back), their_logits(theirs), **TOLERANCE)


def test_the_published_gpt2_layout(tmp_path):
    """The published GPT-2 files are of the bare model, and hold its causal masks."""
    theirs = their_model("gpt2")
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(our_logits(load_model(tmp_path)), their_logits(theirs), **TOLERANCE)


def test_a_tied_checkpoint_may_hold_the_projection_too(tmp_path):
    theirs = their_model("llama_tied")
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(our_logits(load_model(tmp_path)), their_logits(theirs), **TOLERANCE)


def test_a_config_written_by_transformers_5(tmp_path):
    theirs = their_model("llama3_scaling")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
    path.write_text(json.dumps(config))
    torch.testing.assert_close(our_logits(load_model(tmp_path)), their_logits(theirs), **TOLERANCE)


def test_stored_type_is_kept_or_converted_on_request(tmp_path):
    their_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}
    model = load_model(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    save_model(model.to(torch.bfloat16), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_unused_keys_of_a_config_are_written_back(tmp_path):
    their_model("gpt2").save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["resid_pdrop"] == 0.1


def test_the_tokenizer_is_saved_beside_the_weights(tmp_path):
    their_model("llama").save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours", tokenizer=ByteTokenizer())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("héllo\n")["input_ids"] == list("héllo\n".encode())
