"""Compiles one StableHLO module for a TPU that is not attached, in a process of its own.

    python -m xla_attention.planner.compile_worker MODULE OPTIONS

``MODULE`` is a file with a serialized portable StableHLO module for one device, ``OPTIONS`` the arguments of
``get_topology_desc`` as JSON. Prints one line of JSON: the compile time and memory, or the compiler's error.
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


def compile_module(module: bytes, options: dict[str, Any]) -> dict[str, Any]:
    device = topologies.get_topology_desc(**options).devices[0]
    compile_options = xla_client.CompileOptions()
    assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    compile_options.executable_build_options.device_assignment = assignment
    start = time.perf_counter()
    try:
        executable = device.client.compile(module, _jax.DeviceList((device,)), compile_options)
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
    print(json.dumps(compile_module(Path(sys.argv[1]).read_bytes(), json.loads(sys.argv[2]))))
