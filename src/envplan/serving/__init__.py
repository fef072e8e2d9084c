"""Inference fleets: frequency, parallelism and instance counts under latency SLOs.

After DynamoLLM (Stojkovic et al.): requests fall into nine classes, an instance of a model runs on
2, 4 or 8 GPUs at some clock, and the fleet that meets every SLO with the least power is looked for,
for one load (`exact_plan`, `hierarchical_plan`) or along a trace of requests (`simulate`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_HOME: Final = {
    "CLASSES": "classes",
    "ServingApplied": "apply",
    "ServingPlan": "plan",
    "ServingProfile": "profile",
    "Simulation": "simulation",
    "Slo": "classes",
    "Trace": "trace",
    "apply_serving_plan": "apply",
    "compare_policies": "policies",
    "exact_plan": "exact",
    "hierarchical_plan": "hierarchy",
    "hold_clocks": "apply",
    "simulate": "policies",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
