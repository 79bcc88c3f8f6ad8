"""From a JAX function to a torch operator: lowered whole, cached, added to the torch_xla graph."""

from xla_attention.bridge.function import JaxFunction
from xla_attention.bridge.interning import intern_static, static_of
from xla_attention.bridge.lowering import lower, to_hlo
from xla_attention.bridge.sharding import Sharding

__all__ = ["JaxFunction", "Sharding", "intern_static", "lower", "static_of", "to_hlo"]
