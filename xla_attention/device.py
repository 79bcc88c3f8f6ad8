"""Which device a program runs on, and what the kernels need to know of it."""

from __future__ import annotations

import functools

import torch

from pallas_kernels.hardware import INTERPRETER, V4, V5E, V5P, V6E, Hardware

# What PJRT calls each generation.
_TPU_KINDS = {
    "TPU v4": V4,
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
}


def pick_device() -> tuple[torch.device, str]:
    """The device to compute on, and a line that names it: TPU where there is one, else CPU.

    torch_xla makes the choice when it is imported, and ``PJRT_DEVICE`` overrides it. Call this before the
    first CPU ``backward()``: torch_xla 2.9 fails in every XLA backward that follows a CPU backward made
    before its first device.

    Returns:
        The torch_xla device, and for example ``"TPU v5e, 4 devices"`` or
        ``"CPU (Pallas interpreter), 1 device"``.

    Raises:
        ValueError: ``PJRT_DEVICE`` names neither a TPU generation that is known nor the CPU.
    """
    import torch_xla
    import torch_xla.runtime as xr

    device = torch_xla.device()
    attached = hardware()
    name = "CPU (Pallas interpreter)" if attached.interpret else f"TPU {attached.name}"
    count = xr.global_runtime_device_count()
    return device, f"{name}, {count} device{'s' if count > 1 else ''}"


@functools.cache
def hardware() -> Hardware:
    """The hardware that this process's XLA device is.

    Raises:
        ValueError: the device is neither the CPU nor a TPU generation that is known.
    """
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    platform = xr.device_type()
    if platform == "CPU":
        return INTERPRETER
    kind = xm.xla_device_kind() if platform == "TPU" else platform
    return hardware_of_kind(kind)


def hardware_of_kind(kind: str) -> Hardware:
    """The hardware that PJRT calls ``kind``.

    Raises:
        ValueError: no such TPU generation is known; the message lists those that are.
    """
    if kind not in _TPU_KINDS:
        raise ValueError(f"device kind: got {kind!r}, known are {sorted(_TPU_KINDS)} and the CPU")
    return _TPU_KINDS[kind]
