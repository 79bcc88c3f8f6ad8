"""A lowered function on a mesh whose devices are in another order than their own.

JAX lowers for an abstract mesh as if its places were devices 0, 1, 2 ... row by row. Meshes that follow a
torus, or several slices, are not so; here every mention of a device is replaced by the one at that place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

_IOTA = re.compile(r"devices=(\[[\d,]+\])<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def reorder_devices(module: str, device_ids: Sequence[int]) -> str:
    """The module with device ``device_ids[n]`` in the place of device ``n``.

    Args:
        module: StableHLO as text.
        device_ids: all devices, in the order of the mesh's places.
    """
    devices = np.asarray(device_ids)
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        asking: list[ir.Operation] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            for name in ("replica_groups", "source_target_pairs"):
                if name in op.attributes:
                    places = np.array(op.attributes[name])
                    op.attributes[name] = ir.DenseIntElementsAttr.get(devices[places].astype(np.int64))
            if "mhlo.sharding" in op.attributes:
                op.attributes["mhlo.sharding"] = _sharding(op.attributes["mhlo.sharding"], devices)
            if op.name == "func.func" and "arg_attrs" in op.attributes:
                op.attributes["arg_attrs"] = ir.ArrayAttr.get(
                    [_argument(x, devices) for x in op.attributes["arg_attrs"]]
                )
            if op.name == "stablehlo.partition_id":
                asking.append(op)
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(visit)
        for op in asking:
            _ask_for_place(op, devices)
        return str(parsed)


def _sharding(attribute: ir.Attribute, devices: np.ndarray) -> ir.Attribute:
    """``devices=[2,4]<=[4,2]T(1,0)``, which numbers places, as a list of devices."""

    def listed(match: re.Match) -> str:
        shape = [int(n) for n in match[2].split(",")]
        places = np.arange(math.prod(shape)).reshape(shape)
        if match[3]:
            places = places.transpose([int(n) for n in match[3].split(",")])
        return f"devices={match[1]}{','.join(map(str, devices[places.reshape(-1)]))}"

    return ir.StringAttr.get(_IOTA.sub(listed, ir.StringAttr(attribute).value))


def _argument(attributes: ir.Attribute, devices: np.ndarray) -> ir.Attribute:
    return ir.DictAttr.get(
        {x.name: _sharding(x.attr, devices) if x.name == "mhlo.sharding" else x.attr for x in attributes}
    )


def _ask_for_place(op: ir.Operation, devices: np.ndarray) -> None:
    """What asks for the number of this device wants its place."""
    with ir.InsertionPoint(op):
        places = stablehlo.constant(ir.DenseIntElementsAttr.get(np.argsort(devices).astype(np.int32)))
        one = stablehlo.dynamic_slice(places, [stablehlo.partition_id()], [1])
        place = stablehlo.reshape(ir.RankedTensorType.get([], ir.IntegerType.get_signless(32)), one)
        op.result.replace_all_uses_with(stablehlo.convert(op.result.type, place))
    op.erase()
