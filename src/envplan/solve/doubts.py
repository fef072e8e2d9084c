"""Warnings about values that are probably not meant, such as a time in the wrong unit."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

import numpy as np

from envplan.errors import DoubtWarning
from envplan.units import UW_PER_W, duration_text, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.profile import Profile
    from envplan.request import Request

__all__ = ["doubt_job", "doubt_profile", "doubt_request"]

#: A GPU that runs or waits draws more than that, W; an iteration takes less than that, s.
_LEAST_W: Final = 10.0
_LONGEST_S: Final = 3600.0
#: No GPU draws that much, W.
_MOST_W: Final = 2000.0
#: The highest clock takes so many times as long as a lower one by more than noise as usual.
_SLOW_TOP: Final = 1.03


def doubt_job(frontier: Relaxation) -> None:
    """Warn of times and powers of a job that no training has."""
    problem, pipeline = frontier.problem, frontier.pipeline
    doubt_profile(frontier.profile)
    waiting = frontier.blocking_power_w
    if 0 < max(waiting) < _LEAST_W:
        _warn(f"a waiting GPU draws {max(waiting):g} W; GPUs draw {_LEAST_W:g} W at the very least")
    if frontier.min_time > _LONGEST_S:
        _warn(
            f"an iteration takes {duration_text(frontier.min_time)} at least; are the profile's "
            "times in seconds?"
        )
    latency = np.max(np.asarray(pipeline.p2p_latency, float), initial=0.0)
    longest = s_from_ns(int(max(table.time_ns[0] for table in problem.tables)))
    known = np.max(np.asarray(frontier.profile.metadata.job.p2p_latency_s, float), initial=0.0)
    if latency > max(longest, known):  # what a sidecar says was measured
        _warn(
            f"a transfer between stages takes {latency:g} s, longer than any operation at its "
            f"fastest ({longest:g} s); --p2p-latency takes units, as in 2ms"
        )


def doubt_profile(profile: Profile) -> None:
    """Warn of powers that no GPU draws while it computes, and of slow rows of the highest clock."""
    drawn = [
        (fj / ns / UW_PER_W, mhz, *key)
        for key, whole in ((key, parts.whole) for key, parts in profile.measured_costs.items())
        for mhz, (ns, *_), (fj, *_) in zip(whole.mhz, whole.time_ns, whole.energy_fj, strict=True)
        if mhz
    ]
    if not drawn:
        return
    (most, *_), (least, mhz, stage, instruction) = max(drawn), min(drawn)
    of = f"profile {profile.name}"
    if most < _LEAST_W:
        _warn(
            f"no operation of {of} draws {_LEAST_W:g} W on a GPU; are its energies in joules and "
            "its times in seconds?"
        )
    elif most > _MOST_W:
        _warn(
            f"an operation of {of} draws {most:,.0f} W; are its energies in joules, and of one GPU "
            "each?"
        )
    elif least < _LEAST_W:
        _warn(
            f"stage {stage} {instruction} at {mhz} MHz draws {least:g} W in {of}; was "
            "its energy measured?"
        )
    _doubt_highest_clocks(profile)


def _doubt_highest_clocks(profile: Profile) -> None:
    worst = 1.0
    for table in profile.tables():
        time, mhz, top = table.time_ns, table.frequency_mhz, table.max_frequency_option
        slower = int(time[top]) / int(time[0])
        if 0 < mhz[0] < mhz[top] and len(set(table.config)) == 1 and slower > worst:
            worst, slow, fast = slower, (table, top), int(mhz[0])
    if worst > _SLOW_TOP:
        table, top = slow
        _warn(
            f"stage {table.stage} {table.instruction} takes {100 * (worst - 1):.1f}% longer at its "
            f"highest clock, {table.frequency_mhz[top]} MHz, than at {fast} MHz in profile "
            f"{profile.name}; is that noise? Savings are against the highest clocks"
        )


def doubt_request(frontier: Relaxation, request: Request) -> None:
    """Warn of a target or a condition that no training has."""
    slowdown = request.deadline.slowdown
    if slowdown is not None and slowdown > 1:
        _warn(
            f"a slowdown of {100 * slowdown:g}% makes iterations {1 + slowdown:g} times as long as "
            "T_min; 2% is --slowdown 2 on the command line and slowdown=0.02 in Python"
        )
    longest = s_from_ns(int(max(table.time_ns[-1] for table in frontier.problem.tables)))
    if request.switch_latency_s > longest:
        _warn(
            f"clocks come {request.switch_latency_s:g} s after they are asked for, later than the "
            f"longest operation is over ({longest:g} s); --switch-latency takes units, as in 20ms"
        )
    gpus = frontier.num_gpus * frontier.pipeline.num_stages
    for limit in request.limits:
        for doubt in limit.doubts(gpus):
            _warn(doubt)


def _warn(text: str) -> None:
    warnings.warn(text, DoubtWarning, stacklevel=4)
