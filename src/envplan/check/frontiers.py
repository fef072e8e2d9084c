"""The proof of a frontier file: its plans replayed, its curve traced again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from envplan._io.documents import check_stated
from envplan.errors import InputError
from envplan.plan.build import check_cost, gap_over
from envplan.plan.frontier_file import Breakpoints, FrontierFile, Row
from envplan.plan.model import Baseline
from envplan.solve import Frontier
from envplan.units import FINER_UNITS_TOLERANCE

#: How far stated numbers may lie from their recomputation, relatively.
_TOLERANCE: Final = 1e-9

#: Percents are small differences of large numbers.
_PERCENT_TOLERANCE: Final = 1e-9


def check_rows(rows: Sequence[Row]) -> list[str]:
    """Prove that rows are a frontier and agree with themselves.

    Returns:
        A sentence for everything that was proved.

    Raises:
        InputError: the first thing that is not so; plans count from 1.
    """
    for number, row in enumerate(rows, start=1):
        _check_row(f"plan {number}", row)
    for number, (faster, slower) in enumerate(pairwise(rows), start=2):
        is_slower = faster.iteration_time_s < slower.iteration_time_s
        if not (is_slower and faster.energy_j > slower.energy_j):
            raise InputError(f"plan {number} is not both slower and cheaper than the one before it")
    _check_percents(rows)
    worst = max(row.gap for row in rows)
    return [
        f"{len(rows)} plans, each slower and cheaper than the one before",
        f"every lower bound is at most the energy; the largest gap is {100 * worst:.4f}%",
        "gaps and average powers follow from times and energies, percents from one baseline",
    ]


def _check_row(name: str, row: Row) -> None:
    """Check that a plan's bound, gap and average power go with its time and energy.

    Raises:
        InputError: one does not.
    """
    if row.lower_bound_j > row.energy_j:
        raise InputError(f"{name}: lower_bound_j lies above energy_j")
    check_stated(f"{name}: gap", row.gap, gap_over(row.energy_j, row.lower_bound_j), _TOLERANCE)
    stated_j = row.average_power_w * row.iteration_time_s
    check_stated(f"{name}: average_power_w x time", stated_j, row.energy_j, _TOLERANCE)


def _check_percents(rows: Sequence[Row], baseline: Baseline | None = None) -> None:
    """Check slowdowns and savings against a baseline; default: the one that the first row means.

    Raises:
        InputError: one is another.
    """
    first = rows[0]
    if baseline is None:
        if first.slowdown_percent <= -100 or first.savings_percent >= 100:
            raise InputError("plan 1: no baseline has such a slowdown and such savings")
        time_s = first.iteration_time_s / (1 + first.slowdown_percent / 100)
        energy_j = first.energy_j / (1 - first.savings_percent / 100)
    else:
        time_s, energy_j = baseline.iteration_time_s, baseline.energy_j
    for number, row in enumerate(rows, start=1):
        slowdown = 100 * (row.iteration_time_s / time_s - 1)
        savings = 100 * (1 - row.energy_j / energy_j)
        for name, stated, true in (
            ("slowdown_percent", row.slowdown_percent, slowdown),
            ("savings_percent", row.savings_percent, savings),
        ):
            if not math.isclose(stated, true, rel_tol=_TOLERANCE, abs_tol=_PERCENT_TOLERANCE):
                raise InputError(f"plan {number}: {name} is {stated!r}; recomputed it is {true!r}")


def _check_breakpoints(name: str, stated: Breakpoints, true: Breakpoints) -> None:
    """Check that a curve is the one that was traced again.

    Slopes are rounded down to whole units. Those of envplan 0.1 were finer, so its files may tell
    two breakpoints apart where there is one now.

    Raises:
        InputError: it is another; says where.
    """
    if len(stated.energy_j) == len(true.energy_j):
        times_s, true_times_s = stated.iteration_time_s, true.iteration_time_s
        check_stated(f"{name}.iteration_time_s", times_s, true_times_s, _TOLERANCE)
        check_stated(f"{name}.energy_j", stated.energy_j, true.energy_j, FINER_UNITS_TOLERANCE)
        return
    for curve, other in ((stated, true), (true, stated)):
        on_other = np.interp(curve.iteration_time_s, other.iteration_time_s, other.energy_j)
        check_stated(f"{name}.energy_j", curve.energy_j, on_other.tolist(), FINER_UNITS_TOLERANCE)


def check_curve(file: FrontierFile, frontier: Frontier) -> list[str]:
    """Prove that the curve of a file is the one traced again, and its plans what they state.

    The curve is proved to 2e-7, the rounding of slopes; the plans' times to the nanosecond.

    Raises:
        InputError: it is not; says where.
    """
    # Only what does not depend on the plans is compared: any plan will do for them.
    any_plan = [frontier.plan(switch_latency=0.0)]
    slower = None if file.slower is None else any_plan
    expected = FrontierFile.from_plans(frontier, any_plan, slower)
    for name in ("t_min_s", "t_star_s"):
        check_stated(name, getattr(file, name), getattr(expected, name), _TOLERANCE)
    tolerance = _TOLERANCE if file.job.is_in_whole_units else FINER_UNITS_TOLERANCE
    check_stated("baseline", file.baseline, expected.baseline, tolerance)
    _check_breakpoints("breakpoints", file.breakpoints, expected.breakpoints)
    rows = list(file.plans)
    if file.slower is not None and expected.slower is not None:
        _check_breakpoints(
            "slower.breakpoints", file.slower.breakpoints, expected.slower.breakpoints
        )
        rows += file.slower.plans
    _check_percents(rows, file.baseline)
    for number, row in enumerate(rows, start=1):
        name = f"plan {number}"
        _check_row(name, row)
        replay = row.replayed(name, frontier.problem)
        check_cost(f"{name}: ", row, replay, file.job)
        if row.iteration_time_s < frontier.min_time:
            raise InputError(f"{name}: faster than T_min")
        least_j = frontier.energy_at(row.iteration_time_s)
        if row.lower_bound_j > least_j * (1 + FINER_UNITS_TOLERANCE):
            raise InputError(f"{name}: lower_bound_j lies above the curve")
    return [
        "every plan's time and energy are those of its clocks, replayed",
        f"T_min, T_star, the baseline and all {len(file.breakpoints.energy_j)} breakpoints are "
        "those of the frontier traced again",
    ]
