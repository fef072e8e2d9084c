"""What a user should know about the rows of a profile: a table of its stages, and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from envplan.errors import InputError
from envplan.profile import Profile
from envplan.units import j_from_fj, s_from_ns

__all__ = [
    "StageSummary",
    "describe_smoothing",
    "energy_by_clock",
    "remarks",
    "summarize_profile",
]

#: Of mixed-precision Adam: 16-bit weight; its gradient, both moments and a copy in 32 bits.
_BYTES_PER_PARAMETER: Final = 18
#: What fields of a sidecar mean, where they are set.
_NOTES: Final = {
    "counter_resets": "the energy counter was set back {} times; what it spoiled was measured "
    "again",
    "throttle_untold": "the driver does not tell why the clock is held back ({})",
    "rows_throttled": "the clock was held back during {} rows; see the column throttle",
    "rows_over_target_error": "{} rows did not reach the standard error asked for within "
    "--time-limit; see the columns time_std and energy_std",
    "communication": "{}",
}


@dataclass(frozen=True)
class StageSummary:
    """What a profile says about a stage, over its forward and its backward or backward's parts.

    Attributes:
        stage: 0-based.
        clocks: how many there are.
        highest, lowest: of them, MHz.
        valley: the clock of the least energy, MHz.
        ends_below: whether there are rows below the valley.
        energy_at_highest, energy_at_valley: J.
        time_at_highest, time_at_valley: s.
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
    found = []
    for stage in range(profile.num_stages):
        sums = _sums(profile, stage)
        highest, lowest = max(sums), min(sums)
        valley = min(sums, key=lambda clock: sums[clock][1])  # of equal ones the highest
        found.append(
            StageSummary(
                stage=stage,
                clocks=len(sums),
                highest=highest,
                lowest=lowest,
                valley=valley,
                ends_below=valley > lowest,
                energy_at_highest=j_from_fj(sums[highest][1]),
                energy_at_valley=j_from_fj(sums[valley][1]),
                time_at_highest=s_from_ns(sums[highest][0]),
                time_at_valley=s_from_ns(sums[valley][0]),
            )
        )
    return found


def energy_by_clock(profile: Profile, stage: int) -> dict[int, float]:
    """Energy of a stage's forward and whole backward, J, by clock, MHz."""
    return {clock: j_from_fj(energy) for clock, (_, energy) in _sums(profile, stage).items()}


def _sums(profile: Profile, stage: int) -> dict[int, tuple[int, int]]:
    """Time (ns) and energy (fJ) of forward and whole backward, by clock, the highest first.

    Raises:
        InputError: they have no clock in common.
    """
    whole = profile.has(stage, "backward")
    backward = ("backward",) if whole else ("backward_input", "backward_weight")
    options = [
        {clock: (ns, fj) for clock, _, ns, fj in profile.table(stage, part).options()}
        for part in ("forward", *backward)
    ]
    clocks = sorted(set(options[0]).intersection(*options[1:]), reverse=True)
    if not clocks:
        raise InputError(
            f"forward and {' and '.join(backward)} of stage {stage} have rows for no clock in "
            "common, so there is no energy of both to compare",
            path=profile.path,
        )
    return {
        clock: (sum(one[clock][0] for one in options), sum(one[clock][1] for one in options))
        for clock in clocks
    }


def remarks(profile: Profile) -> list[str]:
    """What a user should know about the rows."""
    extra = profile.metadata.extra
    notes = []
    if profile.metadata.source == "modelled":
        notes.append("nothing was measured: the sidecar, .meta.json, says what the model assumes")
    if count := extra.get("parameters"):
        # What data-parallel replicas could share of it is not taken off.
        held = count * _BYTES_PER_PARAMETER / profile.num_stages / 1e9
        gpus = profile.metadata.gpus_per_stage
        notes.append(
            f"{count / 1e9:.4g} billion parameters: weights, gradients and Adam's state take about "
            f"{held * (profile.metadata.job.chunks or 1) / gpus:.3g} GB a GPU unless replicas or "
            "experts are spread further; activations come on top, and memory is not checked"
        )
    if extra.get("energy_source") == "integrated power":
        notes.append("this GPU has no energy counter: energy is its power, sampled and summed up")
    notes += [text.format(extra[name]) for name, text in _NOTES.items() if extra.get(name)]
    if profile.blocking_power_w is not None:
        watts = sum(profile.blocking_power_w) / len(profile.blocking_power_w)
        kind = extra.get("blocking_power")
        how = f": blocking power {kind}" if kind else " (modelled)"
        notes.append(f"a GPU that waits draws {watts:.0f} W on average over the clocks{how}")
    if smoothed := extra.get("smoothed"):
        notes.append(describe_smoothing(smoothed))
    return notes


def describe_smoothing(said: Mapping[str, Any]) -> str:
    """What the sidecar says of a smoothed profile, in a line."""
    if not said["rows_moved"]:
        return "smoothed: no row moved, every operation's curves have their shape already"
    return (
        f"smoothed: {said['rows_moved']} rows moved, times by up to "
        f"{100 * said['largest_change_of_time']:.2g}%, energies by up to "
        f"{100 * said['largest_change_of_energy']:.2g}%; raw_time and raw_energy hold what was "
        "measured"
    )
