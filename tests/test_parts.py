"""Operations made of parts: composition against brute force, against parts as operations of their
own, and against the replay; files, plans and bad input."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from envplan.pipeline import Pipeline
from envplan.profile import ByParts, OptionTable, Part, Profile, cost_curve, pieces
from envplan.profile.options import option_table
from envplan.profile.parts import by_parts, changes_of, one_clock
from envplan.replay import Machine, Problem

CLOCKS = (900, 1200, 1500)
EXACT = ByParts(within=0.0)


@st.composite
def part_tables(draw: st.DrawFn, most_parts: int = 4) -> list[Part]:
    """Parts with noisy rows at the same clocks, some of constant time."""
    count = draw(st.integers(1, most_parts))
    clocks = CLOCKS[: draw(st.integers(1, len(CLOCKS)))]
    parts = []
    for p in range(count):
        constant = p > 0 and draw(st.booleans()) and draw(st.booleans())
        rows = [
            (draw(st.integers(1, 40)), draw(st.integers(0, 60)), -mhz, "")
            for mhz in ((0,) if constant else clocks)
        ]
        parts.append(Part(f"p{p}", option_table(0, "forward", rows)))
    return parts


def pareto(points: set[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for time, energy in sorted(points):
        if not kept or energy < kept[-1][1]:
            kept.append((time, energy))
    return kept


def best(table: OptionTable) -> list[tuple[int, int]]:
    return pareto(set(zip(table.time_ns.tolist(), table.energy_fj.tolist(), strict=True)))


def all_choices(parts: list[Part], latency: int, hold: int) -> set[tuple[int, int]]:
    """Time and energy of every choice of a clock for each part that the rules allow, one by one."""
    clocks = sorted({m for part in parts for m in part.table.frequency_mhz.tolist() if m}) or [0]
    rows = [{m: (t, e) for m, _, t, e in part.table.rows()} for part in parts]
    found = set()
    for chosen in itertools.product(clocks, repeat=len(parts)):
        now, used, asked_at, allowed = 0, 0, 0, True
        for p, mhz in enumerate(chosen):
            time, energy = rows[p].get(mhz, rows[p].get(0))
            old = chosen[p - 1] if p else mhz
            if mhz != old and (latency or hold):
                due = hold if asked_at else max(latency, hold)
                whole, before = rows[p].get(old, (0, 0))
                allowed &= 0 not in rows[p] and whole >= latency and now - asked_at >= due
                asked_at = now or asked_at
                if allowed and latency:
                    left = -(-(whole - latency) * time // whole)
                    first = (2 * before * latency + whole) // (2 * whole)
                    energy = first + (2 * energy * left + time) // (2 * time)
                    time = latency + left
            now, used = now + time, used + energy
        if allowed and (not asked_at or now - asked_at >= hold):
            found.add((now, used))
    return found


@given(part_tables())
def test_options_at_no_latency_are_all_sums_that_nothing_beats(parts: list[Part]) -> None:
    table = by_parts(one_clock(0, "forward", parts), parts, EXACT)
    assert best(table) == pareto(all_choices(parts, 0, 0))


@given(part_tables(), st.integers(0, 30), st.integers(0, 60))
def test_late_and_held_clocks_leave_what_trying_all_choices_finds(
    parts: list[Part], latency: int, hold: int
) -> None:
    how = ByParts(within=0.0, switch_latency_s=latency / 1e9, min_hold_s=hold / 1e9)
    table = by_parts(one_clock(0, "forward", parts), parts, how)
    assert best(table) == pareto(all_choices(parts, latency, hold))


@given(part_tables(), st.integers(0, 30), st.sampled_from([0.01, 0.1, 0.5]))
def test_what_is_left_out_saves_little_and_the_hull_stays(
    parts: list[Part], latency: int, within: float
) -> None:
    whole = one_clock(0, "forward", parts)
    every = by_parts(whole, parts, ByParts(within=0.0, switch_latency_s=latency / 1e9))
    some = by_parts(whole, parts, ByParts(within=within, switch_latency_s=latency / 1e9))
    slack = within * sum(int(part.table.energy_fj.min()) for part in parts)
    for time, energy in best(every):
        assert any(t <= time and e <= energy + slack for t, e in best(some))
    for power in (0, 1):
        one, other = cost_curve(every, power), cost_curve(some, power)
        assert one.hull_time_ns.tolist() == other.hull_time_ns.tolist()
        assert one.hull_slope_uw.tolist() == other.hull_slope_uw.tolist()
        assert one.base_cost_fj == other.base_cost_fj


@given(part_tables(), st.integers(0, 50))
def test_an_option_takes_what_the_replay_of_its_parts_as_operations_says(
    parts: list[Part], latency: int
) -> None:
    how = ByParts(within=0.0, switch_latency_s=latency / 1e9)
    table = by_parts(one_clock(0, "forward", parts), parts, how)
    rows = [
        (0, f"part{p}", mhz, time / 1e9, energy / 1e15)
        for p, part in enumerate(parts)
        for mhz, _, time, energy in part.table.rows()
    ]
    rows += [(0, name, 0, 1.0, 1.0) for name in ("forward", "backward")]
    # An iteration begins with the clock that the one before it left.
    rows += [(0, "last", mhz, 1e-6, 0.0) for mhz in (*CLOCKS, 0)]
    names = [*(f"part{p}" for p in range(len(parts))), "last"]
    operations = [{"id": name, "stage": 0, "instruction": name} for name in names]
    chain = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    problem = Problem(chain, Profile.from_rows(rows), [0])
    for mhz, config, time, energy in table.rows():
        changes = {change.part: change.frequency_mhz for change in changes_of(config)}
        knobs, clock = [], mhz
        for part in parts:
            clock = changes.get(part.name, clock)
            knobs.append((clock if part.table.frequency_mhz.any() else 0, ""))
        replay = problem.replay(problem.rows_at([*knobs, (mhz, "")]), Machine(latency))
        assert replay.starts_ns[-1] == time
        assert replay.energies_fj[:-1].sum() == energy
        if changes:
            each = pieces(table, config, latency)
            assert sum(piece.time_ns for piece in each) == time
            assert sum(piece.energy_fj for piece in each) == energy
