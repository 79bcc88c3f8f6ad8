"""Compiles one module for a TPU that is not attached, in a process of its own.

    python -m xla_attention.planner.compile_worker MODULE OPTIONS DEVICES [HLO [AUTO]]

``MODULE`` is a file with a serialized portable StableHLO module; or, where ``HLO`` is given, with an HLO
module, whose optimized text goes into that file. ``OPTIONS`` are the arguments of ``get_topology_desc`` as
JSON, ``DEVICES`` is the number of devices that the module is partitioned over. ``AUTO`` is the shape of a
mesh as JSON, over which XLA's auto-sharding places every tensor; without it, annotations decide. Prints one
line of JSON: the compile time and memory of a device, or the compiler's error. libtpu reads its flags once,
from the environment, when it is loaded: hence the process.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir


def compile_module(
    module: bytes, options: dict[str, Any], count: int, hlo: Path | None = None, auto: list[int] | None = None
) -> dict[str, Any]:
    devices = topologies.get_topology_desc(**options).devices[:count]
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in devices]]))
    compile_options.num_partitions = build.num_partitions = count
    if count > 1:
        build.use_spmd_partitioning = True
        # As torch_xla compiles: what has no annotation lies as its neighbours do.
        build.allow_spmd_sharding_propagation_to_parameters = [True]
        build.allow_spmd_sharding_propagation_to_output = [True]
    if auto:
        build.use_auto_spmd_partitioning = True
        build.auto_spmd_partitioning_mesh_shape = auto
        build.auto_spmd_partitioning_mesh_ids = list(range(count))
    if hlo:
        module = _to_stablehlo(module)
    start = time.perf_counter()
    try:
        executable = devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), compile_options)
    except _jax.XlaRuntimeError as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    if hlo:
        hlo.write_text(executable.hlo_modules()[0].to_string())
    memory = executable.get_compiled_memory_stats()
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "places": [list(device.coords) for device in devices],
    }


def _to_stablehlo(module: bytes) -> bytes:
    """A step as StableHLO; any of its arguments may be written over, as torch_xla lets it."""
    text = _jax.mlir.xla_computation_to_mlir_module(_jax.XlaComputation(module))
    with mlir.make_ir_context() as context:
        parsed = ir.Module.parse(text)
        main = next(op for op in parsed.body.operations if op.attributes["sym_name"].value == "main")
        arguments = [
            {**{a.name: a.attr for a in attributes}, "jax.buffer_donor": ir.BoolAttr.get(True, context)}
            for attributes in map(ir.DictAttr, main.attributes["arg_attrs"])
        ]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(each, context) for each in arguments], context
        )
        return mlir.module_to_bytecode(parsed)


if __name__ == "__main__":
    module, options, devices, *rest = sys.argv[1:]
    hlo, auto = (*rest, None, None)[:2]
    answer = compile_module(
        Path(module).read_bytes(),
        json.loads(options),
        int(devices),
        Path(hlo) if hlo else None,
        json.loads(auto) if auto else None,
    )
    print(json.dumps(answer))
