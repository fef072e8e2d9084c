"""The measured `sosp24-` profiles, and the tools that identify them from real runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.sosp24.data import DATA, WORKLOADS, Runs, Workload, read_runs
from tools.sosp24.overheads import Overheads, Replay, find_overheads, irregular, optimizer_s
from tools.sosp24.power import find_powers
from tools.sosp24.stages import STAGE_PROFILES, stage_profile
from tools.sosp24.times import find_times, switch_latencies
from tools.sosp24.workloads import identify, job, profile_name

from cli_helpers import envplan
from envplan import Pipeline, Plan, Profile, builtin_profiles, trace_frontier
from envplan.plan.build import beyond_raw_rows
from envplan.profile.smoothing import jumps, smooth_curve, wrong_steps
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
WORKLOAD_PROFILES = [profile_name(workload) for workload in WORKLOADS.values()]

every_workload = pytest.mark.parametrize("name", WORKLOAD_PROFILES)
every_stage_profile = pytest.mark.parametrize("name", list(STAGE_PROFILES))


# What ships


@pytest.mark.parametrize("name", [*STAGE_PROFILES, *WORKLOAD_PROFILES])
def test_a_sidecar_says_who_measured_which_job_and_under_which_license(name: str) -> None:
    profile = Profile.builtin(name)
    metadata, pipeline = profile.metadata, profile.pipeline()
    assert metadata.source == "measured"
    assert metadata.extra["license"] == "Apache-2.0"
    assert "Perseus" in metadata.extra["measured_by"]
    assert "github.com/ml-energy/zeus" in metadata.extra["artifact"]
    assert pipeline.num_stages == profile.num_stages == 8 - 4 * ("4st" in name)
    assert pipeline.num_microbatches == metadata.num_microbatches
    assert metadata.gpus_per_stage == metadata.tensor_parallel
    assert all(profile.has(op.profile_stage, op.instruction) for op in pipeline.operations)
    waiting = 83.64 if "a100" in name else 70.38
    assert profile.blocking_power_w == pytest.approx([waiting] * profile.num_stages)
    assert sum(path.stat().st_size for path in PROFILES.glob("sosp24-*")) < 1_000_000


@every_stage_profile
def test_a_stage_profile_is_what_the_tool_makes_of_the_measured_rows(name: str) -> None:
    made, shipped = stage_profile(name), Profile.read_csv(PROFILES / f"{name}.csv")
    assert made.sha256 == shipped.sha256
    assert made.metadata.to_json() == shipped.metadata.to_json()


@every_workload
def test_rows_cover_every_clock_and_say_which_are_interpolated(name: str) -> None:
    table = pd.read_csv(PROFILES / f"{name}.csv")
    table = table[table["instruction"].isin(["forward", "backward"])]
    runs = read_runs(name.removeprefix("sosp24-"))
    lowest, highest = runs.frequency_mhz.min(), runs.frequency_mhz.max()
    assert ((table["origin"] == "measured") == (table["samples"] > 0)).all()
    for _, rows in table.groupby(["stage", "instruction"]):
        assert sorted(rows["frequency"]) == list(range(lowest, highest + 1, 15))


@every_workload
def test_rows_have_the_shape_of_physics_and_are_close_to_the_operations_measured(name: str) -> None:
    profile, runs = Profile.builtin(name), read_runs(name.removeprefix("sosp24-"))
    predicted = np.zeros(runs.time_s.shape)
    for stage, instruction in product(range(profile.num_stages), ("forward", "backward")):
        table = profile.table(stage, instruction)
        rising = np.argsort(table.frequency_mhz)
        clocks, time = table.frequency_mhz[rising], table.time_ns[rising]
        power = table.energy_10fj[rising] / time
        assert np.all(np.diff(time) <= 0)
        assert np.all(np.diff(power) >= -1e-6 * power[1:])
        assert np.all(power > 83.64 * POWER_UNITS_PER_W)
        mine = (runs.stage == stage) & (runs.backward == (instruction == "backward"))
        predicted[:, mine] = time[np.searchsorted(clocks, runs.frequency_mhz[:, mine])] * 1e-9
    ratio = predicted[runs.planned].sum(1) / runs.time_s[runs.planned].sum(1)
    assert np.abs(ratio - 1).max() < 0.003


# What was published


@pytest.mark.parametrize(
    ("name", "file", "power"),
    [
        ("sosp24-a100sxm-gpt3-175b-8stage", "a100_sxm+gpt3-175b", 83.64),
        ("sosp24-a40-gpt3-175b-8stage", "a40+gpt3-175b", 70.38),
        ("sosp24-a100sxm-bloom-176b-8stage", "a100_sxm+bloom", 83.64),
        ("sosp24-a40-bloom-176b-8stage", "a40+bloom", 70.38),
    ],
)
def test_the_waiting_power_goes_with_the_scale_of_the_rows(
    name: str, file: str, power: float
) -> None:
    """Perseus's fastest plan, waiting for the baseline, saves what Table 6 says."""
    published = Profile.builtin(name).metadata.extra["published_savings"]
    for count in (12, 48):
        frontier = pd.read_csv(DATA / "frontier" / f"{file}_bf16_mb{count}.csv.gz")
        fastest = frontier.iloc[frontier["time"].argmin()]
        time, energy = _at_the_highest_clock(Profile.builtin(name, raw=True), count)
        waiting = 8 * power * (time - fastest["time"])
        saved = 100 * (1 - (fastest["energy"] + waiting) / energy)
        listed = dict(zip(published["num_microbatches"], published["savings_percent"], strict=True))
        assert saved == pytest.approx(listed[count], abs=0.06)


def test_ours_saves_more_than_was_published() -> None:
    profile = Profile.builtin("sosp24-a100sxm-gpt3-175b-8stage")
    plan = trace_frontier(Pipeline("1f1b", 8, 12), profile).plan()
    assert plan.predicted.savings_percent > 15.2
    assert plan.predicted.slowdown_percent == pytest.approx(0, abs=1e-9)


def _at_the_highest_clock(profile: Profile, count: int) -> tuple[float, float]:
    pipeline = Pipeline("1f1b", profile.num_stages, count)
    tables = [profile.table(op.stage, op.instruction) for op in pipeline.operations]
    rows = [table.max_frequency_option for table in tables]
    time = np.array([table.time_ns[row] for table, row in zip(tables, rows, strict=True)])
    energy = (
        sum(int(table.energy_10fj[row]) for table, row in zip(tables, rows, strict=True))
        / ENERGY_UNITS_PER_J
    )
    makespan = pipeline.earliest_starts(time)[1]
    assert profile.blocking_power_w is not None
    waiting = profile.num_stages * makespan - int(time.sum())
    return makespan * 1e-9, energy + profile.blocking_power_w[0] * waiting * 1e-9


# Identification, on runs whose truth is known

SMALL = Workload("a40", "gpt3-2.7b", "Small", 4, 12, 1, None, node_boundary=1)
TRUE = Overheads((0.008,) * 4, 0.006, 0.06, optimizer_s(SMALL))
LATENCY = 0.006
CLOCKS = np.arange(1110, 1741, 15)


def true_time(stage: int, backward: int, clocks: np.ndarray) -> np.ndarray:
    level = (1 + 0.1 * stage) * (0.25 if backward else 0.1)
    return level * np.maximum(0.3 + 0.7 * 1740 / clocks, 0.3 + 0.7 * 1740 / 1600)


def true_power(stage: int, backward: int, clocks: np.ndarray) -> np.ndarray:
    return 95 + 5 * stage - 4 * backward + 180 * (np.minimum(clocks, 1600) / 1600) ** 3


@pytest.fixture(scope="module")
def synthetic() -> Runs:
    """Runs of a small job: plans from slow to fast, each stage at its own mix of two clocks."""
    rng = np.random.default_rng(4)
    pipeline = SMALL.pipeline()
    stage = np.array([op.stage for op in pipeline.operations])
    backward = np.array([op.instruction == "backward" for op in pipeline.operations])
    keys = [("perseus", k) for k in range(26)] + [("envpipe", 2)]
    asked = np.empty((len(keys), len(stage)), np.int64)
    for run in range(len(keys)):
        for which in range(4):
            mine = stage == which
            # Perseus's slowest plan runs each operation at its valley; true costs rise below 1155.
            low = 1155 + 15 * rng.integers(0, 4 + run)
            high = min(low + (240 if which == 3 else 30), 1740)
            asked[run, mine] = rng.choice([low, high], mine.sum())
    asked[[0, 1]] = 1740
    asked[2] = 1155
    times = np.array([[true_time(s, b, CLOCKS) for b in (0, 1)] for s in range(4)])
    powers = np.array([[true_power(s, b, CLOCKS) for b in (0, 1)] for s in range(4)])
    at = np.searchsorted(CLOCKS, asked)
    kind = backward.astype(int)
    own = times[stage, kind, at]
    previous = np.roll(at, 1, axis=1)
    for which in range(4):
        mine = np.flatnonzero(stage == which)
        previous[:, mine[0]] = at[:, mine[-1]]
    old = times[stage, kind, previous]
    measured = own + LATENCY * (1 - own / old)
    iteration = Replay(SMALL)(measured, TRUE)
    energy = np.zeros((len(keys), 4))
    for which in range(4):
        mine = stage == which
        busy = measured[:, mine].sum(1)
        work = (measured * powers[stage, kind, at])[:, mine].sum(1)
        energy[:, which] = work + SMALL.waiting_w * (iteration - busy)
    noise = 1 + 0.0003 * rng.standard_normal(measured.shape)
    return Runs(
        SMALL,
        tuple(keys),
        stage,
        backward,
        asked,
        measured * noise,
        np.full(measured.shape, 1e-4),
        iteration,
        np.full(len(keys), 0.01),
        np.full(len(keys), 20),
        energy * (1 + 0.001 * rng.standard_normal(energy.shape)),
    )


def test_times_by_clock_are_found_again(synthetic: Runs) -> None:
    curves = find_times(synthetic, LATENCY)
    for stage in range(4):
        for backward in (0, 1):
            truth = true_time(stage, backward, curves.clocks_mhz)
            found = curves.time_s[stage, backward]
            seen = curves.count[stage, backward] > 0
            assert np.abs(found / truth - 1)[seen].max() < 0.003
            assert np.abs(found / truth - 1).max() < 0.015
            assert np.all(np.diff(found) <= 0)


def test_a_late_change_of_clock_is_found_again(synthetic: Runs) -> None:
    late = switch_latencies(synthetic)
    assert len(late) >= 20
    assert np.median(late) == pytest.approx(LATENCY, rel=0.15)


def test_overheads_are_found_again(synthetic: Runs) -> None:
    found = find_overheads(synthetic)
    assert np.mean(found.load_s) == pytest.approx(0.008, rel=0.15)
    assert found.node_transfer_s == pytest.approx(TRUE.node_transfer_s, rel=0.15)
    predicted = Replay(SMALL)(synthetic.time_s, found)
    assert np.abs(predicted / synthetic.iteration_time_s - 1).max() < 0.003


def test_each_stage_s_load_is_found_where_each_is_the_slowest_in_some_runs(
    synthetic: Runs,
) -> None:
    """A warm-up on a slower network does not move them."""
    loads = (0.03, 0.008, 0.016, 0.004)
    slowed = (np.arange(len(synthetic)) % 4)[:, None] == synthetic.stage
    times = synthetic.time_s * np.where(slowed, 1.6, 1.0)
    one_node = replace(SMALL, node_boundary=None)
    true = replace(TRUE, load_s=loads, node_transfer_s=None)
    iteration = Replay(one_node)(times, true)
    iteration[0] *= 1.15
    runs = replace(synthetic, workload=one_node, time_s=times, iteration_time_s=iteration)
    assert find_overheads(runs).load_s == pytest.approx(loads, abs=0.001)


def test_counts_on_the_critical_path_are_the_slopes_of_the_iteration_time(synthetic: Runs) -> None:
    replay, step = Replay(SMALL), 1e-7
    time, counts = replay.counted(synthetic.time_s, TRUE)
    assert counts.shape == (len(synthetic), 4 + 2)
    more = (0.008, 0.008 + step, 0.008, 0.008)
    for changed, count in (
        (replace(TRUE, load_s=more), counts[:, 1]),
        (replace(TRUE, transfer_s=TRUE.transfer_s + step), counts[:, 4]),
        (replace(TRUE, node_transfer_s=0.06 + step), counts[:, 5]),
    ):
        assert (replay(synthetic.time_s, changed) - time) / step == pytest.approx(count, abs=1e-3)


@pytest.mark.parametrize("kept", ["a third", "envpipe", "one"])
def test_a_profile_is_made_of_whatever_runs_there_are(synthetic: Runs, kept: str) -> None:
    index = np.arange(len(synthetic))
    runs = synthetic.take(
        {"a third": index % 3 == 1, "envpipe": index > 25, "one": index == 9}[kept]
    )
    model = identify(runs, LATENCY)
    assert np.isfinite(model.powers.power_w).all()
    assert np.all(np.diff(model.times.time_s) <= 0)
    expected = Replay(SMALL)(runs.time_s, model.overheads)
    assert expected == pytest.approx(runs.iteration_time_s, rel=0.003)


def test_runs_at_one_clock_are_refused(synthetic: Runs) -> None:
    with pytest.raises(ValueError, match="all 2 runs are at one clock"):
        identify(synthetic.take(np.array([0, 1])), LATENCY)


def test_stages_that_take_turns_are_told_from_those_that_work_side_by_side(
    synthetic: Runs,
) -> None:
    assert not find_overheads(synthetic).in_turn
    true = replace(TRUE, in_turn=True)
    turning = replace(synthetic, iteration_time_s=Replay(SMALL)(synthetic.time_s, true))
    found = find_overheads(turning)
    assert found.in_turn
    assert found.node_transfer_s == pytest.approx(TRUE.node_transfer_s, rel=0.2)


@pytest.mark.filterwarnings("error")
def test_measured_jobs_are_traced_without_doubts_and_only_that_of_t5_takes_turns() -> None:
    for name in WORKLOAD_PROFILES:
        profile = Profile.builtin(name)
        pipeline = profile.pipeline()
        assert list(pipeline.in_turn) == ([3] if name == "sosp24-a40-t5-3b-8stage" else [])
        trace_frontier(pipeline.with_microbatches(8), profile)


def test_powers_predict_runs_that_they_were_found_without(synthetic: Runs) -> None:
    index = np.arange(len(synthetic))
    times = find_times(synthetic, LATENCY)
    left = index % 4 == 3
    powers = find_powers(synthetic.take(~left), times)
    runs = synthetic.take(left)
    energy = (runs.by_clock(powers.power_w, powers.clocks_mhz) * runs.time_s).sum(1)
    waiting = SMALL.waiting_w * (4 * runs.iteration_time_s - runs.time_s.sum(1))
    assert np.abs((energy + waiting) / runs.energy_j - 1).max() < 0.01
    assert np.all(np.diff(powers.power_w, axis=2) >= -1e-9)
    truth = np.array([[true_power(s, b, times.clocks_mhz) for b in (0, 1)] for s in range(4)])
    seen = times.count > 0
    assert np.median(np.abs(powers.power_w / truth - 1)[seen]) < 0.03


def test_a_stall_in_one_iteration_is_told_from_the_spread() -> None:
    runs = read_runs("a100-wide-resnet101_8-4stage")
    stall = irregular(runs)
    planned = np.array([run for planner, run in runs.keys if planner == "perseus"])
    odd = planned % 2 == 1
    assert np.all(stall[: len(planned)][odd] == 0)
    assert np.all(stall[: len(planned)][~odd & (planned > 2)] > 0.08)
    assert not irregular(read_runs("a100-bert-huge-uncased-4stage")).any()


def test_the_tools_replay_is_that_of_the_planner(synthetic: Runs) -> None:
    model = identify(synthetic, LATENCY)
    described = job(model)
    pipeline = Pipeline("1f1b", 4, 12, p2p_latency=described.p2p_latency_s, extras=described.extras)
    overheads = model.overheads
    mine = iter(synthetic.time_s[5])
    times = [
        overheads.load_s[op.stage]
        if op.instruction == "load"
        else overheads.optimizer_s
        if op.instruction == "optimizer"
        else next(mine)
        for op in pipeline.operations
    ]
    makespan = pipeline.earliest_starts(np.round(np.array(times) * 1e9).astype(np.int64))[1]
    expected = Replay(SMALL)(synthetic.time_s[5:6], overheads)[0]
    assert makespan * 1e-9 == pytest.approx(expected, abs=1e-6)


# Noise


@given(
    level=st.floats(0.01, 1),
    bound=st.floats(0.1, 0.9),
    static=st.floats(60, 150),
    waiting=st.floats(0, 60),
)
@settings(max_examples=40, deadline=None)
def test_a_table_without_noise_has_no_wrong_steps(
    level: float, bound: float, static: float, waiting: float
) -> None:
    clocks = np.arange(600, 1400, 15.0)
    times = level * (1 - bound + bound * 1400 / clocks)
    energies = times * (static + 200 * (clocks / 1400) ** 3)
    assert wrong_steps(clocks, times, energies, waiting) == 0


def test_noise_is_clear_in_raw_measurements_alone_and_taken_out_unless_they_are_asked_for() -> None:
    assert {profile.name for profile in builtin_profiles() if profile.noisy} == set(STAGE_PROFILES)
    name = "sosp24-a40-gpt3-175b-8stage"
    calm, raw = Profile.builtin(name), Profile.builtin(name, raw=True)
    assert raw.noisy
    assert (calm.adjustments.smoothed, raw.adjustments.smoothed) == (True, False)
    assert calm.sha256 == raw.sha256
    for table in calm.tables():
        falling = np.argsort(-table.frequency_mhz)
        assert np.all(np.diff(table.time_ns[falling]) >= 0)
    assert (
        calm.adjusted(raw=True).table(0, "forward").options() == raw.table(0, "forward").options()
    )
    assert (
        raw.adjusted(raw=False).table(0, "forward").options() == calm.table(0, "forward").options()
    )


def test_a_plan_says_what_taking_out_noise_does_to_it(tmp_path: Path) -> None:
    """Through the command line: gap, delay on the raw rows, proof, and --raw."""
    plan, raw = tmp_path / "plan.json", tmp_path / "raw.json"
    job = ("solve", "sosp24-a40-gpt3-175b-8stage", "--microbatches", "12", "--slowdown", "2")
    ran = envplan(*job, "-o", str(plan), cwd=tmp_path)
    (line,) = [line for line in ran.out.splitlines() if "rows are noisy" in line]
    late = float(line.split("take ")[1].split("%")[0])
    assert late < 0.3
    assert line.endswith("and counts on backward up to 960 MHz being faster than right above)")
    assert Plan.load(plan).gap < 0.0035
    assert "noise taken out" in envplan("check", str(plan), cwd=tmp_path).out
    ran = envplan(*job, "--raw", "-o", str(raw), cwd=tmp_path)
    assert "hang on rows that are too fast by chance" in ran.out
    assert Plan.load(raw).profile.adjustments is None
    assert envplan("check", str(raw), cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("name", "instruction", "below"),
    [("gpt3-175b", "backward", 960), ("bloom-176b", "forward", 1050)],
)
def test_rows_below_a_jump_go_on_from_those_above_at_their_own_power(
    name: str, instruction: str, below: int
) -> None:
    name = f"sosp24-a40-{name}-8stage"
    tables = [Profile.builtin(name, raw=raw).table(0, instruction) for raw in (True, False)]
    rising = [np.argsort(table.frequency_mhz) for table in tables]
    clocks = tables[0].frequency_mhz[rising[0]]
    times, smooth = (t.time_ns[r] * 1e-9 for t, r in zip(tables, rising, strict=True))
    powers = [
        t.energy_10fj[r] / t.time_ns[r] / POWER_UNITS_PER_W
        for t, r in zip(tables, rising, strict=True)
    ]
    assert [clocks[k] for k in jumps(times)] == [below]
    assert Profile.builtin(name).jumps == {instruction: below}
    under = clocks <= below
    assert np.all(smooth[under] > times[under])  # no plan promises the faster state
    assert np.median(np.abs(powers[1] / powers[0] - 1)[under]) < 0.01
    assert np.median(np.abs(smooth / times - 1)[~under]) < 0.02
    assert np.all(np.diff(smooth) <= 0)


@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.002, 0.005]))
@settings(max_examples=40, deadline=None)
def test_an_outlier_is_no_jump_and_moves_nothing_but_itself(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    clocks = np.arange(900, 1741, 15.0)
    truth = 0.1 * (0.3 + 0.7 * 1740 / np.minimum(clocks, 1500))
    energies = truth * (95 + 180 * (np.minimum(clocks, 1500) / 1500) ** 3)
    times = truth * (1 + noise * rng.standard_normal(len(clocks)))
    k = int(rng.integers(1, len(clocks) - 1))
    times[k] *= 0.96
    assert not jumps(times)
    smooth, _ = smooth_curve(clocks, times, energies)
    assert np.abs(smooth / truth - 1).max() < 0.002 + 3 * noise


@every_stage_profile
def test_without_noise_plans_are_close_to_the_bound(name: str) -> None:
    profile = Profile.builtin(name)
    frontier = trace_frontier(Pipeline("1f1b", 8, 12), profile)
    for slowdown in (0, 0.02, 0.1):
        plan = frontier.plan(slowdown=slowdown)
        late, _ = beyond_raw_rows(plan, profile)
        assert plan.gap < 0.0035
        assert late < 0.003
