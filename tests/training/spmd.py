"""Programs on several virtual devices. SPMD is a setting of a whole process: each runs in its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def run_spmd(program: str, devices: int, **variables: Any) -> Any:
    """Runs a program and returns the JSON that its last line prints.

    Args:
        program: Python; `VARIABLES` in it are `variables`.
        devices: virtual CPU devices.
    """
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
