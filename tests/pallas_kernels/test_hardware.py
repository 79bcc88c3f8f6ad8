"""Facts of the TPU generations, against what their vendor publishes."""

import pytest

from pallas_kernels.hardware import GENERATIONS, INTERPRETER, by_name


@pytest.mark.parametrize(("name", "teraflops"), [("v4", 275), ("v5e", 197), ("v5p", 459), ("v6e", 918)])
def test_peak_of_a_chip(name, teraflops):
    """The published bf16 peak follows from clock and arrays; MFU is counted against it."""
    assert GENERATIONS[name].peak_flops == pytest.approx(teraflops * 1e12, rel=0.01)


def test_only_the_interpreter_interprets():
    assert INTERPRETER.interpret
    assert not any(h.interpret for h in GENERATIONS.values())


def test_by_name():
    assert by_name("v6e") is GENERATIONS["v6e"]
    assert by_name("interpreter") is INTERPRETER
    with pytest.raises(ValueError, match="hardware: got 'v1', allowed are .*v5e"):
        by_name("v1")
