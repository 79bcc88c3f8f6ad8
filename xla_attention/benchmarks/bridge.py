"""Host time of one attention call: what Python and the lazy graph cost, with nothing executed."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import torch
import torch_xla
from torch_xla.experimental.custom_kernel import flash_attention as torch_xla_flash_attention

from xla_attention.ops import flash_attention

SHAPE = (1, 8, 1024, 128)
DTYPE = torch.bfloat16
WARMUP = 20


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Medians of cached calls, in seconds.

    Attributes:
        name: whose operator.
        forward: one call of it on tensors that need no gradient.
        training: one call on tensors that do, and its backward.
    """

    name: str
    forward: float
    training: float


def measure_host_time(calls: int = 500) -> list[HostTime]:
    """Times our operator and torch_xla's own flash attention, alternating, at ``SHAPE`` and ``DTYPE``.

    The calls only build lazy graphs, which are thrown away, so it is the host's time that is seen. That makes
    torch_xla's operator measurable off TPU too, where its kernel could not run.
    """
    device = torch_xla.device()
    frozen = [torch.ones(SHAPE, dtype=DTYPE, device=device) for _ in range(3)]
    trained = [x.clone().requires_grad_() for x in frozen]
    cotangent = torch.ones(SHAPE, dtype=DTYPE, device=device)
    torch_xla.sync()

    ours = functools.partial(flash_attention, is_causal=True)
    theirs = functools.partial(torch_xla_flash_attention, causal=True)

    def training(op: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(op(*trained), trained, cotangent)

    training(ours)  # first: it keeps JAX, which their lowering starts, off the TPU
    with _lowering_for_tpu():
        theirs(*frozen)
        training(theirs)
    forward = _medians([lambda: ours(*frozen), lambda: theirs(*frozen)], calls)
    both = _medians([lambda: training(ours), lambda: training(theirs)], calls)
    names = ("xla_attention", "torch_xla")
    return [HostTime(*row) for row in zip(names, forward, both)]


@contextmanager
def _lowering_for_tpu() -> Iterator[None]:
    """Lets torch_xla's operator lower its kernel, once, where JAX's own device is not a TPU."""
    jit = jax.jit

    def for_tpu(*args: Any, **options: Any) -> Any:
        jitted = jit(*args, **options)
        jitted.lower = lambda *a, **k: jitted.trace(*a, **k).lower(lowering_platforms=("tpu",))
        return jitted

    with mock.patch.object(jax, "jit", for_tpu):
        yield


def _medians(functions: list[Callable[[], object]], calls: int) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(WARMUP + calls):
        for function, kept in zip(functions, times):
            start = time.perf_counter()
            result = function()
            kept.append(time.perf_counter() - start)
            del result  # freeing the graph is not part of the call
    return [statistics.median(kept[WARMUP:]) for kept in times]
