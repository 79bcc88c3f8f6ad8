"""Settings that must precede the first import of torch_xla or jax."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
# Most tests compile a program for the CPU and run it once: LLVM's optimizations would take most of the time.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import pytest
from hypothesis import settings

# The same examples every time: a test that fails fails again. No deadline: a first call compiles.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def first_device():
    """A CPU backward before the first XLA device exists breaks every later XLA backward: make it first."""
    import torch_xla

    return torch_xla.device()
