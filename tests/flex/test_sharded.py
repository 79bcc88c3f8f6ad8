"""Inputs that are sharded over devices: the same results; the partitioner gathers what the kernels need."""

import os
import subprocess
import sys

SCRIPT = """
import numpy as np, torch, torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from xla_attention import create_block_mask, flex_attention

xr.use_spmd()
device = torch_xla.device()
assert xr.global_runtime_device_count() == 4
mesh = xs.Mesh(np.arange(4), (4,), ("data",))
generator = torch.Generator().manual_seed(0)
tensors = [torch.randn(4, 2, 40, 16, generator=generator) for _ in range(3)]

def run(sharded):
    q, k, v = (x.to(device) for x in tensors)
    table = torch.linspace(-1, 1, 80).to(device).requires_grad_()
    for x in (q, k, v) if sharded else ():
        xs.mark_sharding(x, mesh, ("data", None, None, None))
    q.requires_grad_()
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 40, 40, device)
    o = flex_attention(q, k, v, lambda s, b, h, q, kv: s + table[q - kv + 40] * (b + 1), block_mask)
    o.square().sum().backward()
    torch_xla.sync()
    return o.cpu(), q.grad.cpu(), table.grad.cpu()

for whole, sharded in zip(run(False), run(True)):
    assert (whole - sharded).norm() <= 1e-6 * whole.norm()
"""


def test_sharded_inputs():
    """In a process of its own: SPMD and the number of devices are set once."""
    environment = {**os.environ, "CPU_NUM_DEVICES": "4", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
