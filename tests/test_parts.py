"""Operations made of parts: composition against brute force, against parts as operations of their
own, and against the replay; files, plans and bad input.
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import done, refused, told
from envplan.check.plans import verify_plan
from envplan.enforce.apply import apply_plan
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.supported_clocks import parse_clocks
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import (
    ByParts,
    ClockSetting,
    ExactCost,
    OptionTable,
    PartCosts,
    Profile,
    ProfileMetadata,
    compose_options,
    cost_curve,
    parse_clock_requests,
    part_runs,
)
from envplan.request import Request
from envplan.simulation.iteration import simulate
from envplan.simulation.replicas import plan_replicas
from envplan.solve import trace_frontier
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W

CLOCKS = (900, 1200, 1500)
EXACT = ByParts(within=0.0)
WAITING = st.sampled_from([0, 1, 3])  # 10 uW


def late(within: float, waiting_10uw: int, latency_ns: int, hold_ns: int = 0) -> ByParts:
    return ByParts(
        within=within,
        switch_latency_s=latency_ns / 1e9,
        min_hold_s=hold_ns / 1e9,
        blocking_power_w=waiting_10uw / POWER_UNITS_PER_W,
    )


@st.composite
def made_of_parts(draw: st.DrawFn, most_parts: int = 4, with_configs: bool = True) -> PartCosts:
    """Parts with noisy rows at the same clocks, some of constant time, maybe in two configs."""
    has_configs = with_configs and draw(st.booleans()) and draw(st.booleans())
    count = draw(st.integers(1, 3 if has_configs else most_parts))
    clocks = CLOCKS[: draw(st.integers(1, len(CLOCKS)))]
    rows = {}
    for p in range(count):
        constant = p > 0 and draw(st.booleans()) and draw(st.booleans())
        configs = ("x y", "z") if has_configs and not constant else ("",)
        rows[f"p{p}"] = {
            ClockSetting(mhz, config): ExactCost(draw(st.integers(1, 40)), draw(st.integers(0, 60)))
            for mhz in ((0,) if constant else clocks)
            for config in configs
        }
    return PartCosts.from_rows("", rows)


def rows_of(parts: PartCosts, p: int) -> list[tuple[int, int, int]]:
    """MHz, ns and 10 fJ of a part's rows; of one that is the same at every clock only one."""
    columns = (parts.frequency_mhz, parts.time_ns[:, p], parts.energy_10fj[:, p])
    rows = list(zip(*(each.tolist() for each in columns), strict=True))
    return rows if parts.follows_clock[p] else [(0, *rows[0][1:])]


def pareto(points: set[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for time, energy in sorted(points):
        if not kept or energy < kept[-1][1]:
            kept.append((time, energy))
    return kept


def best(table: OptionTable, waiting_10uw: int = 0) -> list[tuple[int, int]]:
    return pareto({(t, e - waiting_10uw * t) for _, _, t, e in table.options()})


def all_choices(parts: PartCosts, latency: int, hold: int) -> set[tuple[int, int]]:
    """Time and energy of every choice of a row for each part that the rules allow, one by one."""
    found = set()
    for chosen in itertools.product(*(rows_of(parts, p) for p in range(len(parts.names)))):
        now, used, requests, clock = 0, 0, [0], 0
        for mhz, time, energy in chosen:
            if mhz and clock and mhz != clock:
                requests.append(now - latency)
            clock = mhz or clock
            now, used = now + time, used + energy
        apart = [b - a for a, b in itertools.pairwise(requests)]
        kept = now - requests[-1] - latency >= hold
        if not apart or (min(apart) >= max(latency, hold) and kept):
            found.add((now, used))
    return found


@given(made_of_parts(), st.just(0) | st.integers(0, 30), st.just(0) | st.integers(0, 60), WAITING)
def test_options_are_what_trying_all_choices_finds(
    parts: PartCosts, latency: int, hold: int, waiting_10uw: int
) -> None:
    how = late(0.0, waiting_10uw, latency, hold)
    table = compose_options(0, "forward", parts, how)
    found = {(t, e - waiting_10uw * t) for t, e in all_choices(parts, latency, hold)}
    assert best(table, waiting_10uw) == pareto(found)


@given(made_of_parts(), st.integers(0, 30), st.sampled_from([0.01, 0.1, 0.5]), WAITING)
def test_what_is_left_out_saves_little_and_the_hull_stays(
    parts: PartCosts, latency: int, within: float, waiting_10uw: int
) -> None:
    every = compose_options(0, "forward", parts, late(0.0, waiting_10uw, latency))
    some = compose_options(0, "forward", parts, late(within, waiting_10uw, latency))
    slack = within * int(parts.energy_10fj.min(axis=0).sum())
    for time, cost in best(every, waiting_10uw):
        assert any(t <= time and c <= cost + slack for t, c in best(some, waiting_10uw))
    for power in range(waiting_10uw + 1):
        one, other = cost_curve(every, power), cost_curve(some, power)
        assert one.hull_time_ns.tolist() == other.hull_time_ns.tolist()
        assert one.hull_slope_10uw.tolist() == other.hull_slope_10uw.tolist()
        assert one.base_cost_10fj == other.base_cost_10fj


@given(made_of_parts(), st.integers(0, 50))
def test_clocks_asked_for_by_an_option_come_as_its_parts_begin(
    parts: PartCosts, latency: int
) -> None:
    table = compose_options(0, "forward", parts, late(0.0, 0, latency))
    for row, (mhz, config, time, energy) in enumerate(table.options()):
        slices = table.segments.of_option(row)
        assert len(slices) == len(parts.names)
        assert list(parse_clock_requests(config)) == (
            table.clock_requests(row) if table.changes_clock[row] else []
        )
        if not parse_clock_requests(config):
            continue
        each = part_runs(table, row, latency)
        assert tuple(piece.part for piece in each) == parts.names
        assert [piece[2:] for piece in each] == slices
        assert [sum(column) for column in zip(*slices, strict=True)] == [time, energy]
        assert each[-1].frequency_mhz == table.end_mhz[row]
        # Requests and arrivals, followed ns by ns.
        times = itertools.accumulate((piece.time_ns for piece in each), initial=0)
        starts = {piece.part: start for piece, start in zip(each, times, strict=False)}
        comes = [(0, mhz)] + [
            (starts[change.part] + change.delay_ns + latency, change.frequency_mhz)
            for change in parse_clock_requests(config)[1:]
        ]
        for piece in each:
            clock = [c for at, c in comes if at <= starts[piece.part]][-1]
            assert piece.frequency_mhz == clock


def test_what_a_late_clock_leaves_of_a_part_is_rounded_half_up() -> None:
    slow, fast = ClockSetting(900, ""), ClockSetting(1500, "")
    rows = {
        "a": {slow: ExactCost(5, 9), fast: ExactCost(3, 9)},
        "b": {slow: ExactCost(4, 1), fast: ExactCost(2, 3)},
    }
    table = compose_options(0, "forward", PartCosts.from_rows("", rows), EXACT)
    row = list(table.config).index("@a=1500 @b=900")
    # A ns of b at 1500 MHz, half of its 3 10 fJ; then half of what it does at 900 MHz, 0.5 10 fJ.
    late = [piece[1:] for piece in part_runs(table, row, 1)]
    assert late == [(1500, 3, 9), (1500, 1, 2), (900, 2, 1)]


def parts_profile(
    stages: int = 2,
    clocks: tuple[int, ...] = (1740, 1500, 1260, 1020, 780),
    layers: int = 3,
    whole: float | None = None,
    microbatches: int = 4,
) -> Profile:
    """Layers of attention, which goes with the memory, and of a product, which goes with the clock.

    Args:
        whole: rows of the operations themselves, too, so many times what their parts take.
    """
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.1)):
            for mhz in clocks:
                total_s = total_j = 0.0
                for layer in range(layers):
                    for name, fixed, scaling in (("attention", 0.02, 0.002), ("mlp", 0.001, 0.03)):
                        time = work * (1 + 0.15 * stage) * (fixed + scaling * 1740 / mhz)
                        power = 90 + 190 * (mhz / 1740) ** 2.6
                        row = round(time, 6), round(power * time, 6)
                        rows.append((stage, instruction, mhz, *row, f"{name}{layer}"))
                        total_s, total_j = total_s + row[0], total_j + row[1]
                if whole is not None:
                    rows.append((stage, instruction, mhz, whole * total_s, whole * total_j, ""))
        rows.append((stage, "blocking", 1740, 2.0, 140.0, ""))
    return Profile.from_rows(
        rows,
        columns=("stage", "instruction", "frequency", "time", "energy", "part"),
        name="parts",
        metadata=ProfileMetadata(source="modelled", num_microbatches=microbatches),
    )


@given(st.data())
def test_the_frontier_is_that_of_parts_as_operations_of_their_own(data: st.DataObject) -> None:
    tables = {
        (stage, name): data.draw(made_of_parts(3, with_configs=False))
        for stage in (0, 1)
        for name in ("forward", "backward")
    }
    columns = ("stage", "instruction", "frequency", "time", "energy", "part")
    by_operation, by_part, operations = [], [], []
    for (stage, name), parts in tables.items():
        for p, part in enumerate(parts.names):
            for mhz, time, energy in rows_of(parts, p):
                row = (mhz, time / 1e9, energy / ENERGY_UNITS_PER_J)
                by_operation.append((stage, name, *row, part))
                by_part.append((stage, f"{name}{p}", *row))
                by_part.append((1 - stage, f"{name}{p}", 1, 1.0, 1.0))
    order = {0: ("f0", "f1", "b0", "b1"), 1: ("f0", "b0", "f1", "b1")}
    for stage, place in [(s, o) for s in (0, 1) for o in order[s]]:
        name = "forward" if place[0] == "f" else "backward"
        for p in range(len(tables[stage, name].names)):
            operation = {"id": f"{stage}{place}.{p}", "stage": stage, "instruction": f"{name}{p}"}
            other = 1 - stage if (place[0] == "f") == (stage == 1) else None
            if p == 0 and other is not None:
                operation["after"] = [f"{other}{place}.{len(tables[other, name].names) - 1}"]
            operations.append(operation | {"microbatch": int(place[1])})
    by_part += [(stage, name, 0, 1.0, 1.0) for stage, name in tables]
    unique = list({row[:3]: row for row in reversed(by_part)}.values())
    dag = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    plain = trace_frontier(dag, Profile.from_rows(unique), blocking_power=1 / POWER_UNITS_PER_W)
    how = ByParts(within=0.0, blocking_power_w=1 / POWER_UNITS_PER_W)
    composed = Profile.from_rows(by_operation, columns=columns).adjusted(by_parts=how)
    frontier = trace_frontier(
        Pipeline("1f1b", 2, 2), composed, blocking_power=1 / POWER_UNITS_PER_W
    )
    assert frontier.min_time_ns == plain.min_time_ns
    assert frontier.min_energy_time_ns == plain.min_energy_time_ns
    for time in range(frontier.min_time_ns, frontier.min_energy_time_ns + 1):
        assert frontier.lower_bound_10fj(time) == plain.lower_bound_10fj(time)


def test_parts_save_where_one_clock_cannot_and_plans_prove_it() -> None:
    profile = parts_profile()
    pipeline = Pipeline("1f1b", 2, 4)
    one = trace_frontier(pipeline, profile).plan()
    frontier = trace_frontier(pipeline, profile.adjusted(by_parts=ByParts()))
    plan = frontier.plan()
    assert plan.iteration_time == one.iteration_time
    assert plan.energy < 0.975 * one.energy
    assert plan.predicted.baseline == one.predicted.baseline
    assert verify_plan(plan, profile)
    assert Plan.from_document(json.loads(plan.to_json())) == plan
    changing = [op for stage in plan.stages for op in stage if parse_clock_requests(op.config)]
    assert changing
    assert all(parse_clock_requests(op.config)[0][1] == op.frequency_mhz for op in changing)
    timeline = simulate(plan, profile)
    assert timeline.energy == plan.energy
    split = next(i for i, run in enumerate(timeline.operations) if parse_clock_requests(run.config))
    parts = [one for one in timeline.slices if one.operation == split]
    assert len({part.frequency_mhz for part in parts}) > 1
    assert {part.part for part in parts} >= {"attention0", "mlp2"}


@pytest.mark.parametrize("asked", [{"switch_latency": 0.005}, {"min_dwell": 0.02}])
def test_plans_by_parts_hold_on_late_and_held_clocks(asked: dict[str, float]) -> None:
    profile = parts_profile(microbatches=3)
    frontier = trace_frontier(Pipeline("1f1b", 2, 3), profile.adjusted(by_parts=ByParts()))
    plan = frontier.plan(slowdown=0.05, **asked)
    assert plan.predicted.bound == "relaxation"  # that of late clocks knows no parts
    how = plan.profile.adjustments.by_parts
    machine = {"switch_latency": how.switch_latency_s, "min_dwell": how.min_hold_s}
    assert machine == {"switch_latency": 0.0, "min_dwell": 0.0, **asked}
    assert verify_plan(plan, profile)
    later = simulate(plan, profile, switch_latency=0.001)
    assert later.energy > 0
    other = how.model_copy(update={"switch_latency_s": 0.001})
    adjusted = plan.profile.adjustments.model_copy(update={"by_parts": other})
    forged = plan.profile.model_copy(update={"adjustments": adjusted})
    with pytest.raises(InputError, match=r"by_parts\.switch_latency_s is"):
        verify_plan(plan.model_copy(update={"profile": forged}), profile)


def test_the_clock_after_an_operation_by_parts_is_asked_for_once_its_last_part_runs() -> None:
    profile = parts_profile(microbatches=3)
    frontier = trace_frontier(Pipeline("1f1b", 2, 3), profile.adjusted(by_parts=ByParts()))
    plan = frontier.plan(slowdown=0.05, switch_latency=0.005)
    timeline = simulate(plan, profile)
    replay, latency_ns = timeline.replay, timeline.replay.machine.latency_ns
    first_operations = set(replay.problem.pipeline.stage_begin.tolist())
    last_part_ns = {part.operation: part.start_ns for part in timeline.slices if part.part}
    after_parts = 0
    for operation, at_ns in enumerate(replay.requests_ns.tolist()):
        if at_ns < 0 or operation in first_operations:
            continue
        before = operation - 1
        earliest_ns = last_part_ns.get(before, int(replay.starts_ns[before]))
        assert at_ns == max(earliest_ns, int(replay.starts_ns[operation]) - latency_ns)
        after_parts += before in last_part_ns
    assert after_parts


@pytest.mark.parametrize("clocks", ["--min-dwell 20", "--switch-latency 5"])
def test_notes_on_limits_are_of_the_options_that_late_and_held_clocks_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clocks: str
) -> None:
    parts_profile(microbatches=2).save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    solved = told(f"solve --slowdown 5 --peak-power-cap 1000 {clocks}")
    assert any("at its peak it draws" in note for note in solved["notes"])


@pytest.mark.parametrize("clocks", [{"min_dwell": 0.02}, {"switch_latency": 0.005}])
def test_unlike_replicas_keep_a_ramp_together_on_late_and_held_clocks(
    clocks: dict[str, float],
) -> None:
    frontiers = []
    for layers in (3, 2):
        profile = parts_profile(microbatches=3, layers=layers)
        by_parts = profile.adjusted(by_parts=ByParts())
        frontiers.append(trace_frontier(Pipeline("1f1b", 2, 3), by_parts))
    request = Request.from_options(slowdown=0.05, ramp_limit=1e6, **clocks)
    planned = plan_replicas(frontiers, request)
    assert planned.sync_time <= 1.05 * max(frontier.min_time for frontier in frontiers)
    assert all(plan.request.limits for plan in planned.plans)


def test_a_cap_on_the_peak_counts_what_parts_draw() -> None:
    profile, cap = parts_profile(microbatches=2), 400.0
    for how in (ByParts(), None):
        frontier = trace_frontier(Pipeline("1f1b", 2, 2), profile.adjusted(by_parts=how))
        plan = frontier.plan(peak_power_cap=cap)
        timeline = simulate(plan, profile)
        spans: list[tuple[int, int, int, float]] = []  # stage, begin, end, W above waiting
        for i, run in enumerate(timeline.operations):
            of = [each for each in timeline.slices if each.operation == i]
            stage, begin = run.stage, of[0].start_ns
            taken = [(s.finish_ns - s.start_ns, s.energy_10fj) for s in of]
            if not parse_clock_requests(run.config):
                parts = profile.measured_costs[stage, run.instruction]
                row = parts.settings.index((run.frequency_mhz, ""))
                taken = list(zip(parts.time_ns[row], parts.energy_10fj[row], strict=True))
            for time, energy in taken:
                spans.append((stage, begin, begin + time, energy / time / POWER_UNITS_PER_W - 70))
                begin += time
        peak = max(
            140 + sum(watts for _, begin, end, watts in spans if begin <= at < end)
            for _, at, _, _ in spans
        )
        assert peak <= cap
        assert timeline.replay.peak_10uw == pytest.approx(peak * POWER_UNITS_PER_W, abs=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    parts_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_work_on_a_profile_with_parts_and_sweeps_plan_as_solve_does(
    folder: Path,
) -> None:
    energies = {}
    for options, point in (
        ("", ""),
        ("--one-clock", "one_clock = true"),
        ("--parts-within 0", "parts_within = 0"),
    ):
        energies[point] = told(f"solve --slowdown 2 {options}")["predicted"]["energy_j"]
    assert energies[""] < 0.98 * energies["one_clock = true"]
    text = "".join(f'[[points]]\nprofile = "profile.csv"\nslowdown = 2\n{p}\n' for p in energies)
    (folder / "sweep.toml").write_text(text)
    for line in (
        "sweep sweep.toml -o sweep.csv",
        "frontier -o frontier.csv",
        "solve --slowdown 2 --ladder 4",
        "check plan.json",
        "apply plan.json --clocks 780-1740:240",
        "check run.freqplan.json",
        "simulate plan.json --trace trace.json",
        "solve --parts-within 0 --switch-latency 5ms -o late.json",
        "check late.json",
    ):
        done(line)
    done("apply plan.json -o same.freqplan.json")
    done("solve --clocks same.freqplan.json -o given.json")
    assert Plan.load("given.json").stages == Plan.load("plan.json").stages
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [float(row["energy_j"]) for row in rows] == list(energies.values())
    assert [row["one_clock"] for row in rows] == ["False", "True", "False"]


def test_a_backward_that_is_derived_has_the_parts_of_what_it_is_made_of() -> None:
    profile = parts_profile()
    names = profile.measured_costs[0, "backward"].names
    split = profile.adjusted(backward_input_share=0.4, by_parts=EXACT)
    for half, share in (("backward_input", 0.4), ("backward_weight", 0.6)):
        table = split.table(0, half)
        assert table.parts.names == names
        assert table.changes_clock.any()
        whole = {row[:2]: row[2:] for row in profile.table(0, "backward").options()}
        for mhz, config, time, energy in table.options():
            if not parse_clock_requests(config):
                assert time == pytest.approx(share * whole[mhz, config][0], abs=len(names))
                assert energy == pytest.approx(share * whole[mhz, config][1], rel=1e-9)
    plan = trace_frontier(
        Pipeline("zb-h1", 2, 3),
        profile.fitted({"forward", "backward_input", "backward_weight"}, by_parts=ByParts()),
    ).plan()
    assert any(
        parse_clock_requests(op.config) for op in plan.stages[0] if op.instruction != "forward"
    )
    assert verify_plan(plan, profile)
    # Each part does its own forward again.
    recomputing = profile.adjusted(recompute=True, by_parts=EXACT).table(0, "backward")
    assert recomputing.changes_clock.any()
    forward, backward = (profile.measured_costs[0, name] for name in ("forward", "backward"))
    assert (recomputing.parts.time_ns == forward.time_ns + backward.time_ns).all()


def test_halves_of_a_backward_are_joined_part_by_part() -> None:
    columns = ("stage", "instruction", "frequency", "time", "energy", "part")
    rows = [
        (0, name, mhz, work * 1e-3 * 1500 / mhz, work * mhz / 100, part)
        for name in ("forward", "backward_input", "backward_weight")
        for mhz in (1500, 1000)
        for part, work in (("mlp", 2.0), ("attention", 1.0))
    ]
    profile = Profile.from_rows(rows, columns=columns)
    table = profile.adjusted(join_backward=True, by_parts=EXACT).table(0, "backward")
    assert table.parts.names == ("mlp", "attention")
    assert table.changes_clock.any()
    assert table.time_ns[table.max_frequency_option] == 6_000_000


def test_parts_are_scaled_to_what_was_measured_of_the_operation() -> None:
    profile = parts_profile(whole=1.01)
    table = profile.table(0, "forward")
    plain = {row[:2]: row[2:] for row in table.options()}
    again = profile.adjusted(by_parts=EXACT).table(0, "forward")
    for k, (mhz, config, time, energy) in enumerate(again.options()):
        if not config:
            assert plain[mhz, config] == (time, energy)
        else:
            assert sum(piece.time_ns for piece in part_runs(again, k, 0)) == time


def test_bad_parts_are_refused_with_where_and_why(folder: Path) -> None:
    header, *rows = (folder / "profile.csv").read_text().splitlines()

    def refuses(changed: list[str], *words: str) -> None:
        (folder / "bad.csv").write_text("\n".join([header, *changed]) + "\n")
        refused("solve bad.csv", *words)

    lost = [row for row in rows if not row.startswith("1,backward,1020") or "mlp1" not in row]
    refuses(lost, "stage 1 backward: part mlp1 has no row at 1020 MHz, which part attention0 has")
    first = next(k for k, row in enumerate(rows) if row.startswith("0,forward,1500"))
    swapped = rows.copy()
    swapped[first], swapped[first + 1] = rows[first + 1], rows[first]
    refuses(swapped, "part attention0", "comes after mlp0 at 1500 MHz", "one order")
    refuses([rows[0], *rows], "repeats line 2", "part attention0")
    refuses([f"{rows[0].rpartition(',')[0]},a b", *rows[1:]], "has a space")
    refuses([*rows, "0,blocking,780,1,70,waits"], "has no parts")
    whole = [f"0,forward,{mhz},0.5,1," for mhz in (1740, 1500, 1260, 1020, 780)]
    refuses([*rows, *whole], "stage 0 forward at 1740 MHz: its parts take 0.159 s", "68.2%) less")
    refuses([*rows, *whole[1:]], "at 1740 MHz there are rows for its parts and none for the op")


def test_a_frequency_plan_carries_clocks_by_part_and_checks_them() -> None:
    profile = parts_profile()
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile.adjusted(by_parts=ByParts())).plan()
    topology = Topology.for_job(plan.job)
    applied = apply_plan(plan, profile, topology=topology)
    configs = applied.ranks[0].configs
    assert configs == [op.config for op in plan.stages[0]]
    assert {c.frequency_mhz for one in configs for c in parse_clock_requests(one)} <= set(
        applied.ranks[0].clocks_mhz
    )
    document = json.loads(applied.to_json())
    at = next(k for k, one in enumerate(configs) if parse_clock_requests(one))
    for wrong, words in (
        ("@attention0=1500 @mlp0=901", "asks for 901 MHz"),
        ("@attention0=1500 mlp0", "does not say clocks by part"),
    ):
        document["ranks"][0]["configs"][at] = wrong
        with pytest.raises(InputError, match=words):
            FrequencyPlan.from_document(document)
    with pytest.raises(InputError, match="Zeus's format has no place"):
        applied.to_zeus()
    with pytest.raises(InputError, match="the highest clock of the GPU is 1000 MHz"):
        apply_plan(plan, profile, topology=topology, clocks=parse_clocks("1000"))


@pytest.mark.parametrize("asked", [{}, {"switch_latency": 0.02}, {"min_dwell": 0.05}])
@pytest.mark.parametrize("offered", ["1260,1500,1740", "1100,1400,1800"])
def test_clocks_of_parts_that_a_gpu_lacks_are_raised(offered: str, asked: dict[str, float]) -> None:
    profile = parts_profile()
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), profile.adjusted(by_parts=ByParts()))
    plan = frontier.plan(slowdown=0.05, **asked)
    wanted = {
        c.frequency_mhz for s in plan.stages for op in s for c in parse_clock_requests(op.config)
    }
    clocks = parse_clocks(offered)
    has = set(clocks.supported_clocks_mhz)
    assert wanted - has
    applied = apply_plan(plan, profile, topology=Topology.for_job(plan.job), clocks=clocks)
    assert applied.iteration_time_s <= plan.target.deadline_s
    assert FrequencyPlan.from_document(json.loads(applied.to_json())) == applied
    for rank in applied.ranks:
        assert rank.configs is not None
        for before, now in zip(plan.stages[rank.stage], rank.configs, strict=True):
            assert {c.frequency_mhz for c in parse_clock_requests(now)} <= has
            asked = {c.frequency_mhz for c in parse_clock_requests(before.config)}
            assert bool(parse_clock_requests(now)) == bool(asked and asked <= has)
        assert set(rank.clocks_mhz) <= has
    assert applied.raised
    for one in applied.raised:
        assert one.planned_mhz < one.applied_mhz in has
        assert one.profiled == (1260 in has)
    raised_to = {one.applied_mhz for one in applied.raised}
    assert raised_to <= {mhz for rank in applied.ranks for *_, mhz in rank.operations}


def test_a_clock_that_a_parts_config_was_not_profiled_at_is_passed_over() -> None:
    rows = [
        (0, name, mhz, seconds * dear, watts * seconds * dear, config, part)
        for name in ("forward", "backward")
        for mhz, watts, config in ((1500, 300, "x"), (900, 150, "z"))
        for part, seconds in (("attention", 0.1), ("mlp", 0.1))
        for dear in (1.0 if (part, config) in (("attention", "x"), ("mlp", "z")) else 5.0,)
    ]
    columns = ("stage", "instruction", "frequency", "time", "energy", "config", "part")
    profile = Profile.from_rows(rows, columns=columns)
    frontier = trace_frontier(Pipeline("1f1b", 1, 1), profile.adjusted(by_parts=EXACT))
    plan = frontier.plan()
    assert plan.stages[0][0].config == "@attention=1500/x @mlp=900/z"
    with pytest.raises(InputError, match="none above it is as fast"):
        apply_plan(
            plan,
            profile,
            topology=Topology.for_job(plan.job),
            clocks=parse_clocks("1000,1500"),
        )


def test_where_a_gpu_lacks_the_clock_of_a_part_the_operation_keeps_its_config() -> None:
    rows = [
        (0, name, mhz, seconds * dear, watts * seconds * dear, config, part)
        for name in ("forward", "backward")
        for mhz, watts in ((1500, 300), (900, 150))
        for config, dear in (("a", 1.2), ("x", 1.0), ("z", 1.1))
        for part, seconds in (("attention", 0.1), ("mlp", 150 / mhz))
    ]
    columns = ("stage", "instruction", "frequency", "time", "energy", "config", "part")
    profile = Profile.from_rows(rows, columns=columns)
    frontier = trace_frontier(Pipeline("1f1b", 1, 1), profile.adjusted(by_parts=EXACT))
    plan = frontier.plan()
    assert plan.stages[0][0].config == "@attention=900/x @mlp=1500/x"
    applied = apply_plan(
        plan,
        profile,
        topology=Topology.for_job(plan.job),
        clocks=parse_clocks("1200,1500"),
    )
    assert applied.ranks[0].configs == ["x", "x"]
    assert [mhz for *_, mhz in applied.ranks[0].operations] == [1500, 1500]


def test_operations_around_the_pipeline_run_at_the_clock_that_suits_them() -> None:
    names = ("load", "reduce_scatter", "optimizer", "all_gather")
    plans = []
    for clocks in ((1740, 1260, 780), (1740,)):
        rows = [(0, name, mhz, 0.05, 2.0 + mhz / 400) for name in names for mhz in clocks]
        for mhz in (1740, 1260, 780):
            rows += [(0, name, mhz, 174 / mhz, 0.1 * mhz) for name in ("forward", "backward")]
        extras = {name: [0] for name in names}
        plans.append(trace_frontier(Pipeline("1f1b", 1, 2, extras=extras), Profile.from_rows(rows)))
    own, fixed = (frontier.plan() for frontier in plans)
    order = [op.instruction for op in own.stages[0]]
    assert order == ["load", "forward", "backward"] * 2 + list(names[1:])
    assert own.iteration_time == fixed.iteration_time
    assert fixed.energy - own.energy == pytest.approx(5 * (1740 - 780) / 400)
