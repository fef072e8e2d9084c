"""torch.distributed.pipelining under frequency plans: four real processes on fake GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from cli_helpers import envplan
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from fake_nvml import FakeNvml, fake_nvml, open_fake_nvml
from shim_helpers import A40, Listener, assert_follows, frequency_plan, logged_lines

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from envplan.runtime.frameworks import StragglerWatch
from envplan.runtime.torch import attach
from torch_jobs import RANKS, run, start, stop  # they import torch
from torch_worker import CHUNKED, FOLDED, PROFILED, STEPS, duration

__all__ = ["fake_nvml"]

PIPELINES = {
    "gpipe": Pipeline("gpipe", num_stages=RANKS, num_microbatches=8),
    "1f1b": Pipeline("1f1b", num_stages=RANKS, num_microbatches=8),
    **{
        name: Pipeline(name, num_stages=RANKS, num_microbatches=8, num_chunks=2) for name in CHUNKED
    },
}


def write_plans(folder: Path) -> None:
    for name, pipeline in PIPELINES.items():
        frequency_plan(pipeline, gpu=A40).save(folder / f"{name}.freqplan.json")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, FakeNvml, Path]]:
    """Every schedule, run without and with the shim."""
    folder = tmp_path_factory.mktemp("compared")
    write_plans(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake = open_fake_nvml(folder, monkeypatch, count=RANKS)
        yield run("compare", folder), fake, folder
        fake.close()


@pytest.mark.parametrize("name", PIPELINES)
def test_losses_and_weights_are_bit_identical(
    compared: tuple[Any, FakeNvml, Path], name: str
) -> None:
    for rank, result in enumerate(compared[0]):
        before, after = result[f"{name} without"], result[f"{name} with"]
        assert after["losses"] == before["losses"]
        assert after["weights"] == before["weights"]
        has_loss = rank == (0 if name in FOLDED else RANKS - 1)
        assert [len(step) for step in after["losses"]] == STEPS * [8 if has_loss else 0]
        assert after["mismatches"] == 0


@pytest.mark.parametrize("name", PIPELINES)
def test_order_that_is_recorded_is_the_schedules(
    compared: tuple[Any, FakeNvml, Path], name: str
) -> None:
    recorded = Pipeline.from_dag_file(compared[2] / f"{name}.dag.json")
    assert recorded.operations == PIPELINES[name].operations


@pytest.mark.parametrize("position", range(len(PIPELINES)))
@pytest.mark.parametrize("rank", range(RANKS))
def test_clocks_set_are_those_of_the_plan(
    compared: tuple[Any, FakeNvml, Path], rank: int, position: int
) -> None:
    pipeline = list(PIPELINES.values())[position]
    planned = frequency_plan(pipeline).ranks[rank].frequencies
    text = ",".join(map(str, compared[1].clock_changes(rank)))
    runs = [run.strip(",") for run in f",{text},".split(",0,")]
    changes = [int(mhz) for mhz in [run for run in runs if run][position].split(",")]
    assert_follows(changes, STEPS * [planned])


def test_all_ranks_log_whole_lines_into_one_file_and_give_their_clocks_back(
    compared: tuple[Any, FakeNvml, Path],
) -> None:
    assert [compared[1].locked(rank) for rank in range(RANKS)] == [None] * RANKS
    lines = logged_lines(compared[2] / "1f1b.jsonl")
    steps = sorted((line["rank"], line["step"]) for line in lines if line["event"] == "step")
    assert steps == [(rank, step) for rank in range(RANKS) for step in range(STEPS)]


def test_evaluation_runs_at_the_highest_clock_and_is_no_mismatch(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    write_plans(tmp_path)
    for result in run("evaluate", tmp_path):
        assert result == {"mismatches": 0, "asked": 1740, "steps": 2}


def test_late_pipeline_slows_the_other_and_not_itself_until_it_is_back(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    plan = frequency_plan(
        Pipeline("1f1b", num_stages=2, num_microbatches=8), dp=2, rung_times=(1.5, 9.0)
    )
    plan.save(tmp_path / "ladder.freqplan.json")
    followed = [result["followed"] for result in run("straggle", tmp_path)]
    for rank in (0, 1):
        assert 1.5 in followed[rank][6:16], followed
        assert 1.0 in followed[rank][16:], followed
    for rank in (2, 3):
        assert set(followed[rank][4:14]) == {1.0}, followed


def test_job_profiles_itself_and_the_profile_is_planned_with(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    for rank in (0, 1):
        fake_nvml.gpu(rank).activity = 0.4  # of the power that the clock allows
    run("profile_itself", tmp_path, ranks=2)
    assert fake_nvml.wait_until_free(10) is not None
    written = sorted(path.name for path in tmp_path.glob("profile.*"))
    assert written == ["profile.csv", "profile.meta.json"]

    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert profile.num_stages == 4
    assert profile.metadata.num_microbatches == 8
    assert profile.metadata.schedule == "interleaved"
    for stage in range(4):
        for instruction, factor in (("forward", 1), ("backward", 2)):
            table = profile.table(stage, instruction)
            assert sorted(table.frequency_mhz.tolist()) == sorted(PROFILED)
            for mhz, time_ns in zip(table.frequency_mhz, table.time_ns, strict=True):
                assert time_ns >= factor * duration(stage, int(mhz)) * 1e9
    # Where other work keeps the machine busy, the counter is read seldom, and rows say how unsure
    # they are for that.
    rows = pd.read_csv(tmp_path / "profile.csv").query("instruction != 'blocking'")
    for row in rows.itertuples():
        watts = fake_nvml.model.uncapped_power_w(row.frequency, 0.4)
        error = row.energy_std / row.samples**0.5 / row.time
        assert row.energy / row.time == pytest.approx(watts, abs=0.05 * watts + 4 * error)
    for _, alike in rows.groupby("frequency"):
        watts = fake_nvml.model.uncapped_power_w(alike.frequency.iloc[0], 0.4)
        assert alike.energy.sum() / alike.time.sum() == pytest.approx(watts, rel=0.25)
    assert profile.blocking_power_w is not None
    for command in (["check", "profile.csv"], ["frontier", "--chunks", "2"]):
        done = envplan(*command, cwd=tmp_path)
        assert done.code == 0, done.err


class Stage:
    """A stage whose operations do nothing."""

    has_backward = True

    def forward_one_chunk(self, _microbatch: int) -> None:
        pass

    backward_one_chunk = backward_weight_one_chunk = forward_one_chunk


class Schedule:
    """A schedule of one forward."""

    _has_backward = True

    def __init__(self) -> None:
        self._stage = Stage()

    def step(self) -> None:
        self._stage.forward_one_chunk(0)


def test_step_that_was_taken_before_is_told_of() -> None:
    schedule, listener = Schedule(), Listener()
    taken = schedule.step
    hooks = attach(listener, schedule)
    taken()
    schedule.step()
    hooks.close()
    schedule.step()
    why = "missed: the schedule's step was taken before this was entered; enter it before"
    assert listener.heard == [why, ("forward", 0, 0), "step"]
    assert vars(schedule._stage) == {}


def test_all_clocks_are_given_back_when_one_rank_is_killed(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    write_plans(tmp_path)
    processes = start("run_on", tmp_path)
    try:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("running.*"))) < RANKS:
            assert time.monotonic() < end, (tmp_path / "run_on.err").read_text()
            time.sleep(0.01)
        assert any(fake_nvml.locked(rank) for rank in range(RANKS))
        processes[2].kill()
        assert fake_nvml.wait_until_free(timeout=120) is not None
    finally:
        stop(processes)


class Gather:
    """An exchange whose result has arrived after some looks at it, or once it is waited for."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.looks = 0


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_ranks_of_a_pipeline_change_plans_in_the_same_iteration_whenever_results_arrive(
    monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    def all_gather(times: list[Any], own_time: Any, **_: Any) -> Gather:
        for arrived, value in zip(times, (1.0, 1.0, 1.3, 1.3), strict=True):
            arrived.fill_(value)
        return Gather(looks)

    distributed = SimpleNamespace(new_group=lambda **_: None, all_gather=all_gather)
    monkeypatch.setattr("envplan.runtime.frameworks.dist", distributed)
    told: list[tuple[int, float | None]] = []
    shim: Any = SimpleNamespace(
        rank=0,
        planned_time=1.0,
        last_iteration=None,
        plan=SimpleNamespace(layout=SimpleNamespace(pipelines=[0, 0, 1, 1])),
        set_straggler_time=lambda seconds: told.append((len(steps), seconds)),
    )
    watch = StragglerWatch(shim)
    steps: list[None] = []
    for _ in range(6):
        watch.after_iteration()
        steps.append(None)
    assert told == [(2, None), (3, None), (4, 1.3), (5, 1.3)]
