"""Layers as one loop: a program whose size, and time to trace and compile, do not grow with the depth.

The weights of all layers are kept in one tensor each, so that the optimizer's part of the program does not
grow either. The loop is torch_xla's `scan`. Its autograd function is not used: with SPMD it needs a package
that torch_xla does not install. Here a strategy's annotations, which are operators, are in the loop's body.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xla_attention.models import build_model
from xla_attention.models.causal_lm import CausalLM
from xla_attention.training.activation_checkpointing import as_now

Recompute = Literal["none", "selective", "full"]
Annotate = Callable[[str, Tensor], Tensor]
Weights = dict[str, Tensor]


def stack_layers(model: CausalLM) -> None:
    """Replaces the layers of `model` by one, whose weights are those of all of them, `[layers, ...]`.

    Raises:
        ValueError: the layers differ in more than their weights.
    """
    first, *others = model.blocks
    for number, block in enumerate(others, start=1):
        _check_alike(first, block, number)
    for name, module in first.named_modules():
        twins = [module, *(block.get_submodule(name) for block in others)]
        for weight in [name for name, _ in module.named_parameters(recurse=False)]:
            stacked = torch.stack([twin.get_parameter(weight).detach() for twin in twins])
            setattr(module, weight, nn.Parameter(stacked))
    del model.blocks[1:]


def unstacked(model: CausalLM) -> CausalLM:
    """A model on the CPU with the layers, and the weights, that `stack_layers` was given."""
    whole = build_model(model.config, device="meta").to_empty(device="cpu")
    weights = {}
    for name, weight in model.named_parameters():
        layer = name.removeprefix(f"{model.blocks_name}.0.")
        if layer == name:
            weights[name] = weight.detach().cpu()
        else:
            parts = enumerate(weight.detach().cpu())
            weights |= {f"{model.blocks_name}.{n}.{layer}": part.clone() for n, part in parts}
    whole.load_state_dict(weights, assign=True)
    return whole


def scan_layers(
    model: CausalLM, recompute: Recompute, annotate: Annotate = lambda name, weight: weight
) -> None:
    """Has `model`, whose layers are stacked, and which is on an XLA device and sharded, run them in one loop.

    Args:
        recompute: activations of a layer that are computed again going backward: `none`, `full` (all but what
            enters it), or `selective`: those that cost less to compute than to keep, as functorch's min-cut
            partitioner chooses.
        annotate: shards one layer's weight, and its gradient, inside the loop; called with its name in the
            layer.
    """
    (block,) = model.blocks
    # Weights are given at each call; those of the template are never read.
    memo = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta")) for weight in block.parameters()
    }
    template = copy.deepcopy(block, memo)

    def layer(x: Tensor, rest: Sequence[Tensor | None], weights: Weights) -> Tensor:
        weights = {name: annotate(name, weight) for name, weight in weights.items()}
        return torch.func.functional_call(template, weights, (x, *rest), strict=True)

    loop = _Loop(layer, recompute)
    block.forward = lambda x, *rest: loop(x, rest, dict(block.named_parameters()))


class _Loop:
    """`layer` applied over and over, with gradients by the hidden states and the weights."""

    def __init__(self, layer: Callable[..., Tensor], recompute: Recompute) -> None:
        self._layer = layer
        self._recompute = recompute
        self._bodies: dict[tuple[torch.dtype | None, ...], Callable[..., Any]] = {}

    def __call__(self, x: Tensor, rest: Sequence[Tensor | None], stacked: Weights) -> Tensor:
        from torch_xla.experimental.scan import value_and_grad_partitioned

        body = self._body(tuple(None if tensor is None else tensor.dtype for tensor in rest))
        # Indices of documents and positions are exact in float32.
        carry = (x, *(tensor.float() for tensor in rest if tensor is not None))
        if not torch.is_grad_enabled():
            return _run(body, carry, stacked)[0][0]
        if self._recompute == "full":
            return _Recomputed.apply(body, tuple(stacked), len(carry), *carry, *stacked.values())
        # Traced once for each body and shapes: a body is a function of its arguments alone.
        partition = _partitions()[self._recompute]
        parts = value_and_grad_partitioned(body, carry, stacked, partition, is_fn_pure=True)
        return _Kept.apply(parts, tuple(stacked), len(carry), *carry, *stacked.values())[0]

    def _body(self, dtypes: tuple[torch.dtype | None, ...]) -> Callable[..., Any]:
        """One step of the loop. What is the same for all layers is carried along: the loop's other inputs
        would be one copy for each layer. What is carried has a gradient, so integers travel as floats."""
        if dtypes not in self._bodies:

            def body(carry: tuple[Tensor, ...], weights: Weights) -> tuple[tuple[Tensor, ...], None]:
                x, *carried = carry
                given = iter(carried)
                rest = [None if dtype is None else next(given).detach().to(dtype) for dtype in dtypes]
                return (self._layer(x, rest, weights), *(tensor.clone() for tensor in carried)), None

            self._bodies[dtypes] = body
        return self._bodies[dtypes]


class _Kept(torch.autograd.Function):
    """The loop with the activations that a partition of its body keeps for the backward loop."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: tuple[Callable[..., Any], ...],
        names: tuple[str, ...],
        carried: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        forward, alias_input, backward = parts
        stacked = dict(zip(names, tensors[carried:]))
        carry, (_, activations) = _run(forward, tensors[:carried], stacked)
        ctx.save_for_backward(*alias_input(activations, stacked))
        ctx.backward_body, ctx.names = backward, names
        return carry

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_carry, grad_weights = _run(ctx.backward_body, grads, (None, ctx.saved_tensors), reverse=True)
        return None, None, None, *grad_carry, *(grad_weights[name] for name in ctx.names)


class _Recomputed(torch.autograd.Function):
    """The loop that keeps what enters each layer, and computes the rest of it again in the backward loop."""

    @staticmethod
    def forward(
        ctx: Any, body: Callable[..., Any], names: tuple[str, ...], carried: int, *tensors: Tensor
    ) -> Tensor:
        def keeping(carry: tuple[Tensor, ...], weights: Weights) -> tuple[tuple[Tensor, ...], Tensor]:
            return body(carry, weights)[0], carry[0].clone()

        carry, rest, stacked = tensors[:carried], tensors[1:carried], tensors[carried:]
        (x, *_), entered = _run(keeping, carry, dict(zip(names, stacked)))
        ctx.save_for_backward(entered, *rest, *stacked)
        ctx.body, ctx.names, ctx.carried = as_now(body, tensors[0].device.type), names, carried
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        entered, *tensors = ctx.saved_tensors
        rest, stacked = tensors[: ctx.carried - 1], dict(zip(ctx.names, tensors[ctx.carried - 1 :]))

        def step(
            carry: tuple[Tensor, ...], layer: tuple[Tensor, Weights]
        ) -> tuple[tuple[Tensor, ...], Weights]:
            grad, *rest = carry
            with torch.enable_grad():
                x, *weights = (t.detach().requires_grad_() for t in (layer[0], *layer[1].values()))
                (out, *_), _ = ctx.body((x, *rest), dict(zip(ctx.names, weights)))
                by_x, *by_weights = torch.autograd.grad(out, (x, *weights), grad)
            return (by_x, *(t.clone() for t in rest)), dict(zip(ctx.names, by_weights))

        (by_x, *_), by_weights = _run(step, (grad, *rest), (entered, stacked), reverse=True)
        return None, None, None, by_x, *(None for _ in rest), *(by_weights[name] for name in ctx.names)


def _run(body: Callable[..., Any], carry: Any, inputs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """The loop itself, without gradients."""
    from torch_xla.experimental.scan import _scan_impl_pytree

    with torch.no_grad():
        return _scan_impl_pytree(body, carry, inputs, reverse=reverse)


def _partitions() -> dict[str, Callable[..., Any]]:
    from functorch.compile import default_partition, min_cut_rematerialization_partition

    return {"none": default_partition, "selective": min_cut_rematerialization_partition}


def _check_alike(first: nn.Module, other: nn.Module, number: int) -> None:
    """Raises ValueError if a layer computes something else than the first, weights aside."""
    pairs = zip(first.named_modules(), other.modules(), strict=True)
    for (name, module), twin in pairs:
        ours, theirs = (
            {key: value for key, value in vars(m).items() if not key.startswith("_")} for m in (module, twin)
        )
        if type(module) is not type(twin) or ours != theirs:
            differs = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            raise ValueError(
                f"scan_layers: layer {number} is not as the first, in {name or 'the layer'}: "
                f"{', '.join(differs) or 'its type'}; set scan_layers to false"
            )
