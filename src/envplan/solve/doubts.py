"""Warnings about values that are probably not meant, such as a time in the wrong unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from envplan.errors import warn_of_doubt
from envplan.units import POWER_UNITS_PER_W, duration_text, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.profile import OptionTable, Profile
    from envplan.request import Request

__all__ = ["doubt_job", "doubt_profile", "doubt_request"]

#: A GPU that runs or waits draws more than that.
_MIN_POWER_W: Final = 10.0
#: No GPU draws that much.
_MAX_POWER_W: Final = 2000.0
#: Whoever asks for a slowdown asks for more than that, as a fraction.
_LEAST_SLOWDOWN: Final = 0.0005
#: An iteration takes less than that.
_MAX_ITERATION_S: Final = 3600.0
#: The highest clock takes so many times as long as a lower one by more than noise as usual.
_MAX_TOP_CLOCK_SLOWDOWN: Final = 1.03


def doubt_job(frontier: Relaxation) -> None:
    """Warn of times and powers of a job that no training has."""
    doubt_profile(frontier.profile)
    waiting_w = max(frontier.blocking_power_w)
    if 0 < waiting_w < _MIN_POWER_W:
        warn_of_doubt(
            f"a waiting GPU draws {waiting_w:g} W; GPUs draw {_MIN_POWER_W:g} W at the very least"
        )
    if frontier.min_time > _MAX_ITERATION_S:
        warn_of_doubt(
            f"an iteration takes {duration_text(frontier.min_time)} at least; are the profile's "
            "times in seconds?"
        )
    if (transfers := _long_transfers(frontier)) is not None:
        warn_of_doubt(transfers)


def _long_transfers(frontier: Relaxation) -> str | None:
    """The warning of transfers longer than any operation, unless they were measured so."""
    measured = frontier.profile.metadata.job.p2p_latency_s
    measured_s = np.max(np.asarray(measured, float), initial=0.0)
    transfer_s = np.max(np.asarray(frontier.pipeline.p2p_latency, float), initial=0.0)
    fastest_options_ns = [int(table.time_ns[0]) for table in frontier.problem.tables]
    longest_s = s_from_ns(max(fastest_options_ns))
    if transfer_s <= max(longest_s, measured_s):
        return None
    return (
        f"a transfer between stages takes {transfer_s:g} s, longer than any operation at its "
        f"fastest ({longest_s:g} s); --p2p-latency takes units, as in 2ms"
    )


class _MeasuredPower(NamedTuple):
    """The power of an operation at a clock, as measured."""

    power_w: float
    frequency_mhz: int
    stage: int
    instruction: str


def doubt_profile(profile: Profile) -> None:
    """Warn of powers that no GPU draws while it computes, and of slow highest clocks."""
    powers = _measured_powers(profile)
    if not powers:
        return
    highest, lowest = max(powers), min(powers)
    if highest.power_w < _MIN_POWER_W:
        warn_of_doubt(
            f"no operation of profile {profile.name} draws {_MIN_POWER_W:g} W on a GPU; are its "
            "energies in joules and its times in seconds?"
        )
    elif highest.power_w > _MAX_POWER_W:
        warn_of_doubt(
            f"an operation of profile {profile.name} draws {highest.power_w:,.0f} W; are its "
            "energies in joules, and of one GPU each?"
        )
    elif lowest.power_w < _MIN_POWER_W:
        warn_of_doubt(
            f"stage {lowest.stage} {lowest.instruction} at {lowest.frequency_mhz} MHz draws "
            f"{lowest.power_w:g} W in profile {profile.name}; was its energy measured?"
        )
    _doubt_highest_clocks(profile)


def _measured_powers(profile: Profile) -> list[_MeasuredPower]:
    """Powers of all measured operations that control a clock."""
    powers = []
    for (stage, instruction), costs in profile.measured_costs.items():
        whole = costs.whole
        for mhz, time_ns, energy_10fj in zip(
            whole.frequency_mhz, whole.time_ns, whole.energy_10fj, strict=True
        ):
            if mhz:
                power_w = energy_10fj[0] / time_ns[0] / POWER_UNITS_PER_W
                powers.append(_MeasuredPower(power_w, mhz, stage, instruction))
    return powers


def _doubt_highest_clocks(profile: Profile) -> None:
    """Warn of the operation that loses most time at its highest clock, if that is not noise."""
    slowest = max(profile.tables(), key=_top_clock_slowdown)
    slowdown = _top_clock_slowdown(slowest)
    if slowdown > _MAX_TOP_CLOCK_SLOWDOWN:
        top = slowest.max_frequency_option
        warn_of_doubt(
            f"stage {slowest.stage} {slowest.instruction} takes {100 * (slowdown - 1):.1f}% longer "
            f"at its highest clock, {slowest.frequency_mhz[top]} MHz, than at "
            f"{slowest.frequency_mhz[0]} MHz in profile {profile.name}; is that noise? Savings are "
            "against the highest clocks"
        )


def _top_clock_slowdown(table: OptionTable) -> float:
    """How many times as long the highest clock takes as the fastest one; 1 where they compare ill.

    Clocks of operations with several configs, or without clock control, do not compare.
    """
    fastest, top = 0, table.max_frequency_option
    has_slower_clock = 0 < table.frequency_mhz[fastest] < table.frequency_mhz[top]
    if not has_slower_clock or len(set(table.config)) > 1:
        return 1.0
    return int(table.time_ns[top]) / int(table.time_ns[fastest])


def doubt_request(frontier: Relaxation, request: Request) -> None:
    """Warn of a target or a condition that no training has."""
    slowdown = request.deadline.slowdown
    if slowdown is not None and 0 < slowdown < _LEAST_SLOWDOWN:
        warn_of_doubt(
            f"a slowdown of {100 * slowdown:g}% is next to none; 1% is --slowdown 1 on the command "
            "line and slowdown=0.01 in Python"
        )
    if slowdown is not None and slowdown >= 1:
        warn_of_doubt(
            f"a slowdown of {100 * slowdown:g}% makes iterations {1 + slowdown:g} times as long as "
            "T_min; 2% is --slowdown 2 on the command line and slowdown=0.02 in Python"
        )
    slowest_options_ns = [int(table.time_ns[-1]) for table in frontier.problem.tables]
    longest_s = s_from_ns(max(slowest_options_ns))
    is_measured = request.switch_latency_s == frontier.profile.measured_latency_s
    if request.switch_latency_s > longest_s and not is_measured:
        warn_of_doubt(
            f"clocks come {request.switch_latency_s:g} s after they are asked for, later than the "
            f"longest operation is over ({longest_s:g} s); --switch-latency takes units, as in 20ms"
        )
    num_gpus = frontier.num_gpus * frontier.pipeline.num_stages
    for limit in request.limits:
        for doubt in limit.doubts(num_gpus):
            warn_of_doubt(doubt)
