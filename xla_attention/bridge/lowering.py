"""A JAX function, lowered whole to StableHLO or HLO for a platform that need not be attached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import export
from jax._src import config as jax_config
from jax._src import xla_bridge
from jaxlib import _jax

from xla_attention.bridge.devices import reorder_devices
from xla_attention.bridge.sharding import Sharding

# Export refuses custom calls without a stability promise; Pallas kernels are one.
_PALLAS_CALL = export.DisabledSafetyCheck.custom_call("tpu_custom_call")


def lower(
    fn: Callable[..., Any],
    avals: Sequence[jax.ShapeDtypeStruct],
    platform: str,
    sharding: Sharding | None = None,
) -> export.Exported:
    """Traces ``fn`` and lowers it, with all that surrounds its Pallas kernels, to StableHLO.

    ``jax.export`` lowers in forward-compatible mode: without it jax 0.7.1 writes a Mosaic version that the
    libtpu it is pinned with refuses.

    Args:
        fn: a JAX function of arrays alone.
        avals: shape and dtype of each argument; all are kept, used or not.
        platform: ``"cpu"`` or ``"tpu"``.
        sharding: how arguments and results lie on devices; ``fn`` is then given one device's parts.
    """
    with _our_configuration():
        if sharding is not None:
            fn, avals = sharding.wrap(fn), sharding.place(list(avals))
        jitted = jax.jit(fn, keep_unused=True)
        return export.export(jitted, platforms=[platform], disabled_checks=[_PALLAS_CALL])(*avals)


def to_hlo(exported: export.Exported, device_ids: Sequence[int] | None = None) -> bytes:
    """The serialized HLO module of a lowered function; its results are one tuple.

    Args:
        exported: what :func:`lower` returns.
        device_ids: the device at each place of the mesh that it was sharded over; None for their own order.
    """
    module = exported.mlir_module()
    if device_ids is not None:
        module = reorder_devices(module, device_ids)
    computation = _jax.mlir.mlir_module_to_xla_computation(module, use_tuple_args=False, return_tuple=True)
    return computation.as_serialized_hlo_module_proto()


@contextmanager
def _our_configuration() -> Iterator[None]:
    """JAX as the bridge needs it, whatever the caller's own JAX configuration says.

    torch_xla 2.9 partitions with GSPMD and knows no Shardy; kernels compute in 32 bits; and without source
    lines a kernel lowers to the same bytes wherever it is called from, so compilations kept on disk are found
    again. These settings hold inside the block alone. The platform cannot be scoped: JAX opens a client as
    soon as it traces, and a client on the TPU would take it from torch_xla, so JAX is kept to the CPU unless
    the user chose.
    """
    if not jax.config.jax_platforms and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    with (
        jax_config.use_shardy_partitioner(False),
        jax_config.enable_x64(False),
        jax_config.traceback_in_locations_limit(0),
    ):
        yield
