"""Predicts or measures one point in a process of its own: reads it as JSON, prints what came of it as JSON.

python -m xla_attention.planner.sweep.worker < POINT
"""

import json
import sys
from pathlib import Path

from xla_attention.planner.outcome import Outcome, of_error, of_failure, of_plan
from xla_attention.planner.plan import PlanError, plan
from xla_attention.planner.sweep.measure import measure
from xla_attention.planner.topology import parse_topology
from xla_attention.training.config import TrainConfig


def answer(request: dict) -> Outcome:
    """What `plan` says of a point, or what is measured, or why there is nothing."""
    config, topology = TrainConfig.model_validate(request["config"]), parse_topology(request["topology"])
    if "measure" in request:
        try:
            return measure(config, topology, request["measure"]["steps"], Path(request["measure"]["profile"]))
        except (ValueError, OSError) as error:
            return of_error(config, topology, str(error))
    try:
        return of_plan(plan(config, topology))
    except PlanError as error:
        return of_failure(config, topology, error)


if __name__ == "__main__":
    print(answer(json.load(sys.stdin)).model_dump_json())
