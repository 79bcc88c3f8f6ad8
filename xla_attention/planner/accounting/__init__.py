"""The time of a compiled step, instruction by instruction."""

from xla_attention.planner.accounting.network import Network
from xla_attention.planner.accounting.schedule import CAUSES, Account, Cost, account

__all__ = ["CAUSES", "Account", "Cost", "Network", "account"]
