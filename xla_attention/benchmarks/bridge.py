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
from torch_xla.experimental.custom_kernel import paged_attention as torch_xla_paged_attention

from xla_attention.ops import combine_kv_pages, flash_attention, paged_attention

SHAPE = (1, 8, 1024, 128)
PAGED_SHAPE = (16, 32, 128)  # sequences, heads, head_dim
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
    # autograd's thread holds the last gradients until it has other work; theirs could not run off TPU
    training(ours)
    names = ("xla_attention", "torch_xla")
    return [HostTime(*row) for row in zip(names, forward, both)]


def measure_paged_host_time(calls: int = 200) -> list[tuple[str, float]]:
    """Medians of a cached decode call in seconds: ours, and torch_xla's own, which traces JAX each time.

    Of ``PAGED_SHAPE`` queries, on a table of 16 pages of 16 tokens a sequence; only graphs are built.
    """
    device = torch_xla.device()
    seqs, heads, dim = PAGED_SHAPE
    q = torch.ones(PAGED_SHAPE, dtype=DTYPE, device=device)
    k_pages = torch.ones((8, 64, 16, dim), dtype=DTYPE, device=device)
    kv_pages = combine_kv_pages(k_pages, k_pages)
    lens = torch.full((seqs,), 100, dtype=torch.int32, device=device)
    table = torch.zeros((seqs, 16), dtype=torch.int32, device=device)
    torch_xla.sync()

    ours = lambda: paged_attention(q, kv_pages, lens, table)  # noqa: E731
    theirs = lambda: torch_xla_paged_attention(q, k_pages, k_pages, lens, table, 16)  # noqa: E731
    ours()
    with _lowering_for_tpu():
        times = _medians([ours, theirs], calls)
    return list(zip(("xla_attention", "torch_xla"), times))


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
