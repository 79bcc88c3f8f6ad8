"""The processes of a run: one a host, each with the devices of that host."""

from pathlib import Path


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


def folder_of_process(out_dir: Path) -> Path:
    """Where this process reports: `out_dir` for the first, a folder in it for each of the others."""
    return out_dir / f"process-{process_index()}" if process_index() else out_dir
