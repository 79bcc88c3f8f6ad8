"""A strategy at work: the mesh of this process's devices, and everything that is annotated on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from xla_attention.models.causal_lm import CausalLM
from xla_attention.sharding.annotate import annotate_gradients, annotate_outputs, annotated, mark
from xla_attention.sharding.config import ShardingConfig
from xla_attention.sharding.inputs import local_devices, rows_of_process, to_devices
from xla_attention.sharding.lookup import look_up_sharded, lookup_of
from xla_attention.sharding.mesh import build_mesh
from xla_attention.sharding.strategy import (
    ShardingError,
    Spec,
    Strategy,
    activation_specs,
    check_batch,
    parameter_specs,
    zigzag_shards,
)

if TYPE_CHECKING:
    import torch
    import torch_xla.distributed.spmd as xs

    from xla_attention.ops.placement import AttentionPlacement


class Sharding:
    """Shards models, optimizers and batches over all devices, in a process where SPMD is on.

    Args:
        strategy: what is sharded how.

    Attributes:
        mesh: of all devices.
        sizes: of its axes.

    Raises:
        ValueError: the mesh does not fit the devices.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.mesh: xs.Mesh = build_mesh(strategy.mesh)
        self.sizes = dict(zip(self.mesh.axis_names, map(int, self.mesh.mesh_shape)))
        self._specs: dict[str, Spec] = {}
        self._layer: dict[str, Spec] = {}

    def __str__(self) -> str:
        if self.strategy.auto:
            return f"XLA's choice over {self.mesh.size()} devices"
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"

    def check(self, model: nn.Module, batch_size: int, seq_len: int) -> None:
        """Raises ShardingError if the model's parameters or a batch do not fit the mesh."""
        if self.strategy.auto:
            return
        self.check_parameters(model)
        check_batch(self.strategy, batch_size, seq_len, self.sizes)

    def check_parameters(self, model: nn.Module) -> None:
        """Raises ShardingError if the model's parameters do not fit the mesh."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._specs = parameter_specs(self.strategy, shapes, self.sizes)

    def place_parameters(self, model: nn.Module) -> None:
        """Shards parameters, and nothing else: XLA finds the rest from them.

        Args:
            model: its parameters checked, and on the XLA device.
        """
        for name, parameter in model.named_parameters():
            mark(parameter, self.mesh, self._specs[name])

    def placement_of_heads(self) -> AttentionPlacement:
        """Of attention over a flat batch of tokens: heads over `tensor`, tokens on every device."""
        from xla_attention.ops.placement import AttentionPlacement

        return AttentionPlacement.of_partition_spec(self.mesh, (None, "tensor", None, None))

    def place_heads(self, kv_pages: Tensor, kv_heads: int) -> None:
        """Shards pages of a cache over `tensor`; whole on every device if that does not divide the heads."""
        divides = kv_heads % self.sizes["tensor"] == 0
        mark(kv_pages, self.mesh, ((), (), ("tensor",) if divides else ()))

    def keep_dimensions(self, model: nn.Module) -> None:
        """Replaces torch's linear layers, which make one dimension of batch and sequence, for which XLA would
        gather the sequence. For a model that is not on the device yet."""
        if not self.strategy.auto:
            from torch_xla.distributed.spmd.xla_sharding import apply_xla_patch_to_nn_linear

            apply_xla_patch_to_nn_linear(model)

    def shard_model(self, model: nn.Module) -> None:
        """Shards parameters, and has gradients and outputs of modules annotated whenever they are computed.

        Args:
            model: checked, and on the XLA device.
        """
        if self.strategy.auto:
            return
        self.place_parameters(model)
        annotate_gradients(model, self._specs, self.mesh)
        modules = dict(model.named_modules())
        outputs = activation_specs(self.strategy, modules)
        annotate_outputs(model, outputs, self.mesh)
        for name, module in modules.items():
            if isinstance(module, nn.Embedding):
                table, output = self._specs[f"{name}.weight"], outputs.get(name, (*self.strategy.inputs, ()))
                lookup = lookup_of(self.mesh, self.sizes, table, output, module.num_embeddings)
                if lookup:
                    look_up_sharded(module, lookup)

    def stack_layers(self, model: CausalLM) -> None:
        """For a checked model whose layers have become one with weights `[layers, ...]`: the axes of each
        weight are those that it had in every layer.

        Raises:
            ShardingError: the strategy treats layers differently.
        """
        prefix = model.blocks_name
        for name in [name for name in self._specs if name.startswith(f"{prefix}.")]:
            layer, _, weight = name.removeprefix(f"{prefix}.").partition(".")
            spec = self._specs.pop(name)
            if self._layer.setdefault(weight, spec) != spec:
                raise ShardingError(
                    f"sharding: {weight} of layer {layer} lies not as in the first; set scan_layers to false"
                )
        self._specs |= {f"{prefix}.0.{weight}": ((), *spec) for weight, spec in self._layer.items()}

    def annotate_layer(self, name: str, weight: Tensor) -> Tensor:
        """One layer's weight, by its name there, and its gradient, sharded inside a loop over layers."""
        return annotated(weight, self.mesh, self._layer[name]) if self._layer else weight

    def mark_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Shards parameters and optimizer state; after each update too, so that they stay where they are."""
        if self.strategy.auto:
            return
        for name, parameter in model.named_parameters():
            spec = self._specs[name]
            mark(parameter, self.mesh, spec)
            for value in optimizer.state[parameter].values():
                mark(value, self.mesh, state_spec(value.shape, parameter.shape, spec))

    def rows(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this process loads."""
        if self.strategy.auto:
            return np.arange(batch_size)
        mesh = self.mesh.get_logical_mesh()
        batch_axes = self.strategy.inputs[0]
        return rows_of_process(batch_size, local_devices(), mesh, self.mesh.axis_names, batch_axes)

    def to_devices(self, array: np.ndarray, batch_size: int) -> Tensor:
        """A batch `[rows, seq]` of this process's rows, as one `[batch_size, seq]` over all devices."""
        spec = None if self.strategy.auto else self.strategy.inputs  # what is annotated, XLA leaves there
        return to_devices(array, self.mesh, spec, self.rows(batch_size), batch_size)

    @property
    def zigzag_shards(self) -> int:
        """Shards of the sequence if batches are to be in zig-zag order, else 0."""
        return zigzag_shards(self.strategy, self.sizes)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Attention inside the block runs on the mesh: batch and sequence lie as the inputs do, heads over
        `tensor`."""
        from xla_attention.ops.placement import AttentionPlacement, use_attention_placement

        placement = None
        if not self.strategy.auto:
            context = self.strategy.context
            layout = context.layout if self.zigzag_shards else "contiguous"
            batch, sequence = self.strategy.inputs
            placement = AttentionPlacement.of_partition_spec(
                self.mesh,
                (batch or None, "tensor", sequence or None, None),
                method=context.method,
                layout=layout,
            )
        with use_attention_placement(placement):
            yield


def state_spec(shape: tuple[int, ...], parameter_shape: tuple[int, ...], spec: Spec) -> Spec:
    """The axes of an optimizer's tensor: those of its parameter, in the dimensions that it shares with it."""
    if len(shape) != len(parameter_shape):
        return tuple(() for _ in shape)
    return tuple(axes if n == m else () for n, m, axes in zip(shape, parameter_shape, spec))


def start_spmd(config: ShardingConfig, *, staging: bool = False) -> Strategy | None:
    """Switches SPMD on if a strategy is given; call it before anything is put on an XLA device.

    Args:
        staging: steps are recorded for another compiler, and none is run here.

    Returns:
        The strategy, or None for one device.

    Raises:
        ShardingError: the strategy cannot be used here, or this process already has tensors on one device.
    """
    if config.strategy == "none":
        return None
    import torch_xla
    import torch_xla.runtime as xr

    strategy = config.load()
    auto = strategy.auto and not staging
    if auto and xr.device_type() != "TPU":
        # XLA's CPU compiler has no such pass: it would replicate everything, and torch_xla, which takes the
        # places of parameters from each compilation, would compile every step anew.
        raise ShardingError(
            f"sharding.strategy={config.strategy}: auto-sharding is a pass of XLA's TPU compiler, got device "
            f"{xr.device_type()}; choose another strategy, such as fsdp"
        )
    if not xr.is_spmd() and torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise ShardingError(
            f"sharding.strategy={config.strategy}: this process has used an XLA device without SPMD; "
            "call torch_xla.runtime.use_spmd() first, or train in a process of its own"
        )
    if not xr.is_spmd() or auto and "XLA_AUTO_SPMD" not in os.environ:
        xr.use_spmd(auto=auto)
    return strategy
