"""envplan takes the wasted joules out of pipeline-parallel training.

    import envplan

    profile = envplan.Profile.read_csv("profile.csv")
    pipeline = envplan.Pipeline("1f1b", num_stages=4, num_microbatches=32)
    frontier = envplan.trace_frontier(pipeline, profile)
    plan = frontier.plan(slowdown=0.02)
    plan.save("plan.json")

Names are imported when first used, so that `import envplan` costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would be an import
if TYPE_CHECKING:
    from envplan.check.files import check_file
    from envplan.check.plans import verify_plan
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.errors import DoubtWarning, EnvplanError, InputError, NoAnswerError
    from envplan.pipeline import SCHEDULES, Operation, Pipeline
    from envplan.pipeline.imports.megatron import pipeline_from_megatron
    from envplan.pipeline.imports.torch_csv import pipeline_from_torch
    from envplan.plan import Plan
    from envplan.plan.frontier_file import FrontierFile
    from envplan.planners import PLANNERS, advise, compare, forwards_ahead
    from envplan.profile import Profile, ProfileMetadata, builtin_profiles
    from envplan.request import Request
    from envplan.simulation.cluster import (
        ClusterReport,
        read_slowdowns,
        simulate_cluster,
        strong_scaling,
    )
    from envplan.simulation.iteration import Timeline, simulate
    from envplan.simulation.replicas import plan_replicas, replay_replicas
    from envplan.solve import Frontier, plan_from_clocks, trace_frontier
    from envplan.solve.savings import savings

    __version__: str

__all__ = [
    "PLANNERS", "SCHEDULES", "ClusterReport", "DoubtWarning", "EnvplanError",
    "FrequencyPlan", "Frontier", "FrontierFile", "InputError", "NoAnswerError",
    "Operation", "Pipeline", "Plan", "Profile", "ProfileMetadata", "Request", "Timeline",
    "__version__", "advise", "builtin_profiles", "check_file", "compare", "forwards_ahead",
    "pipeline_from_megatron", "pipeline_from_torch",
    "plan_from_clocks", "plan_replicas", "read_slowdowns", "replay_replicas",
    "savings", "simulate", "simulate_cluster", "strong_scaling", "trace_frontier",
    "verify_plan",
]  # fmt: skip

#: The module that defines each name, as in the imports above.
_HOME = {
    "ClusterReport": "envplan.simulation.cluster",
    "DoubtWarning": "envplan.errors",
    "EnvplanError": "envplan.errors",
    "FrequencyPlan": "envplan.enforce.freqplan",
    "Frontier": "envplan.solve",
    "FrontierFile": "envplan.plan.frontier_file",
    "InputError": "envplan.errors",
    "NoAnswerError": "envplan.errors",
    "Operation": "envplan.pipeline",
    "PLANNERS": "envplan.planners",
    "Pipeline": "envplan.pipeline",
    "Plan": "envplan.plan",
    "Profile": "envplan.profile",
    "ProfileMetadata": "envplan.profile",
    "Request": "envplan.request",
    "SCHEDULES": "envplan.pipeline",
    "Timeline": "envplan.simulation.iteration",
    "advise": "envplan.planners.advice",
    "builtin_profiles": "envplan.profile",
    "check_file": "envplan.check.files",
    "compare": "envplan.planners.comparison",
    "forwards_ahead": "envplan.planners",
    "pipeline_from_megatron": "envplan.pipeline.imports.megatron",
    "pipeline_from_torch": "envplan.pipeline.imports.torch_csv",
    "plan_from_clocks": "envplan.solve",
    "plan_replicas": "envplan.simulation.replicas",
    "read_slowdowns": "envplan.simulation.cluster",
    "replay_replicas": "envplan.simulation.replicas",
    "savings": "envplan.solve.savings",
    "simulate": "envplan.simulation.iteration",
    "simulate_cluster": "envplan.simulation.cluster",
    "strong_scaling": "envplan.simulation.cluster",
    "trace_frontier": "envplan.solve",
    "verify_plan": "envplan.check.plans",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("envplan")
    elif name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'envplan' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
