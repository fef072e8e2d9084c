"""A training iteration: a schedule or the user's own DAG, as one graph of operations.

Enters: a schedule's name and shape, a DAG file, the order of another framework (imports/). Leaves:
operations in execution order with what each waits for. Knows no profile; everything may import it.
"""

from __future__ import annotations

from envplan.pipeline.graph import Pipeline
from envplan.pipeline.operations import Operation
from envplan.pipeline.schedules import SCHEDULES, traits

__all__ = ["SCHEDULES", "Operation", "Pipeline", "traits"]
