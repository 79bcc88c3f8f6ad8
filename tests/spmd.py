"""Programs on several virtual devices. SPMD is a setting of a whole process: each runs in its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def run_spmd(program: str, devices: int, **variables: Any) -> Any:
    """Runs a program and returns the JSON that its last line prints.

    Args:
        program: Python; `VARIABLES` in it are `variables`.
        devices: virtual CPU devices.
    """
    output, errors = (process := start_spmd(program, devices, **variables)).communicate()
    assert process.returncode == 0, output[-2000:] + errors[-4000:]
    return json.loads(output.splitlines()[-1])


def start_spmd(program: str, devices: int, **variables: Any) -> subprocess.Popen:
    """Starts a program as `run_spmd` does."""
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA says at each compilation that GSPMD will be replaced one day
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [TESTS.parent, TESTS / "training"])),
    }
    code = f"import json\nVARIABLES = json.loads({json.dumps(variables)!r})\n{program}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
