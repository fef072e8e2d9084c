"""Inference fleets: frequency, parallelism and instance counts under latency SLOs.

After DynamoLLM (Stojkovic et al.): requests fall into nine classes, an instance of a model runs on
2, 4 or 8 GPUs at some clock, and the fleet that meets every SLO with the least power is looked for,
for one load (`exact_plan`, `hierarchical_plan`) or along a trace of requests (`simulate`).

Enters: a serving profile, loads or traces. Leaves: fleets, replays of fleets, frequency plans.
Pictures, checks and the command line may import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

#: The module that each public name stands in.
_HOME: Final = {
    "CLASSES": "classes",
    "Slo": "classes",
    "ServingProfile": "profile",
    "Trace": "trace",
    "Settings": "settings",
    "ServingPlan": "plan",
    "exact_plan": "planners",
    "hierarchical_plan": "planners",
    "Simulation": "simulation",
    "compare_policies": "policies",
    "simulate": "policies",
    "ServingApplied": "apply",
    "apply_serving_plan": "apply",
    "hold_clocks": "hold",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
