"""What a training iteration runs: a schedule or the user's own DAG, as one graph of operations."""

from __future__ import annotations

from envplan.pipeline.graph import Pipeline
from envplan.pipeline.schedules import SCHEDULES, Operation, traits

__all__ = ["SCHEDULES", "Operation", "Pipeline", "traits"]
