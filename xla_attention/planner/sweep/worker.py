"""Predicts one point in a process of its own: reads it as JSON, prints what came of it as JSON.

python -m xla_attention.planner.sweep.worker < POINT
"""

import json
import sys

from xla_attention.planner.outcome import Outcome, of_failure, of_plan
from xla_attention.planner.plan import PlanError, plan
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig


def predict(request: dict) -> Outcome:
    """What `plan` says of a point, or why it says nothing."""
    config, topology = TrainConfig.model_validate(request["config"]), parse_topology(request["topology"])
    try:
        return of_plan(plan(config, topology))
    except PlanError as error:
        return of_failure(config, topology, error)


if __name__ == "__main__":
    print(predict(json.load(sys.stdin)).model_dump_json())
