"""Summaries of a profile for its user: a table of its stages, and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from envplan.errors import InputError
from envplan.profile import Profile
from envplan.profile.memory import memory_by_rank
from envplan.profile.sidecar import LATENCY_UNKNOWN
from envplan.profiling.smoothing import Smoothing
from envplan.profiling.stages import SPLIT_BACKWARD
from envplan.profiling.training_job import BYTES_PER_PARAMETER
from envplan.units import j_from_10fj, s_from_ns

__all__ = [
    "StageSummary",
    "describe_smoothing",
    "energy_by_clock",
    "remarks",
    "summarize_profile",
]

#: What fields of a sidecar mean, where they are set.
_NOTES: Final = {
    "counter_resets": "the energy counter was set back {} times; what it spoiled was measured "
    "again",
    "throttle_untold": "the driver does not tell why the clock is held back ({})",
    "rows_throttled": "the clock was held back during {} rows; see the column throttle",
    "rows_over_target_error": "{} rows did not reach the standard error asked for within "
    "--time-limit; see the columns time_std and energy_std",
    LATENCY_UNKNOWN: "how late clocks come was not measured: {}",
    "communication": "{}",
}


@dataclass(frozen=True)
class StageSummary:
    """Time and energy of a stage over its clocks: its forward and its whole backward.

    Attributes:
        stage: 0-based.
        clocks: how many there are.
        highest: of them, MHz.
        lowest: of them, MHz.
        valley: the clock of the least energy, MHz.
        ends_below: whether there are rows below the valley.
        energy_at_highest: J.
        energy_at_valley: J.
        time_at_highest: s.
        time_at_valley: s.
    """

    stage: int
    clocks: int
    highest: int
    lowest: int
    valley: int
    ends_below: bool
    energy_at_highest: float
    energy_at_valley: float
    time_at_highest: float
    time_at_valley: float


def summarize_profile(profile: Profile) -> list[StageSummary]:
    """A summary of each stage, over the clocks that its forward and all its backward have."""
    return [_summarize_stage(profile, stage) for stage in range(profile.num_stages)]


def _summarize_stage(profile: Profile, stage: int) -> StageSummary:
    costs = _costs_by_clock(profile, stage)
    highest, lowest = max(costs), min(costs)
    valley = min(costs, key=lambda clock: costs[clock].energy_10fj)  # of equal ones the highest
    return StageSummary(
        stage=stage,
        clocks=len(costs),
        highest=highest,
        lowest=lowest,
        valley=valley,
        ends_below=valley > lowest,
        energy_at_highest=j_from_10fj(costs[highest].energy_10fj),
        energy_at_valley=j_from_10fj(costs[valley].energy_10fj),
        time_at_highest=s_from_ns(costs[highest].time_ns),
        time_at_valley=s_from_ns(costs[valley].time_ns),
    )


def energy_by_clock(profile: Profile, stage: int) -> dict[int, float]:
    """Energy of a stage's forward and whole backward, J, by clock, MHz."""
    costs = _costs_by_clock(profile, stage)
    return {clock: j_from_10fj(cost.energy_10fj) for clock, cost in costs.items()}


class _Cost(NamedTuple):
    """Time and energy of a stage's operations at one clock."""

    time_ns: int
    energy_10fj: int


def _costs_by_clock(profile: Profile, stage: int) -> dict[int, _Cost]:
    """Forward and whole backward together, by clock, the highest first.

    Raises:
        InputError: they have no clock in common.
    """
    is_whole = profile.has(stage, "backward")
    backward: tuple[str, ...] = ("backward",) if is_whole else SPLIT_BACKWARD
    operations = [
        {
            option.frequency_mhz: _Cost(option.time_ns, option.energy_10fj)
            for option in profile.table(stage, instruction).options()
        }
        for instruction in ("forward", *backward)
    ]
    common = set(operations[0]).intersection(*operations[1:])
    if not common:
        raise InputError(
            f"forward and {' and '.join(backward)} of stage {stage} have rows for no clock in "
            "common, so there is no energy of both to compare",
            path=profile.path,
        )
    costs = {}
    for clock in sorted(common, reverse=True):
        times_ns = [costs_of[clock].time_ns for costs_of in operations]
        energies_10fj = [costs_of[clock].energy_10fj for costs_of in operations]
        costs[clock] = _Cost(sum(times_ns), sum(energies_10fj))
    return costs


def remarks(profile: Profile) -> list[str]:
    """Sentences about a profile that its user should know."""
    extra = profile.metadata.extra
    sentences = []
    if profile.metadata.source == "modelled":
        sentences.append(
            "nothing was measured: the sidecar, .meta.json, says what the model assumes"
        )
    if num_parameters := extra.get("parameters"):
        sentences.append(_memory_remark(profile, num_parameters))
    if extra.get("energy_source") == "integrated power":
        sentences.append(
            "this GPU has no energy counter: energy is its power, sampled and summed up"
        )
    for name, sentence in _NOTES.items():
        if extra.get(name):
            sentences.append(sentence.format(extra[name]))
    if profile.blocking_power_w is not None:
        mean_w = sum(profile.blocking_power_w) / len(profile.blocking_power_w)
        kind = extra.get("blocking_power")
        origin = f": blocking power {kind}" if kind else " (modelled)"
        sentences.append(
            f"a GPU that waits draws {mean_w:.0f} W on average over the clocks{origin}"
        )
    if smoothed := extra.get("smoothed"):
        sentences.append(describe_smoothing(smoothed))
    return sentences


def _memory_remark(profile: Profile, num_parameters: int) -> str:
    """The memory that a GPU needs; what data-parallel replicas could share is not taken off."""
    billions = f"{num_parameters / 1e9:.4g} billion parameters"
    ranks = memory_by_rank(profile.pipeline(), profile)
    if ranks is None:
        model_gb = num_parameters * BYTES_PER_PARAMETER / 1e9
        stages_per_gpu = profile.metadata.job.chunks or 1
        gpu_gb = model_gb / profile.num_stages * stages_per_gpu / profile.metadata.gpus_per_stage
        return (
            f"{billions}: weights, gradients and Adam's state take about {gpu_gb:.3g} GB a GPU "
            "unless replicas or experts are spread further; activations come on top, and memory is "
            "not checked"
        )
    most = max(ranks, key=lambda rank: rank.total_gb)
    return (
        f"{billions}: weights, gradients and Adam's state take about {most.model_bytes / 1e9:.3g} "
        "GB of the GPU that needs most, unless replicas or experts are spread further, and "
        f"activations {most.activation_bytes / 1e9:.3g} GB with {most.microbatches_in_flight} "
        "microbatches in flight"
    )


def describe_smoothing(smoothed: Mapping[str, object]) -> str:
    """How far smoothing moved the rows of a profile, in a line.

    Args:
        smoothed: the sidecar's field of that name.
    """
    smoothing = Smoothing.from_sidecar(smoothed)
    if not smoothing.rows_moved:
        return "smoothed: no row moved, every operation's curves have their shape already"
    return (
        f"smoothed: {smoothing.rows_moved} rows moved, times by up to "
        f"{100 * smoothing.largest_change_of_time:.2g}%, energies by up to "
        f"{100 * smoothing.largest_change_of_energy:.2g}%; raw_time and raw_energy hold what was "
        "measured"
    )
