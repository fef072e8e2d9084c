"""Noise in measured tables: when it is clear, how to take it out, and what it does to plans.

    python -m tools.sosp24 noise [PROFILE ...]

Physics gives a table two shapes. Over rising clocks the time of an operation never rises, and its
cost, energy less what the GPU would draw if it waited as long, falls to one valley and then rises.
A planner works on the lower hull of cost over time, so it picks out exactly the rows that are too
fast or too cheap by chance. Worst is the top of an A40: under the power limit neither clock nor
time change anything any more, and one row is 1% too fast by chance.

**When it is clear.** A step from one clock to the next is wrong if time rises or cost goes away
from the valley by more than rounding. One wrong step may be true. Noise is clear where most tables
of a profile have two or more: modelled tables and those that are rounded have none, tables
identified from many runs have them here and there, and raw sweeps have them everywhere.

**What is no noise.** The A40's tables of GPT-3's backward (960 MHz) and Bloom's forward (1050 MHz)
jump up by 3 to 6% from one clock to the next, and the rows on both sides are smooth: a dozen
clocks below the jump are faster than the clocks above it. Nobody knows why, but a plan that uses
them would have had it when this was measured. A curve through both sides makes gaps small because
it makes up options that are not there, and loses up to 5 of 25 percentage points of savings.

**How to take it out.** Split a table at its jumps. Replace each part by the nearest curve that
`envplan profile smooth` fits: convex time over the clock and convex energy over time, in
logarithms, by least absolute deviations, so that an outlier moves nothing but itself. Making time
monotone and cost one-valleyed alone leaves plateaus and steps.

**What remains.** Where a table jumps, there is nothing between the clock below the jump and clocks
far above it. The relaxation mixes the two; a plan can only as far as its stages may drift apart. On
the A40's GPT-3 gaps stay at 0.5 to 1.2% at no slowdown; with 12 microbatches a minute of CP-SAT
halves them, so part of it is the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan import Pipeline, Profile, trace_frontier
from envplan.profile import BLOCKING, OptionTable
from envplan.profiling.smoothing import smooth_curve
from tools.sosp24.clocks import replay_clocks

__all__ = [
    "Effect",
    "effect",
    "jumps",
    "noise_is_clear",
    "smooth_table",
    "smoothed",
    "wrong_steps",
]

FloatArray = npt.NDArray[np.float64]

#: A step against the shape by less than this part may come from rounding.
_ROUNDING: Final = 2e-4
#: So many wrong steps of a table are no accident.
_FEWEST: Final = 2
#: Rows below and above a jump that have to agree on it.
_BELOW, _ABOVE = 3, 5
#: A jump is this many times the noise of a row, and at least this part of the time.
_JUMP_NOISE: Final = 8.0
_JUMP: Final = 0.01


def wrong_steps(
    clocks: FloatArray, times: FloatArray, energies: FloatArray, waiting_w: float
) -> int:
    """How many steps of one operation's table go against physics.

    Args:
        clocks: MHz, all different, (n).
        times: s, (n).
        energies: J, (n).
        waiting_w: power of the waiting GPU.
    """
    rising = np.argsort(clocks)
    time, energy = times[rising], energies[rising]
    slower = np.diff(time) / time[1:] > _ROUNDING
    cost = energy - waiting_w * time
    valley = int(cost.argmin())
    change = np.diff(cost) / energy[1:]
    away = np.concatenate([change[:valley] > _ROUNDING, change[valley:] < -_ROUNDING])
    return int((slower | away).sum())


def noise_is_clear(profile: Profile) -> bool:
    """Whether most of a profile's tables with several clocks have steps against physics."""
    steps = [
        wrong_steps(*_arrays(table), _waiting(profile)[table.stage]) for table in _tables(profile)
    ]
    return bool(steps) and float(np.median(steps)) >= _FEWEST


def jumps(times: FloatArray) -> list[int]:
    """Where time jumps up with the clock and stays there.

    Each of the next five clocks takes longer than the usual one of the last three, though it should
    take less, and by far more than rows differ by chance. An outlier alone is no jump.

    Args:
        times: s, by ascending clock, (n).

    Returns:
        Indices of the last row below each jump, ascending.
    """
    log = np.log(times)
    steps = np.diff(log)
    bends = np.diff(steps)
    # A bend is made of three rows, with weights 1, -2 and 1.
    noise = 1.4826 * float(np.median(np.abs(bends - np.median(bends)))) / 6**0.5
    least = max(_JUMP_NOISE * noise, _JUMP)
    found = [
        (float(steps[k]), k)
        for k in range(_BELOW - 1, len(steps) - _ABOVE + 1)
        if log[k + 1 : k + 1 + _ABOVE].min() - np.median(log[k + 1 - _BELOW : k + 1]) > least
    ]
    taken: list[int] = []
    for _, k in sorted(found, reverse=True):
        if all(abs(k - other) >= _ABOVE for other in taken):
            taken.append(k)
    return sorted(taken)


def smooth_table(
    clocks: FloatArray, times: FloatArray, energies: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Times and energies of one operation with the noise taken out, between its jumps.

    Args:
        clocks: MHz, ascending, (n >= 3).
        times: s, (n).
        energies: J, (n).
    """
    bounds = [0, *(k + 1 for k in jumps(times)), len(clocks)]
    parts = [
        smooth_curve(*(one[first:last].tolist() for one in (clocks, times, energies)))
        for first, last in pairwise(bounds)
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def smoothed(profile: Profile) -> Profile:
    """The profile with the noise taken out of each table with several clocks."""
    rows: list[tuple[Any, ...]] = []
    for table in _tables(profile):
        clocks, times, energies = _arrays(table)
        smooth = smooth_table(clocks, times, energies)
        values = zip(clocks.astype(int).tolist(), *(one.tolist() for one in smooth), strict=True)
        rows += [(table.stage, table.instruction, *one) for one in values]
    top = max(row[2] for row in rows)
    rows += [(stage, BLOCKING, top, 1.0, power) for stage, power in enumerate(_waiting(profile))]
    return Profile.from_rows(rows, name=profile.name, metadata=profile.metadata)


@dataclass(frozen=True)
class Effect:
    """What noise does to a plan.

    Attributes:
        microbatches: of the job.
        slowdown: asked for, as a fraction.
        raw, smooth: certified gaps of plans made from the raw and from the smoothed tables.
        late: how much longer than it promises the smoothed plan takes on the raw tables; negative:
            shorter. A fraction.
        dearer: likewise, its energy.
    """

    microbatches: int
    slowdown: float
    raw: float
    smooth: float
    late: float
    dearer: float


def effect(
    profile: Profile, microbatches: Sequence[int], slowdowns: Sequence[float]
) -> Iterator[Effect]:
    """What the noise of a profile with one stage a rank does to its plans under 1F1B."""
    calm = smoothed(profile)
    for count in microbatches:
        pipeline = Pipeline("1f1b", profile.num_stages, count)
        raw, smooth = trace_frontier(pipeline, profile), trace_frontier(pipeline, calm)
        for slowdown in slowdowns:
            plan = smooth.plan(slowdown=slowdown)
            time, energy = replay_clocks(pipeline, profile, plan.frequencies)
            yield Effect(
                count,
                slowdown,
                raw.plan(slowdown=slowdown).gap,
                plan.gap,
                time / plan.iteration_time - 1,
                energy / (plan.energy / plan.job.num_gpus) - 1,
            )


def _tables(profile: Profile) -> list[OptionTable]:
    return [table for table in profile.tables() if len(table) >= 3 and table.frequency_mhz.all()]


def _arrays(table: OptionTable) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Clocks (MHz), ascending, times (s) and energies (J) of a table."""
    rising = np.argsort(table.frequency_mhz)
    clocks, times, energies = (
        one[rising].astype(np.float64)
        for one in (table.frequency_mhz, table.time_ns, table.energy_fj)
    )
    return clocks, times * 1e-9, energies * 1e-15


def _waiting(profile: Profile) -> Sequence[float]:
    assert profile.blocking_power_w is not None
    return profile.blocking_power_w
