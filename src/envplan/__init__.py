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
    from envplan.check import check_file
    from envplan.cluster import ClusterReport, read_slowdowns, simulate_cluster, strong_scaling
    from envplan.costs.spending import savings
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.errors import DoubtWarning, EnvplanError, InputError, NoAnswerError
    from envplan.frontier.mincut import UNLIMITED, MinimumCut, minimum_cut
    from envplan.frontier_file import FrontierFile
    from envplan.pipeline import SCHEDULES, Operation, Pipeline
    from envplan.plan import Plan
    from envplan.planners import PLANNERS, advise, compare, forwards_ahead
    from envplan.profile import Profile, ProfileMetadata, builtin_profiles
    from envplan.replicas import plan_replicas, replay_replicas
    from envplan.request import Request
    from envplan.simulation import Timeline, simulate
    from envplan.solve import Frontier, plan_from_clocks, trace_frontier
    from envplan.verify import verify_plan

    __version__: str

__all__ = [
    "PLANNERS", "SCHEDULES", "UNLIMITED", "ClusterReport", "DoubtWarning", "EnvplanError",
    "FrequencyPlan", "Frontier", "FrontierFile", "InputError", "MinimumCut", "NoAnswerError",
    "Operation", "Pipeline", "Plan", "Profile", "ProfileMetadata", "Request", "Timeline",
    "__version__", "advise", "builtin_profiles", "check_file", "compare", "forwards_ahead",
    "minimum_cut", "plan_from_clocks", "plan_replicas", "read_slowdowns", "replay_replicas",
    "savings", "simulate", "simulate_cluster", "strong_scaling", "trace_frontier",
    "verify_plan",
]  # fmt: skip

#: Where each name is defined, as in the imports above.
_HOME = {
    name: f"envplan.{module}"
    for module, names in {
        "check": "check_file",
        "cluster": "ClusterReport read_slowdowns simulate_cluster strong_scaling",
        "costs.spending": "savings",
        "enforce.freqplan": "FrequencyPlan",
        "errors": "DoubtWarning EnvplanError InputError NoAnswerError",
        "frontier.mincut": "MinimumCut UNLIMITED minimum_cut",
        "frontier_file": "FrontierFile",
        "pipeline": "Operation Pipeline SCHEDULES",
        "plan": "Plan",
        "planners": "PLANNERS forwards_ahead",
        "planners.comparison": "advise compare",
        "profile": "Profile ProfileMetadata builtin_profiles",
        "replicas": "plan_replicas replay_replicas",
        "request": "Request",
        "simulation": "Timeline simulate",
        "solve": "Frontier plan_from_clocks trace_frontier",
        "verify": "verify_plan",
    }.items()
    for name in names.split()
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
