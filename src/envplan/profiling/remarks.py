"""What a user should know about the rows of a profile, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from envplan.profile import Profile

__all__ = ["describe_smoothing", "remarks"]

#: Of mixed-precision Adam: 16-bit weight; its gradient, both moments and a copy in 32 bits.
_BYTES_PER_PARAMETER: Final = 18


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
    if resets := extra.get("counter_resets"):
        notes.append(
            f"the energy counter was set back {resets} times; what it spoiled was measured again"
        )
    if untold := extra.get("throttle_untold"):
        notes.append(f"the driver does not tell why the clock is held back ({untold})")
    if throttled := extra.get("rows_throttled"):
        notes.append(f"the clock was held back during {throttled} rows; see the column throttle")
    if over := extra.get("rows_over_target_error"):
        notes.append(
            f"{over} rows did not reach the standard error asked for within --time-limit; see "
            "the columns time_std and energy_std"
        )
    if profile.blocking_power_w is not None:
        watts = sum(profile.blocking_power_w) / len(profile.blocking_power_w)
        kind = extra.get("blocking_power")
        how = f": blocking power {kind}" if kind else " (modelled)"
        notes.append(f"a GPU that waits draws {watts:.0f} W on average over the clocks{how}")
    if communication := extra.get("communication"):
        notes.append(str(communication))
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
