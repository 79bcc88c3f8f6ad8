"""Which device a program runs on, and what the kernels need to know of it."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

from pallas_kernels.hardware import INTERPRETER, V4, V5E, V5P, V6E, Hardware

if TYPE_CHECKING:
    import torch

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

# What torch_xla logs, through the root logger, when PJRT_DEVICE is not set.
_TORCH_XLA_CHOICES = (
    "Defaulting to PJRT_DEVICE=CPU",
    "libtpu.so and TPU device found. Setting PJRT_DEVICE=TPU.",
)


def pick_device() -> tuple[torch.device, str]:
    """The device to compute on, and a line that names it: TPU where there is one, else CPU.

    torch_xla makes the choice when it is imported, and ``PJRT_DEVICE`` overrides it. Call this before the
    first CPU ``backward()``: torch_xla 2.9 fails in every XLA backward that follows a CPU backward made
    before its first device.

    Returns:
        The torch_xla device, and for example ``"TPU v5e, 4 devices"`` or
        ``"CPU (Pallas interpreter), 1 device"``.

    Raises:
        ValueError: ``PJRT_DEVICE`` asks for a device that is not there, or for neither a TPU generation that
            is known nor the CPU; the message says what to set.
    """
    import torch_xla
    import torch_xla.runtime as xr

    try:
        device = torch_xla.device()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}: no such device can be used here ({reason}); set "
            "PJRT_DEVICE=CPU, or TPU on a machine that has one free, or unset it to take a TPU if there is "
            "one, else the CPU"
        ) from error
    attached = hardware()
    name = "CPU (Pallas interpreter)" if attached.interpret else f"TPU {attached.name}"
    count = xr.global_runtime_device_count()
    return device, f"{name}, {count} device{'s' if count > 1 else ''}"


def hide_torch_xla_choice() -> None:
    """Keeps out the line that torch_xla logs at its import about the device it takes.

    For programs that print ``pick_device``'s line instead; call it before the first import of torch_xla.
    """
    logging.getLogger().addFilter(_is_not_torch_xla_choice)


def _is_not_torch_xla_choice(record: logging.LogRecord) -> bool:
    return record.msg not in _TORCH_XLA_CHOICES


def use_exact_float32() -> None:
    """Lets XLA multiply float32 matrices in float32; a TPU's default rounds them to bfloat16 first.

    For the whole process, and for what is compiled from here on: torch_xla writes the precision into a graph
    when it compiles it, and a graph compiled before keeps the one it has. Products of bfloat16, the attention
    kernels (which name their own precision) and results on a CPU stay what they are.
    """
    from torch_xla import backends

    if backends.get_mat_mul_precision() == "highest":
        return
    # It warns at every call of changes after a compilation, the first one too.
    backends.logger.disabled = True
    try:
        backends.set_mat_mul_precision("highest")
    finally:
        backends.logger.disabled = False


_staged_for: Hardware | None = None


def stage_for(target: Hardware) -> None:
    """Has this process lower kernels for `target` from here on: its graphs are to be compiled, not run."""
    global _staged_for
    _staged_for = target


def hardware() -> Hardware:
    """The hardware that kernels are lowered for: this process's XLA device, unless `stage_for` named another.

    Raises:
        ValueError: the device is neither the CPU nor a TPU generation that is known.
    """
    return _staged_for or _attached_hardware()


@functools.cache
def _attached_hardware() -> Hardware:
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
