"""Compiles one StableHLO module for a TPU that is not attached, in a process of its own.

    python -m xla_attention.planner.compile_worker MODULE OPTIONS DEVICES

``MODULE`` is a file with a serialized portable StableHLO module, ``OPTIONS`` the arguments of
``get_topology_desc`` as JSON, ``DEVICES`` the number of devices that the module is partitioned over. Prints
one line of JSON: the compile time and memory of a device, or the compiler's error.
libtpu reads its flags once, from the environment, when it is loaded: hence the process.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import topologies
from jaxlib import _jax, xla_client


def compile_module(module: bytes, options: dict[str, Any], count: int) -> dict[str, Any]:
    devices = topologies.get_topology_desc(**options).devices[:count]
    compile_options = xla_client.CompileOptions()
    compile_options.num_partitions = count
    build = compile_options.executable_build_options
    build.num_partitions = count
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[x.id for x in devices]]))
    if count > 1:
        build.use_spmd_partitioning = True
        build.allow_spmd_sharding_propagation_to_output = [True]
    start = time.perf_counter()
    try:
        executable = devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), compile_options)
    except _jax.XlaRuntimeError as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    memory = executable.get_compiled_memory_stats()
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    print(
        json.dumps(compile_module(Path(sys.argv[1]).read_bytes(), json.loads(sys.argv[2]), int(sys.argv[3])))
    )
