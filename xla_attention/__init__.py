"""Fast, trustworthy attention for PyTorch models on Cloud TPU: Pallas kernels as torch_xla operators."""

from typing import TYPE_CHECKING, Any

from xla_attention.versions import check_versions

check_versions()

if TYPE_CHECKING:
    from xla_attention.device import pick_device
    from xla_attention.ops import flash_attention

__all__ = ["flash_attention", "pick_device"]


def __getattr__(name: str) -> Any:
    """Imports torch and JAX on first use of what needs them: ``import xla_attention`` itself is quick."""
    if name == "flash_attention":
        from xla_attention.ops import flash_attention

        return flash_attention
    if name == "pick_device":
        from xla_attention.device import pick_device

        return pick_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
