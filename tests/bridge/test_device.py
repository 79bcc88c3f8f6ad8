"""The device is found, named and described."""

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
