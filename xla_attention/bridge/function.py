"""The one way from a JAX function to the torch_xla graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch_xla
import torch_xla.core.xla_builder as xb

from xla_attention.bridge.lowering import lower, to_hlo
from xla_attention.bridge.sharding import Sharding
from xla_attention.device import hardware

# 64-bit types are absent: JAX would narrow them.
_DTYPES = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.int32: jnp.int32,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}


class JaxFunction:
    """A JAX function as a function of XLA tensors.

    The function is lowered whole, Pallas kernels and the JAX operations around them, once for each platform,
    static arguments, sharding, shapes and dtypes. A later call looks the computation up and adds one node to
    the lazy graph. It has no gradient of its own: operators pair two of these.

    Args:
        fn: called as ``fn(*arrays, hardware=hardware, **static)``; returns an array or a tuple of arrays.
        name: what the computation is called in graphs and profiles.
    """

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.fn = fn
        self.name = f"xla_attention::{name}"
        self._computations: dict[Hashable, Any] = {}

    def __call__(
        self, *tensors: torch.Tensor | None, sharding: Sharding | None = None, **static: Hashable
    ) -> list[torch.Tensor]:
        """The function's results, as lazy XLA tensors.

        Args:
            tensors: XLA tensors of any shape, float32, bfloat16, float8_e4m3fn, int32, int8, uint8
                or bool; None stays None.
            sharding: how they lie on the devices of an SPMD program, and what the results are: the function
                then computes one device's part, with collectives if it wants. XLA moves nothing where they
                lie so already.
            static: hashable keyword arguments that the function is specialized by.

        Raises:
            TypeError: a tensor has another dtype.
        """
        signature = [None if t is None else (t.shape, t.dtype) for t in tensors]
        key = (hardware().name, sharding, *static.items(), *signature)
        computation = self._computations.get(key)
        if computation is None:
            computation = self._computations[key] = self._lower(tensors, sharding, static)
        operands = [t for t in tensors if t is not None]
        return torch_xla._XLAC._xla_user_computation(self.name, operands, computation)

    def _lower(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        sharding: Sharding | None,
        static: dict[str, Hashable],
    ) -> Any:
        avals = [_aval(t, position) for position, t in enumerate(tensors) if t is not None]
        attached = hardware()

        def fn(*arrays: jax.Array) -> Any:
            given = iter(arrays)
            every = [None if t is None else next(given) for t in tensors]
            return self.fn(*every, hardware=attached, **static)

        exported = lower(fn, avals, "cpu" if attached.interpret else "tpu", sharding)
        module = to_hlo(exported, sharding and sharding.device_ids)
        return xb.computation_from_module_proto(self.name, module)


def _aval(tensor: torch.Tensor, position: int) -> jax.ShapeDtypeStruct:
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise TypeError(f"argument {position}: got {tensor.dtype}, kernels take {allowed}; convert it first")
    return jax.ShapeDtypeStruct(tuple(tensor.shape), _DTYPES[tensor.dtype])
