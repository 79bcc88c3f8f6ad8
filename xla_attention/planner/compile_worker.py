"""Compiles one module for a TPU that is not attached, in a process of its own.

    python -m xla_attention.planner.compile_worker MODULE OPTIONS [HLO]

``MODULE`` is a file with a serialized portable StableHLO module for one device; or, where ``HLO`` is given,
with an HLO module that is partitioned over all devices of the topology, and whose optimized text goes into
that file. ``OPTIONS`` are the arguments of ``get_topology_desc`` as JSON. Prints one line of JSON: the time,
and the memory of a device, or the compiler's error. libtpu reads its flags once, from the environment, when
it is loaded: hence the process.
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


def compile_module(module: bytes, options: dict[str, Any], hlo: Path | None = None) -> dict[str, Any]:
    devices = topologies.get_topology_desc(**options).devices
    devices = devices if hlo else devices[:1]
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in devices]]))
    if hlo:
        compile_options.num_partitions = build.num_partitions = len(devices)
        build.use_spmd_partitioning = True
        # As torch_xla compiles: what has no annotation lies as its neighbours do.
        build.allow_spmd_sharding_propagation_to_parameters = [True]
        build.allow_spmd_sharding_propagation_to_output = [True]
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
    }


def _to_stablehlo(module: bytes) -> bytes:
    text = _jax.mlir.xla_computation_to_mlir_module(_jax.XlaComputation(module))
    with mlir.make_ir_context():
        return mlir.module_to_bytecode(ir.Module.parse(text))


if __name__ == "__main__":
    module, options, *hlo = sys.argv[1:]
    print(json.dumps(compile_module(Path(module).read_bytes(), json.loads(options), *map(Path, hlo))))
