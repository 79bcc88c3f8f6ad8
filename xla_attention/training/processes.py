"""The processes of a run: one a host, each with the devices of that host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def start_processes() -> None:
    """Joins this process with those of the other hosts, for checkpoints; does nothing on a single host.

    As PyTorch/XLA documents for SPMD: a gloo group on the hosts' CPUs, which finds its members through XLA.
    """
    if process_count() == 1:
        return
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401  registers init_method="xla://"

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="xla://")


def process_index() -> int:
    """This process's number, from 0."""
    import torch_xla.runtime as xr

    return xr.process_index() if xr.is_spmd() else 0


def process_count() -> int:
    """How many processes the run has."""
    import torch_xla.runtime as xr

    return xr.process_count() if xr.is_spmd() else 1


def barrier() -> None:
    """Waits until every process is here."""
    if process_count() > 1:
        import torch.distributed as dist

        dist.barrier()


class Agreement:
    """A number from each process, the highest of which all of them get, one call later.

    All processes make the same calls, say after each step. A call returns the highest of what they gave at
    the call before, which has travelled between the hosts meanwhile: nobody waits, but for a process that is
    a whole step behind. A process alone is answered at once.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._travelling: tuple[dist.Work, torch.Tensor] | None = None

    def highest(self, number: int) -> int:
        """What `number` comes to; 0 at the first call of several processes.

        Args:
            number: not negative.
        """
        if process_count() == 1:
            return number
        import torch
        import torch.distributed as dist

        if self._group is None:  # one of its own, as another thread writes checkpoints with the first
            self._group = dist.new_group(backend="gloo")
        before = 0
        if self._travelling:
            work, highest = self._travelling
            work.wait()
            before = int(highest)
        mine = torch.tensor(number)
        self._travelling = dist.all_reduce(mine, dist.ReduceOp.MAX, self._group, async_op=True), mine
        return before


def folder_of_process(out_dir: Path) -> Path:
    """Where this process reports: `out_dir` for the first, a folder in it for each of the others."""
    return out_dir / f"process-{process_index()}" if process_index() else out_dir
