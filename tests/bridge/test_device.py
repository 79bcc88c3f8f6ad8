"""The device is found, named and described."""

import os
import subprocess
import sys

import pytest

from pallas_kernels.hardware import GENERATIONS, INTERPRETER
from xla_attention import pick_device
from xla_attention.device import hardware, hardware_of_kind


def test_cpu_stands_in_where_there_is_no_tpu(first_device):
    device, line = pick_device()
    assert device == first_device
    assert line == "CPU (Pallas interpreter), 1 device"
    assert hardware() == INTERPRETER


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e")],
)
def test_tpu_kinds(kind, name):
    assert hardware_of_kind(kind) == GENERATIONS[name]


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="got 'TPU v99', known are .*TPU v4"):
        hardware_of_kind("TPU v99")


def run_without_device(program, **environment):
    """Runs Python code in a process of its own, with PJRT_DEVICE set only if it is given here."""
    kept = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=kept | environment
    )


@pytest.mark.parametrize("name", ["TPU", "NONSENSE", ""])
def test_a_device_that_is_not_there_is_one_clear_line(name, tmp_path):
    """In the command, which shows a ValueError as one line. The machine that tests has no TPU."""
    if name == "TPU" and hardware() != INTERPRETER:
        pytest.skip("there is a TPU")
    config = f"""
model: {{model_type: gpt2, vocab_size: 257, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 64}}
data: {{train: ["{{stdlib}}/json/*.py"]}}
seq_len: 32
batch_size: 1
steps: 1
out_dir: {tmp_path / "run"}
"""
    (tmp_path / "train.yaml").write_text(config)
    program = f"from xla_attention.cli import app; app(['train', {str(tmp_path / 'train.yaml')!r}])"
    done = run_without_device(program, PJRT_DEVICE=name)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(errors) == 1 and f"PJRT_DEVICE={name}: no such device" in errors[0]
    assert "set PJRT_DEVICE=CPU" in errors[0] and "or unset it" in errors[0]


def test_the_choice_of_torch_xla_is_logged_to_libraries_but_not_by_our_programs():
    """And no other line of the root logger is lost."""
    plain = run_without_device("import torch_xla")
    ours = run_without_device(
        "import xla_attention.cli, torch_xla, logging; logging.warning('another PJRT_DEVICE=CPU')"
    )
    assert "PJRT_DEVICE=" in plain.stderr  # else there is nothing to hide, and the filter can go
    assert "WARNING:root:another PJRT_DEVICE=CPU" in ours.stderr
    assert ours.stderr.count("PJRT_DEVICE=") == 1


def test_exact_float32_is_in_what_is_compiled_and_changes_nothing_on_a_cpu():
    """In a process of its own, as it is set for the whole process. Float32: the same bits."""
    program = """
import torch, torch_xla
from xla_attention.device import use_exact_float32

a, b = (torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
results = []
for rows in (a, a.clone()):
    x, y = rows.to(torch_xla.device()), b.to(torch_xla.device())
    product = torch.relu(x) @ y if results else torch.relu(x + 0) @ y
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([product])
    assert ("operand_precision={highest,highest}" in hlo) == bool(results), hlo
    results.append(product.cpu())
    use_exact_float32()
assert torch.equal(*results)
"""
    done = run_without_device(program, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    assert "mat mul precision" not in done.stderr
