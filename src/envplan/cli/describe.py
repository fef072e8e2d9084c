"""Jobs, plans and the ends of a frontier in words, as several commands print them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from envplan._io.words import significant

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.replay import Machine
    from envplan.solve import Frontier

ITERATION_TITLE: Final = "One iteration, all GPUs"

#: Where the power of waiting GPUs comes from.
_POWER_SOURCES: Final = {
    "profile": "from the profile",
    "argument": "as given",
    "default": "default, the profile does not say; --blocking-power sets it",
}


def modelled_title(title: str, *sources: str | None) -> str:
    """The title of a table; it says if figures come from a modelled profile.

    Args:
        title: without that.
        sources: of the profiles that figures come from.
    """
    return f"{title}, modelled" if "modelled" in sources else title


def describe_job(frontier: Frontier) -> str:
    """The profile, the job and the power of waiting GPUs, a line each.

    A third line names operations that the profile times and the pipeline leaves out.
    """
    from envplan.plotting.titles import job_line

    powers = [significant(power, 3) for power in sorted(frontier.blocking_power_w)]
    source = _POWER_SOURCES[frontier.blocking_power_source]
    lines = [
        f"{frontier.profile.describe()}; {job_line(frontier.pipeline, frontier.num_gpus)}",
        f"waiting GPUs draw {span(powers, ' to ')} W ({source})",
        *_unused_rows(frontier),
    ]
    return "\n".join(lines)


def _unused_rows(frontier: Frontier) -> list[str]:
    """A line about constant-time operations that only the profile has; none if there are none."""
    from envplan.pipeline.operations import EXTRAS

    profile, pipeline = frontier.profile, frontier.pipeline
    planned = {operation.instruction for operation in pipeline.operations}
    unused = [name for name in EXTRAS if name in profile.instructions and name not in planned]
    if not unused:
        return []
    hint = "the DAG file has none" if pipeline.schedule == "dag" else "--extra adds them"
    return [f"the profile's rows for {', '.join(unused)} are not used; {hint}"]


def describe_ends(frontier: Frontier) -> str:
    """T_min and T_star."""
    return (
        f"T_min {significant(frontier.min_time)} s (least time), "
        f"T_star {significant(frontier.min_energy_time)} s (least energy)"
    )


def config_counts(plan: Plan) -> dict[str, int]:
    """How many operations of a plan have each config; empty where profiles have no configs."""
    from envplan.profile import parse_clock_requests

    configs = [operation.config for operation in chain.from_iterable(plan.stages)]
    if not any(configs):
        return {}
    counts: Counter[str] = Counter()
    for config in configs:
        name = "by part" if parse_clock_requests(config) else config or "none"
        counts[name] += 1
    return dict(sorted(counts.items()))


def describe_configs(plan: Plan) -> list[str]:
    """A line with the number of operations of each config; none where there are no configs."""
    counts = config_counts(plan)
    if not counts:
        return []
    parts = [f"{name} {count}" for name, count in counts.items()]
    return [f"operations by config: {', '.join(parts)}"]


def span(ascending: Sequence[object], to: str = "-") -> str:
    """The first and the last of some values, as in `210-1740`; "" where there are none."""
    if not ascending:
        return ""
    lowest, highest = str(ascending[0]), str(ascending[-1])
    return lowest if lowest == highest else f"{lowest}{to}{highest}"


def describe_machine(machine: Machine) -> str:
    """How late clocks come and when they are asked for, in a phrase."""
    late_ms = machine.latency_ns / 1e6
    return (
        f"every clock comes {late_ms:g} ms after it is asked for, and is asked for "
        f"{machine.ask_in_words}"
    )
