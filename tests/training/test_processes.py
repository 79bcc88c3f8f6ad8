"""Several processes, as on a pod slice: what can be run of them on one machine."""

import signal
import subprocess
import sys

import pytest

# Each process has devices of its own, and believes to be one of several.
START = """
import sys
import torch.distributed as dist
import torch_xla.runtime as xr

rank, processes, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
xr.is_spmd, xr.process_index, xr.process_count = lambda: True, lambda: rank, lambda: processes
"""
STEPS = """
import time
from xla_attention.training.interrupt import StopRequest

with StopRequest() as stop:
    step = 0
    stop.agree()
    while not stop.signal and step < 10**4:
        time.sleep(0.01 * (rank + 1))  # steps of different lengths
        step += 1
        stop.agree()
        if step == 3:
            print("ready", flush=True)
print(stop.signal, step)
"""


def start(program, processes, store):
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    arguments = ([str(n), str(processes), str(store)] for n in range(processes))
    return [subprocess.Popen([*command, *each], **pipes) for each in arguments]


def ends(running):
    outputs = [process.communicate() for process in running]
    assert all(process.returncode == 0 for process in running), outputs
    return [output.splitlines()[-1] for output, _ in outputs]


@pytest.mark.parametrize("told", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_signal_to_one_process_stops_all_of_them_after_the_same_step(tmp_path, told):
    running = start(START + STEPS, 3, tmp_path / "store")
    assert all(any(line == "ready\n" for line in process.stdout) for process in running)
    running[told].send_signal(signal.SIGTERM)
    stopped = ends(running)
    assert len(set(stopped)) == 1
    name, step = stopped[0].split()
    assert name == "SIGTERM" and 3 <= int(step) < 10**4
