"""What changes while training, as one thing to save and restore."""

from dataclasses import dataclass

import torch

from xla_attention.models.causal_lm import CausalLM


@dataclass
class TrainState:
    """A model in training.

    Attributes:
        step: optimizer steps taken.
        position: training sequences taken; with the seed it says which batch comes next.
    """

    model: CausalLM
    optimizer: torch.optim.Optimizer
    step: int = 0
    position: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def sync(device: torch.device) -> None:
    """On XLA, runs what has been recorded so far; it does not wait for the result."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def seed_random(seed: int, device: torch.device) -> None:
    """Seeds torch's generators on the host and on `device`."""
    torch.manual_seed(seed)
    if device.type == "xla":
        import torch_xla

        torch_xla.manual_seed(seed, device)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's generators on the host and on `device`."""
    state = {"host": torch.get_rng_state()}
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["device"] = torch.tensor(xm.get_rng_state(str(device)), dtype=torch.uint64)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Continues from what `random_state` gave."""
    torch.set_rng_state(state["host"])
    if device.type == "xla" and "device" in state:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["device"].numpy().item(), str(device))  # Tensor.item() ends at 2**63
