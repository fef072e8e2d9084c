"""What `envplan check` takes on trust: fields that nothing in the files recomputes.

A measurement cannot be proved, nor can what somebody asked for, the name of a planner, or what lies
in a file that this one refers to by a hash. Everything else that a file states is recomputed. A
test edits every field of every kind of file, and expects an error or the field's name here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_PLAN: Final = (
    "planner",
    "profile.name",
    "profile.path",
    "target.time_s",
    "target.peak_power_w",
    "job.min_dwell_s",
    "request.effort.polish_s",
    "request.effort.moves",
    "request.effort.ladder",
    "request.changes",
    "request.change_cost_j",
    "request.change_stall_s",
    "request.limits[].ramp_w_per_s",
    "request.limits[].window_s",
    "costs.currency",
    "costs.deadline_s",
    "costs.price.end_s",
    "costs.price.repeats",
    "costs.carbon.start_s",
    "costs.carbon.end_s",
    "costs.carbon.repeats",
    "predicted.robustness.probability",
)
#: Of a plan that uses the time that a straggler leaves, whose request had another deadline.
_ANSWERED_OTHERWISE: Final = ("request.deadline.slowdown",)
#: Fields of a frequency plan that its plan does not tell: GPUs, and what their drivers said, are as
#: users named them.
GPUS_AS_NAMED: Final = (
    "gpu",
    "clocks_source",
    "supported_clocks_mhz[]",
    "stage_gpus[].gpu",
    "stage_gpus[].clocks_source",
    "stage_gpus[].supported_clocks_mhz[]",
    "min_dwell_s",
    "ranks[].device",
)
_FREQUENCY_PLAN: Final = (
    *GPUS_AS_NAMED,
    "raised[].*",
    "switching.*",
    "switching.latency_by_mhz.*",
    "switching.times[][].waits_s[]",
    "switching.times[][].durations_s[]",
    "plan_sha256",
    "profile_sha256",
    "deadline_s",
    "iteration_time_s",
    "energy_j",
    "stage_energies[].planned_j",
    "stage_energies[].baseline_j",
    "stage_power[].highest_w",
    "stage_power[].profile_limit_w",
    "ranks[].operations[][]",
    "ranks[].configs[]",
    "ladder[].iteration_time_s",
    "ladder[].energy_j",
    "ladder[].frequencies_mhz[][]",
    "ladder[].configs[][]",
)
_SITE: Final = (
    "alternates",
    "jobs[].weight",
    "jobs[].money",
    "jobs[].may_pause",
    "jobs[].flexible",
    "jobs[].iterations",
    "intervals[].start_s",
    "intervals[].end_s",
    "intervals[].budget_w",
)
_SERVING_PLAN: Final = (
    "planner",
    "profile.name",
    "profile.path",
    "profile.source",
    "asked.gpus",
    "asked.slos.*.ttft_s",
    "asked.slos.*.tbt_s",
    "asked.merge",
    "asked.one_frequency",
    "asked.classes[].name",
    "asked.classes[].input_tokens",
    "asked.classes[].output_tokens",
    "asked.classes[].ttft_slo_s",
    "asked.classes[].tbt_slo_s",
    "asked.classes[].input_tokens_up_to",
    "asked.classes[].output_tokens_up_to",
    "predicted.power_lower_bound_w",
    "predicted.baseline.gpus",
    "predicted.baseline.power_w",
    "predicted.one_clock[].frequency_mhz",
    "predicted.one_clock[].gpus",
    "predicted.one_clock[].power_w",
    "predicted.one_clock[].is_highest",
    "pools[].groups[].ttft_s",
    "pools[].groups[].tbt_s",
)
_SERVING_CLOCKS: Final = (
    "plan_sha256",
    "profile_sha256",
    "gpu",
    "clocks_source",
    "gpus_per_node",
    "nodes",
    "instances[].instance",
    "instances[].pool",
    "instances[].serves[]",
    "instances[].planned_mhz",
    "instances[].clock_mhz",
    "instances[].load_tokens_s",
    "instances[].slo_proven",
)
_DAG: Final = (
    "operations[].id",
    "operations[].stage",
    "operations[].instruction",
    "operations[].microbatch",
    "operations[].chunk",
    "operations[].profile_stage",
    "operations[].after[]",
)
_SWEEP: Final = (
    "profile",
    "source",
    "stages",
    "microbatches",
    "schedule",
    "chunks",
    "planner",
    "target",
    "target_value",
    "p2p_latency_s",
    "gpus_per_stage",
    "replicas",
    "seed",
    "t_min_s",
    "t_star_s",
    "savings_percent",
    "slowdown_percent",
    "trace_s",
    "wall_s",
)
_POWER_LIMITS: Final = (
    "plan_sha256",
    "iteration_time_s",
    "energy_j",
    "clocks_iteration_time_s",
    "clocks_energy_j",
    "gpus[].stage",
    "gpus[].device",
    "gpus[].power_limit_w",
    "power.*.*",
    "clocks_power.*.*",
)
#: Of kinds that are measured or asked for as a whole: that they can be read is all there is to it.
_ALL: Final = ("*",)

#: Names of fields by kind of file; [] stands for the items of a list, * for any name.
NOT_PROVED: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": _PLAN,
    "frequency plan": _FREQUENCY_PLAN,
    "frontier": ("profile.name", "profile.path"),
    # Its rows agree with each other; which job they are of it does not say.
    "frontier table": ("iteration_time_s", "energy_j", "lower_bound_j"),
    "site plan": _SITE,
    "serving plan": _SERVING_PLAN,
    "serving clocks": _SERVING_CLOCKS,
    "DAG": _DAG,
    "sweep": _SWEEP,
    "power limits": _POWER_LIMITS,
    "power of jobs": _ALL,
    "order": _ALL,
    "journal of a sweep": _ALL,
    "part of a profile": _ALL,
    "jobs of a site": _ALL,
    "power over time": _ALL,
    "sidecar": _ALL,
    "profile": _ALL,
    "serving profile": _ALL,
    "Chrome trace": _ALL,
    "schedule": _ALL,
    "sweep configuration": _ALL,
    "list of request classes": _ALL,
    "run log": _ALL,
    "requests": _ALL,
    "replay over time": _ALL,
    "stragglers": _ALL,
    "rates": _ALL,
    "clocks": _ALL,
}


def fields_not_proved(kind: str, document: Any) -> tuple[str, ...]:
    """Names of fields that nothing proves in a document of a kind, as in NOT_PROVED."""
    patterns = NOT_PROVED[kind]
    if kind == "plan":
        target = document["target"]
        straggler_s = target.get("straggler_time_s")
        if straggler_s is not None and target.get("time_s") == straggler_s:
            patterns += _ANSWERED_OTHERWISE
    return patterns


def not_proved(patterns: tuple[str, ...], document: object, columns: Sequence[str]) -> list[str]:
    """The fields of a file that nothing proves; "*" if that is all of them.

    Args:
        patterns: names of fields that nothing proves, as in NOT_PROVED.
        document: its JSON value; None of a table.
        columns: of a table.
    """
    if patterns == _ALL:
        return list(_ALL)
    names = dict.fromkeys(columns if document is None else _field_names(document))
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    steps, expected = name.split("."), pattern.split(".")
    if len(steps) != len(expected):
        return False
    return all(want in ("*", step) for step, want in zip(steps, expected, strict=True))


def _field_names(value: object, name: str = "") -> Iterator[str]:
    """The names of a document's numbers, texts and truth values, once for each time they come."""
    if isinstance(value, dict):
        for key, field in value.items():
            yield from _field_names(field, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            yield from _field_names(item, f"{name}[]")
    else:
        yield name
