"""Inference fleets: frequency, parallelism and instance counts under latency SLOs.

After DynamoLLM (Stojkovic et al., HPCA 2025): requests fall into classes, an instance of a
model runs on 2, 4 or 8 GPUs at some clock, and the fleet that meets every SLO with the least power
is looked for, for one load (`plan_fleet`) or along a trace of requests (`simulate`).

Enters: a serving profile, loads or traces. Leaves: fleets, replays of fleets, frequency plans.
Pictures, checks and the command line may import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from envplan.serving.apply import ServingApplied, apply_serving_plan
    from envplan.serving.class_file import read_classes
    from envplan.serving.classes import CLASSES, RequestClass, RequestClasses, Slo
    from envplan.serving.exact_planner import exact_plan
    from envplan.serving.fleet_planning import Planning, plan_fleet
    from envplan.serving.hierarchical_planner import hierarchical_plan
    from envplan.serving.hold import hold_clocks
    from envplan.serving.plan import ServingPlan
    from envplan.serving.profile import ServingProfile
    from envplan.serving.replay import compare_policies, simulate
    from envplan.serving.settings import Settings
    from envplan.serving.simulation import Simulation
    from envplan.serving.trace import Trace

__all__ = [
    "CLASSES",
    "Planning",
    "RequestClass",
    "RequestClasses",
    "ServingApplied",
    "ServingPlan",
    "ServingProfile",
    "Settings",
    "Simulation",
    "Slo",
    "Trace",
    "apply_serving_plan",
    "compare_policies",
    "exact_plan",
    "hierarchical_plan",
    "hold_clocks",
    "plan_fleet",
    "read_classes",
    "simulate",
]

#: The module that defines each name, as in the imports above.
_HOME: Final = {
    "CLASSES": "classes",
    "Planning": "fleet_planning",
    "RequestClass": "classes",
    "RequestClasses": "classes",
    "ServingApplied": "apply",
    "ServingPlan": "plan",
    "ServingProfile": "profile",
    "Settings": "settings",
    "Simulation": "simulation",
    "Slo": "classes",
    "Trace": "trace",
    "apply_serving_plan": "apply",
    "compare_policies": "replay",
    "exact_plan": "exact_planner",
    "hierarchical_plan": "hierarchical_planner",
    "hold_clocks": "hold",
    "plan_fleet": "fleet_planning",
    "read_classes": "class_file",
    "simulate": "replay",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
