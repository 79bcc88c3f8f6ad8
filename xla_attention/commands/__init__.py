"""The subcommands of `xla-attention`."""

from xla_attention.device import hide_torch_xla_choice

hide_torch_xla_choice()  # the commands say themselves which device they take
