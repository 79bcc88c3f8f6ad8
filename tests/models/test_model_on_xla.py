"""The same model on the XLA device, through the Pallas kernels, and in eager torch."""

import copy

import pytest
import torch
import torch_xla
from random_models import their_model, token_ids

from xla_attention import segment_ids_from_lengths
from xla_attention.models import GPTConfig, LlamaConfig, build_model, load_model

CONFIGS = {
    "gpt2": GPTConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "llama": LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
}


def loss_and_gradients(model, device):
    model = copy.deepcopy(model).to(device)
    ids = token_ids(length=41)
    loss = model(ids[:, :-1].to(device), ids[:, 1:].to(device))
    loss.backward()
    torch_xla.sync()
    return loss.detach().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_one_step_equals_eager_torch(name, first_device):
    """Float32 on both; 1e-4 of each gradient's largest entry leaves room for sums in another order only."""
    model = build_model(CONFIGS[name], seed=3)
    expected_loss, expected = loss_and_gradients(model, "cpu")
    loss, gradients = loss_and_gradients(model, first_device)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for parameter, gradient in gradients.items():
        largest = expected[parameter].abs().max().item()
        assert largest > 0
        torch.testing.assert_close(
            gradient, expected[parameter], rtol=0, atol=1e-4 * largest, msg=lambda m, p=parameter: f"{p}: {m}"
        )


@pytest.mark.parametrize("name", ["llama3_scaling", "qwen3", "mistral_window", "gpt2"])
def test_a_checkpoint_gives_its_logits(name, tmp_path, first_device):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path).to(first_device)
    with torch.no_grad():
        logits = ours(token_ids().to(first_device)).cpu()
        torch.testing.assert_close(logits, theirs(token_ids()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_fresh_weights_do_not_depend_on_the_device(name, first_device):
    on_cpu = build_model(CONFIGS[name], seed=5).state_dict()
    on_xla = build_model(CONFIGS[name], seed=5, device=first_device).state_dict()
    assert all(torch.equal(on_xla[key].cpu(), tensor) for key, tensor in on_cpu.items())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_packed_documents_give_what_each_gives_alone(name, device, first_device):
    """Float32: a sum over fewer keys may only round otherwise. GPT's positions start again with each."""
    device = first_device if device == "xla" else torch.device("cpu")
    model = build_model(CONFIGS[name], seed=3).to(device)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # away from the uniform attention of fresh weights
    lengths = torch.tensor([[17, 1, 23], [30, 11, 0]])
    ids = token_ids(length=41).to(device)
    segment_ids = segment_ids_from_lengths(lengths, 41).to(device)
    with torch.no_grad():
        packed = model(ids, segment_ids=segment_ids).cpu()
        together = model(ids).cpu()
        for row, row_lengths in enumerate(lengths.tolist()):
            start = 0
            for length in filter(None, row_lengths):
                alone = model(ids[row : row + 1, start : start + length]).cpu()[0]
                torch.testing.assert_close(packed[row, start : start + length], alone, rtol=1e-5, atol=1e-5)
                start += length
    assert not torch.allclose(packed, together, atol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_document_does_not_change_the_loss_of_another(name, first_device):
    model = build_model(CONFIGS[name], seed=3).to(first_device)
    ids = token_ids(batch=1, length=41)
    other = ids.clone()
    other[:, :20] = (ids[:, :20] + 1) % 96
    segment_ids = segment_ids_from_lengths(torch.tensor([[20, 20]]), 40).to(first_device)
    labels = ids[:, 1:].clone()
    labels[:, :20] = -100

    def loss_of(given):
        return model(given[:, :-1].to(first_device), labels.to(first_device), segment_ids).item()

    assert loss_of(ids) == loss_of(other)
