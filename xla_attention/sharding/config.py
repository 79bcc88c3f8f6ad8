"""The `sharding` section of a run's configuration."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pallas_kernels.context_parallel.layout import ContextMethod, SequenceLayout
from xla_attention.sharding.mesh import Axis
from xla_attention.sharding.strategy import Strategy, load_strategy


class ShardingConfig(BaseModel):
    """The `sharding` section of a run's configuration.

    Attributes:
        strategy: a name (`replicated`, `fsdp`, `2d`, `hsdp`, `fsdp_context`, `auto`) or a YAML file. `none`:
            one device computes.
        mesh: sizes of axes, and slices, in place of the strategy's.
        context_method, context_layout: in place of the strategy's `context`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: str = "none"
    mesh: dict[Axis | Literal["slices"], Annotated[int, Field(ge=-1)]] = {}
    context_method: ContextMethod | None = None
    context_layout: SequenceLayout | None = None

    def load(self) -> Strategy:
        """The strategy, with what this section changes of it.

        Raises:
            ShardingError: no such strategy, or it cannot be used.
        """
        strategy = load_strategy(self.strategy)
        given = {"method": self.context_method, "layout": self.context_layout}
        context = strategy.context.model_copy(update={k: v for k, v in given.items() if v is not None})
        return strategy.model_copy(update={"mesh": strategy.mesh.updated(self.mesh), "context": context})
