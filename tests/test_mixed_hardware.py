"""Stages on different GPUs, and data-parallel replicas on different hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import done, refused, says, small_profile, told
from envplan import Frontier, Pipeline, Plan, Profile, simulate, trace_frontier
from envplan.check.plans import verify_plan
from envplan.enforce.apply import apply_plan
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.supported_clocks import modelled_clocks, stage_clocks
from envplan.enforce.topology import Topology
from envplan.errors import InputError, NoAnswerError
from envplan.profile import ProfileMetadata
from envplan.request import Request
from envplan.simulation.replicas import plan_replicas, replay_replicas
from envplan.units import in_10fj, ns_from_s
from strategies import falling_profiles, slower

A40, A100 = "NVIDIA A40", "NVIDIA A100-SXM4-80GB"
A40_CLOCKS, A100_CLOCKS = (1740, 1500, 1260, 1020, 780), (1410, 1200, 990, 780)


def mixed_profile() -> Profile:
    """Stage 0 on an A40, stage 1 on an A100, each with its own clocks and blocking power."""
    rows: list[tuple[object, ...]] = []
    for stage, clocks, speed, blocking in ((0, A40_CLOCKS, 1.0, 70.0), (1, A100_CLOCKS, 0.8, 90.0)):
        for instruction, work in (("forward", speed), ("backward", 2.1 * speed)):
            for mhz in clocks:
                time = round(work * (0.01 + 0.07 * clocks[0] / mhz), 6)
                power = 90 + 190 * (mhz / clocks[0]) ** 2.6
                rows.append((stage, instruction, mhz, time, round(power * time, 6)))
        rows.append((stage, "blocking", clocks[0], 2.0, 2.0 * blocking))
    metadata = ProfileMetadata(
        gpu=f"{A40} and {A100}", stage_gpus=(A40, A100), num_microbatches=4, source="modelled"
    )
    return Profile.from_rows(rows, name="mixed", metadata=metadata)


@pytest.mark.parametrize("gpus", [[A40, A100], [A40], [A40, 3], [A40, ""]])
def test_a_sidecar_lists_a_gpu_for_each_stage(tmp_path: Path, gpus: list[object]) -> None:
    mixed_profile().save_csv(tmp_path / "mixed.csv")
    sidecar = tmp_path / "mixed.meta.json"
    document = json.loads(sidecar.read_text())
    assert document["gpu"] == [A40, A100]
    sidecar.write_text(json.dumps(document | {"gpu": gpus}))
    if gpus == [A40, A100]:
        read = Profile.read_csv(tmp_path / "mixed.csv")
        assert read.metadata == mixed_profile().metadata
        assert [read.metadata.gpu_of(stage) for stage in (0, 1)] == gpus
        return
    complaint = "stage_gpus" if len(gpus) > 1 else "lists 1 GPUs for 2 stages"
    with pytest.raises(InputError, match=complaint):
        Profile.read_csv(tmp_path / "mixed.csv")


@pytest.fixture(scope="module")
def mixed() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), mixed_profile())


def test_every_stage_is_planned_with_its_own_clocks_and_blocking_power(mixed: Frontier) -> None:
    assert mixed.blocking_power_w == (70.0, 90.0)
    plan = mixed.plan(slowdown=0.1)
    assert {op.frequency_mhz for op in plan.stages[0]} <= set(A40_CLOCKS)
    assert {op.frequency_mhz for op in plan.stages[1]} <= set(A100_CLOCKS)
    highest = mixed.max_frequency_plan().frequencies
    assert [set(stage) for stage in highest] == [{1740}, {1410}]
    verify_plan(plan, mixed.profile)


def test_apply_checks_every_stage_against_its_own_gpu(mixed: Frontier) -> None:
    plan = mixed.plan(slowdown=0.1)
    applied = apply_plan(plan, mixed.profile, topology=Topology.for_job(plan.job))
    assert applied.gpu is None
    assert [applied.clocks_of(stage).gpu for stage in (0, 1)] == [A40, A100]
    assert applied.clocks_of(1).supported_clocks_mhz[-1] == 1410
    document = json.loads(applied.to_json())
    again = FrequencyPlan.from_document(document)
    assert again == applied
    assert len(again.check()) == 4
    clocks = applied.clocks_of(0).supported_clocks_mhz
    again.check_gpu(A40, clocks, 0)
    with pytest.raises(InputError, match="on stage 1, but the GPU here is NVIDIA A40"):
        again.check_gpu(A40, clocks, 1)
    document["ranks"][1]["clocks_mhz"].append(1740)
    with pytest.raises(InputError, match=r"ranks\[1\] asks for 1740 MHz"):
        FrequencyPlan.from_document(document)
    document["ranks"][1]["clocks_mhz"].pop()
    document["stage_gpus"].pop()
    with pytest.raises(InputError, match="stage_gpus has 1 entries for 2 stages"):
        FrequencyPlan.from_document(document)


def test_gpus_can_be_named_stage_by_stage(mixed: Frontier) -> None:
    plan, profile = mixed.plan(), mixed.profile
    topology = Topology.for_job(plan.job)
    named = [modelled_clocks("a40"), modelled_clocks("a100-sxm4-80gb")]
    assert apply_plan(plan, profile, topology=topology, clocks=named).stage_gpus is not None
    with pytest.raises(InputError, match="the plan asks for 1740 MHz"):
        apply_plan(plan, profile, topology=topology, clocks=named[::-1])
    with pytest.raises(InputError, match="3 GPUs are named for 2 stages"):
        apply_plan(plan, profile, topology=topology, clocks=[*named, named[0]])


def test_model_chunks_of_one_rank_cannot_lie_on_two_gpus() -> None:
    profile = mixed_profile()
    pipeline = Pipeline("interleaved", 1, 2, num_chunks=2)
    with pytest.raises(InputError, match="stage 0 runs stages 0, 1 of the profile"):
        stage_clocks(profile, pipeline)
    same = replace(profile.metadata, stage_gpus=None, gpu=A40)
    twin = Profile.from_rows(
        [(s, i, 1740, 0.1, 20.0) for s in (0, 1) for i in ("forward", "backward")], metadata=same
    )
    assert [clocks.gpu for clocks in stage_clocks(twin, pipeline)] == [A40]


def test_the_whole_way_with_two_kinds_of_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    for line in (
        "solve --slowdown 5 --ladder 2",
        "check plan.json",
        "check profile.csv",
        "simulate plan.json --straggler 1.2",
        "compare",
        "frontier -o frontier.json",
        "apply plan.json --gpu a40,a100-sxm4-80gb",
    ):
        done(line)
    says(done("apply plan.json"), f"of {A40} | of {A100}")
    refused("apply plan.json --backend nvml", "different GPUs")


@given(
    st.tuples(*[falling_profiles(2, max_options=6)] * 2),
    st.integers(1, 4),
    st.floats(0.0, 0.6),
    st.integers(1, 3),
)
def test_unlike_replicas_end_together_at_a_certified_energy(
    profiles: tuple[Profile, Profile], microbatches: int, slowdown: float, count: int
) -> None:
    pipeline = Pipeline("1f1b", 2, microbatches)
    frontiers = [
        trace_frontier(pipeline, profile, full=True, replicas=replicas)
        for profile, replicas in zip(profiles, (1, count), strict=True)
    ]
    fastest, planned, best = (
        plan_replicas(frontiers, Request.from_options(**asked))
        for asked in ({}, {"slowdown": slowdown}, {"min_energy": True})
    )
    assert planned.sync_time <= planned.plans[0].target.deadline_s
    bounds = [plans.energy_lower_bound for plans in (best, planned, fastest)]
    assert bounds == sorted(bounds)
    assert planned.energy_lower_bound <= planned.energy * (1 + 1e-12)
    pairs = list(zip(planned.plans, profiles, strict=True))
    assert all(verify_plan(plan, profile) for plan, profile in pairs)
    replayed = [simulate(*pair, sync_time=planned.sync_time).energy_10fj for pair in pairs]
    assert sum(replayed) == pytest.approx(in_10fj(planned.energy), rel=1e-12)
    again = replay_replicas(pairs)
    assert (again.sync_time, again.energy) == (planned.sync_time, planned.energy)


@pytest.mark.parametrize("slowed", [1.0, 1.3])
def test_a_fast_replica_uses_the_time_that_a_slow_one_leaves_it(slowed: float) -> None:
    profile, pipeline = small_profile(2, blocking=70.0), Pipeline("1f1b", 2, 4)
    fast, slow = (
        trace_frontier(pipeline, one, full=True, replicas=replicas)
        for one, replicas in ((profile, 1), (slower(profile, slowed), 2))
    )
    planned = plan_replicas([fast, slow])
    assert planned.sync_time == pytest.approx(slow.min_time)
    hurried = fast.plan()
    rushed = hurried.energy + hurried.waiting_energy(planned.sync_time)
    if slowed > 1:
        assert fast.min_time < planned.plans[0].iteration_time <= planned.sync_time
        assert planned.plans[0].energy + planned.waiting_energies[0] < rushed
        with pytest.raises(NoAnswerError, match="T_min of the slowest replica, that of"):
            plan_replicas([fast, slow], Request.from_options(target_time=fast.min_time))
        return
    # Equal replicas cost what one costs times their number.
    planned = plan_replicas([fast, slow], Request.from_options(slowdown=0.05))
    alone = fast.plan(slowdown=0.05)
    assert planned.energy == pytest.approx(3 * alone.energy, rel=2e-3)
    assert planned.energy_lower_bound == pytest.approx(3 * alone.energy_lower_bound)
    assert planned.savings_percent == pytest.approx(alone.predicted.savings_percent, abs=0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    profile = small_profile(2, blocking=70.0)
    profiles = {"profile": profile, "slow": slower(profile, 1.3), "fast": slower(profile, 0.8)}
    profiles["three"] = small_profile(3)
    for name, written in profiles.items():
        written.save_csv(tmp_path / f"{name}.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_solve_writes_a_plan_for_every_kind_of_replica(folder: Path) -> None:
    says(done("solve --replica-profile slow.csv:2 --slowdown 3"), "certified gap of all together")
    names = ("plan.json", "plan.replica1.json")
    plans = [Plan.load(folder / name) for name in names]
    assert [plan.job.replicas for plan in plans] == [1, 2]
    assert ns_from_s(plans[0].target.deadline_s) == ns_from_s(plans[1].target.deadline_s)
    for command, name in product(("check", "apply"), names):
        done(command, name)
    document = told("simulate plan.json --replica plan.replica1.json")["replicas"]
    assert document["sync_time_s"] == max(plan.iteration_time for plan in plans)
    assert [entry["count"] for entry in document["replicas"]] == [1, 2]
    assert document["savings_percent"] > 0
    says(done("simulate plan.json --replica plan.replica1.json"), "all end at")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--replica-profile slow.csv:0", "from 1 up"),
        ("--replica-profile slow.csv:x", "PROFILE:COUNT"),
        ("--replica-profile gone.csv", "gone.csv"),
        ("--replica-profile slow.csv --clocks c.csv", "a plan for each"),
        ("--replica-profile three.csv", "3 stages"),
    ],
)
def test_replicas_that_cannot_be_are_refused(folder: Path, options: str, words: str) -> None:
    refused(f"solve {options}", words)
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize("planner", ["envpipe", "max_frequency"])
def test_other_planners_plan_unlike_replicas_too(folder: Path, planner: str) -> None:
    solve = "solve --replica-profile slow.csv:2 -m 4"
    own, theirs = told(solve), told(f"{solve} --planner {planner} --price 0.1")
    assert theirs["energy_lower_bound_j"] <= theirs["energy_j"]
    assert own["energy_j"] <= theirs["energy_j"] or own["sync_time_s"] < theirs["sync_time_s"]
    if planner == "max_frequency":
        assert theirs["savings_percent"] == 0
    plans = [Plan.load(folder / name) for name in ("plan.json", "plan.replica1.json")]
    assert [plan.planner for plan in plans] == [planner, planner]
    done("simulate plan.json --replica plan.replica1.json")


def test_replicas_on_other_hardware_can_be_tried_out_beside_a_plan(folder: Path) -> None:
    done("solve --slowdown 5 --recompute")
    plan = Plan.load(folder / "plan.json")
    for name, count in (("slow.csv", 1), ("fast.csv:3", 3)):
        document = told("simulate plan.json --replica-profile", name)
        first, other = document["replicas"]["replicas"]
        assert first["iteration_time_s"] == plan.iteration_time
        assert other["count"] == count
        assert (other["iteration_time_s"] > plan.iteration_time) == (name == "slow.csv")
        assert (first["waiting_energy_j"] > 0) == (name == "slow.csv")


@pytest.mark.parametrize("options", ["--noise 2", "--switch-latency 5", "--sync-time 9", "--dp 4"])
def test_replicas_meet_what_the_plan_meets(folder: Path, options: str) -> None:
    done("solve --slowdown 5")
    document = told("simulate --replica plan.json", *options.split())
    together = document["replicas"]
    assert together["sync_time_s"] == document["sync_time_s"]
    assert together["energy_j"] == pytest.approx(2 * document["energy_j"])
    assert together["savings_percent"] > 0
