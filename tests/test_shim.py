"""The shim on one rank: clocks as planned, and nothing that stops training."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.devices import opened
from envplan.devices.guard import CounterReading
from envplan.enforce.freqplan import OperationKey, StageEnergy
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.runtime import Shim
from envplan.runtime.iteration_energy import IterationEnergyMeter
from envplan.runtime.run_log_reader import iterations_of_plan, read_run_log
from envplan.runtime.run_records import StepRecord
from fake_nvml import UNKNOWN, FakeNvml, fake_nvml, wait_for
from shim_helpers import A40, CLOCKS, frequency_plan, logged_lines

__all__ = ["fake_nvml"]

PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=3)


def started(folder: Path, plan: Any = None, **options: Any) -> Shim:
    defaults = {"rank": 0, "world_size": 2, "every_request": True, "log": folder / "run.jsonl"}
    return Shim(plan or frequency_plan(PIPELINE), **{**defaults, **options})


def run(shim: Shim, *keys: tuple[Any, ...]) -> None:
    for key in keys:
        shim.begin(*key)
        shim.end(*key)


def run_step(shim: Shim) -> None:
    run(shim, *(operation[:3] for operation in shim.plan.ranks[shim.rank].operations))
    shim.step()


def lines(folder: Path, event: str, *, is_ended: bool = True) -> list[dict[str, Any]]:
    logged = logged_lines(folder / "run.jsonl", is_ended=is_ended)
    return [line for line in logged if line["event"] == event]


def wait_until_set(shim: Shim) -> None:
    """Until all clocks that were asked for have been set."""
    guard = shim.guard
    assert guard is not None
    wait_for(lambda: guard.problems() == [] and not shim.has_unset_requests())


def told_of_an_error(shim: Shim) -> bool:
    """After another step."""
    run_step(shim)
    return shim.clock_errors > 0


def merged(clocks: list[int]) -> list[int]:
    """Without what asks for the clock there already is."""
    return [mhz for k, mhz in enumerate(clocks) if k == 0 or mhz != clocks[k - 1]]


def set_clocks(fake: FakeNvml, index: int = 0) -> list[int]:
    """Clocks that were set, without resets."""
    return [mhz for mhz in fake.clock_changes(index) if mhz]


def test_clocks_set_are_those_of_the_plan_and_then_given_back(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path) as shim:
        planned = shim.plan.ranks[0].frequencies
        for _ in range(3):
            run_step(shim)
    assert set_clocks(fake_nvml) == merged(3 * planned)
    assert fake_nvml.locked(0) is None
    assert fake_nvml.clock_changes()[-1] == 0
    with started(tmp_path, frequency_plan(PIPELINE, clocks=(1260,))) as shim:
        for _ in range(5):
            run_step(shim)
    # What follows the first step, until that turns out to take no time, runs at the highest clock.
    assert set_clocks(fake_nvml) == [*merged(3 * planned), 1260, 1740, 1260]


def test_operation_out_of_order_runs_the_rest_of_the_step_at_the_highest_clock(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        planned = shim.plan.ranks[0].frequencies
        run(shim, ("forward", 0), ("backward", 2), ("backward", 1))
        shim.step()
        run_step(shim)
        assert shim.mismatches == 1
    assert set_clocks(fake_nvml) == merged([planned[0], 1740, *planned])
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[1] == (
        "rank 0: followed 1 of 2 iterations; 1 at full speed: other order of operations"
    )
    assert "the plan has forward 1 next, but begin of backward 2 came" in caplog.text
    assert lines(tmp_path, "mismatch")[0]["expected"] == ["forward", 1, 0]


def test_iterations_of_which_nobody_tells_run_at_the_highest_clock(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    clocks = (1260, 1500)
    with started(tmp_path, frequency_plan(PIPELINE, clocks=clocks)) as shim:
        for _ in range(3):
            shim.iteration_begins()
            run_step(shim)
        shim.iteration_begins()  # such as one that a CUDA graph is captured in
        shim.step()
        wait_until_set(shim)
        for _ in range(3):  # and those in which it is replayed
            assert fake_nvml.locked() == 1740
            shim.iteration_begins()
            wait_until_set(shim)
            assert fake_nvml.locked() == 1740
            shim.step()
        run_step(shim)
        wait_until_set(shim)
        planned = shim.plan.ranks[0].frequencies
    changes = set_clocks(fake_nvml)
    last_full_speed = len(changes) - changes[::-1].index(1740)
    assert changes[last_full_speed:][: len(planned)] == planned


def test_order_that_does_not_fit_for_many_steps_is_logged_once_and_the_plan_comes_back(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        planned = shim.plan.ranks[0].frequencies
        for _ in range(10):
            run(shim, ("backward", 0))
            shim.step()
        run_step(shim)
    assert set_clocks(fake_nvml) == merged([1740, *planned, 1740])
    said_once, counted = caplog.messages
    assert "begin of backward 0 came" in said_once
    assert counted.endswith(
        "followed 1 of 11 iterations; 10 at full speed: other order of operations"
    )
    (end,) = lines(tmp_path, "end")
    assert end["mismatches"] == 10
    assert end["iterations"] == {"other order of operations": 10, "followed": 1}


def operations_of(num_microbatches: int, stage: int) -> list[tuple[str, int, int]]:
    pipeline = Pipeline("1f1b", num_stages=2, num_microbatches=num_microbatches)
    return [
        (operation.instruction, operation.microbatch, operation.chunk)
        for operation in pipeline.operations
        if operation.stage == stage
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_of_other_numbers_of_microbatches_are_followed_as_far_as_their_order_is_known(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    with started(tmp_path, rank=rank) as shim:
        planned = shim.plan.ranks[rank].operations
        clock_of = {operation.key: operation.frequency_mhz for operation in planned}
        expected = []
        for num_microbatches in (1, 2, 3, 5, 3):
            for key in operations_of(num_microbatches, rank):
                run(shim, key)
                expected.append(clock_of.get(OperationKey(*key), 1740))
            shim.step()
            expected.append(1740)
        assert shim._status.status.unfollowed == {"other number of microbatches": 3}
        expected[-1] = planned[0].frequency_mhz  # steps have turned out to follow at once
        assert shim.mismatches == 0
    assert set_clocks(fake_nvml, rank) == merged(expected)
    (end,) = lines(tmp_path, "end")
    assert end["iterations"] == {"other number of microbatches": 3, "followed": 2}
    if rank == 0:
        (counted,) = caplog.messages
        assert counted.endswith(
            "followed 2 of 5 iterations; 3 as far as their order is known: other number of "
            "microbatches"
        )


def test_an_exception_costs_the_step_that_it_comes_in_only(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path) as shim:
        run_step(shim)
        run(shim, *shim.operations[:3])
        shim.begin(*shim.operations[3])  # it does not end, and neither does the step
        run_step(shim)
        run_step(shim)
    (end,) = lines(tmp_path, "end")
    assert end["iterations"] == {"followed": 3, "cut short": 1}
    assert [line["step"] for line in lines(tmp_path, "step")] == [0, 2, 3]


def test_too_few_and_too_many_operations_are_mismatches(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        shim.begin("forward", 0)
        shim.step()
        assert shim.mismatches == 1
        run(shim, *shim.operations)
        shim.begin("optimizer", 0)
        assert shim.mismatches == 2
    assert "but the step's end came" in caplog.text


def test_iterations_that_are_never_followed_take_no_memory(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path) as shim:
        for _ in range(40):
            run(shim, *shim.operations[:3])
            wait_until_set(shim)
            shim.step()
        assert shim.mismatches == 40
        assert shim.guard is not None
        assert len(shim.guard.lags) < 10


def test_straggler_switches_to_the_slowest_rung_in_time_at_the_next_step(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    plan = frequency_plan(PIPELINE, rung_times=(1.1, 1.2, 1.3))
    with started(tmp_path, plan) as shim:
        rungs = [plan.ranks[0].frequencies]
        rungs += [rung.frequencies_mhz[0] for rung in plan.ladder or []]
        wanted = []
        for seconds, rung in ((1.25, 0), (0.5, 2), (99.0, 0), (None, 3), (1.1, 0), (math.nan, 1)):
            shim.set_straggler_time(seconds)
            run_step(shim)
            wanted += rungs[rung]
    assert set_clocks(fake_nvml) == merged(wanted)


def test_clock_errors_at_random_do_not_stop_training_and_are_reported(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        fake_nvml.fail("lock", UNKNOWN, probability=0.3)
        for _ in range(40):
            run_step(shim)
            time.sleep(0.002)
        assert shim.steps == 40
    assert fake_nvml.locked(0) is None
    (report,) = caplog.messages
    assert "clock errors in 40 steps, the first:" in report
    assert lines(tmp_path, "clock_error")
    assert lines(tmp_path, "end")[0]["clock_errors"] >= len(lines(tmp_path, "clock_error"))


def test_clocks_are_not_logged_as_planned_while_they_cannot_be_set(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path) as shim:
        assert not told_of_an_error(shim)
        wait_until_set(shim)
        fake_nvml.fail("lock")
        wait_for(lambda: told_of_an_error(shim))
        told = shim.steps
        for _ in range(3):
            run_step(shim)
        assert shim.clock_errors == 1
    clocks = [{mhz for _, _, mhz, *_ in line["operations"]} for line in lines(tmp_path, "step")]
    assert 0 not in clocks[0]
    for step in clocks[told:]:
        assert 0 in step
        assert len(step) <= 2  # what was set last may be what is asked for


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("permission", "may not set clocks"),
        ("guard", "the clock guard cannot be started"),
        ("driver", "the clock guard does not answer"),
    ],
)
def test_without_permission_guard_or_driver_training_goes_on_and_one_line_says_why(
    fake_nvml: FakeNvml,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    lacks: str,
    why: str,
) -> None:
    if lacks == "guard":
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    elif lacks == "driver":
        monkeypatch.setattr("envplan.devices.guard.START_TIMEOUT_S", 0.3)
        fake_nvml.hang("init")
    else:
        fake_nvml.gpu(0).permission = 0
    with started(tmp_path) as shim:
        run_step(shim)
    (said,) = caplog.messages
    assert "clocks are left alone: " in said
    assert "\n" not in said
    assert set_clocks(fake_nvml) == []
    (step,) = lines(tmp_path, "step")
    assert {mhz for _, _, mhz, *_ in step["operations"]} == {0}
    (error,) = lines(tmp_path, "clock_error")
    assert why in error["message"]


def test_killed_guard_leaves_training_running_and_its_clock_is_given_back(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path) as shim:
        run_step(shim)
        wait_for(lambda: fake_nvml.locked(0) is not None)
        guard = shim.guard
        assert guard is not None
        os.kill(guard.pid, signal.SIGKILL)
        wait_for(lambda: fake_nvml.locked(0) is None)  # without another call
        wait_for(lambda: not guard.alive)
        run_step(shim)
    assert fake_nvml.locked(0) is None
    assert lines(tmp_path, "end")[0]["clock_errors"] == 1
    *_, last = lines(tmp_path, "step")
    assert {mhz for _, _, mhz, *_ in last["operations"]} == {0}


def test_driver_that_hangs_is_no_success(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.devices.guard.ACKNOWLEDGE_TIMEOUT_S", 0.1)
    with started(tmp_path) as shim:
        run_step(shim)
        wait_until_set(shim)
        fake_nvml.hang("lock")
        wait_for(lambda: told_of_an_error(shim))
        fake_nvml.hang()
    clocks = [{mhz for _, _, mhz, *_ in line["operations"]} for line in lines(tmp_path, "step")]
    assert 0 not in clocks[0]
    assert {0} in clocks
    (error,) = lines(tmp_path, "clock_error")
    assert error["message"].startswith("GPU 0: the clock asked for")
    assert lines(tmp_path, "end")[0]["clock_errors"] == 1


def test_energy_of_steps_is_measured_and_set_against_the_plan(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    energy = StageEnergy(planned_j=8.0, baseline_j=10.0)
    plan = frequency_plan(PIPELINE, stage_energy=energy)
    seen: list[StepRecord] = []
    used = 0.0
    with started(tmp_path, plan, on_step=seen.append) as shim:
        for _ in range(3):
            before = read_energy(fake_nvml)
            shim.begin(*shim.operations[0])
            time.sleep(0.4)
            shim.end(*shim.operations[0])
            run(shim, *shim.operations[1:])
            shim.step()
            used += read_energy(fake_nvml) - before
            time.sleep(0.2)  # an evaluation, which is not the plan's
    (end,) = lines(tmp_path, "end")
    assert end["joules"] == pytest.approx(used, rel=0.3)
    assert (end["planned_joules"], end["baseline_joules"]) == (24.0, 30.0)
    assert [record.energy.baseline_j for record in seen] == [10.0, 20.0, 30.0]
    (said,) = [record.message for record in caplog.records if "steps used" in record.message]
    assert f"3 steps used {end['joules']:.0f} J by the GPU's own counter" in said
    assert "where the plan says 1 s, so the profile's energies are not this job's" in said


def test_savings_are_said_where_steps_take_as_long_as_planned() -> None:
    meter = IterationEnergyMeter(StageEnergy(planned_j=8.0, baseline_j=10.0))
    assert meter.summary(0.4) is None
    meter.add_reading(CounterReading(0, 0))
    for step in range(3):
        meter.add_iteration(step * 400_000_000, (step + 1) * 400_000_000)
    meter.add_reading(CounterReading(1_200_000_000, 21_000))
    assert meter.summary(0.4) == (
        "3 steps used 21 J by the GPU's own counter; at the highest clocks the profile says 30 J, "
        "so 30.0% were saved; the plan says 20.0%"
    )


def read_energy(fake: FakeNvml) -> float:
    with opened("nvml") as source:
        return source.devices()[0].energy() / 1e3


@given(
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 50), min_size=30, max_size=30),
    readings=st.lists(st.integers(0, 3000), min_size=2, unique=True).map(sorted),
)
def test_joules_of_steps_are_those_between_readings(
    steps: list[int], gaps: list[int], readings: list[int]
) -> None:
    def counter(at: int) -> int:  # 2 mJ per ns, and straight
        return 2 * at

    meter = IterationEnergyMeter(None)
    ends, now = [], 0
    for length, gap in zip(steps, gaps, strict=False):
        ends.append((now + gap, now + gap + length))
        now += gap + length
    events = [(end, begin, "step") for begin, end in ends] + [(at, at, "read") for at in readings]
    for end, begin, kind in sorted(events):
        if kind == "step":
            meter.add_iteration(begin, end)
        else:
            meter.add_reading(CounterReading(end, counter(end)))
    # Steps that ended before the second reading came count nothing.
    known = [s for s in zip(steps, ends, strict=True) if s[1][1] > readings[0]]
    assert meter.totals.used_j == pytest.approx(2e-3 * sum(length for length, _ in known))
    assert meter.summary(1.0) is None


def test_on_step_that_fails_is_left_out(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, on_step=lambda _: 1 / 0) as shim:
        run_step(shim)
        run_step(shim)
    assert caplog.text.count("on_step is not called again") == 1
    assert len(lines(tmp_path, "step")) == 2


def test_shim_that_never_sees_an_operation_says_so_on_rank_0(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        started(tmp_path, rank=rank, log=None).close()
    (said,) = caplog.messages
    assert said.startswith("rank 0: no operation was seen at all")


def test_steps_without_operations_are_told_after_a_few_and_at_the_end(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        run_step(shim)
        for _ in range(2):
            shim.step()
        assert caplog.records == []
        for _ in range(10):
            shim.step()
        assert ["no operation was seen in 3 steps" in said for said in caplog.messages] == [True]
    assert caplog.messages[1].startswith("rank 0: no operation was seen in 12 steps")


def test_operations_that_the_shim_is_not_told_of_are_named_once_and_at_the_end(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as shim:
        for _ in range(5):
            shim.missed("enter follow first")
        assert len(caplog.records) == 1
    assert caplog.messages == [
        "rank 0: the plan is not followed: enter follow first",
        "rank 0: the plan was not followed: enter follow first",
    ]


def test_config_of_the_operation_that_runs_is_told(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    plan = frequency_plan(PIPELINE, rung_times=(1.5,), configs=("tiles-64", "tiles-128", "split-k"))
    ladder: Any = plan.ladder
    with started(tmp_path, plan) as shim:
        for planned in (plan.ranks[0].configs, ladder[0].configs[0]):
            told = []
            for instruction, microbatch, chunk, _ in plan.ranks[0].operations:
                shim.begin(instruction, microbatch, chunk)
                told.append(shim.config)
                shim.end(instruction, microbatch, chunk)
            assert told == planned
            assert shim.config == ""
            shim.set_straggler_time(2.0)
            shim.step()
        shim.begin("optimizer", 0)
        assert shim.config == ""
    with started(tmp_path, log=None) as without:
        without.begin("forward", 0)
        assert without.config == ""
    logged = [operation[6] for operation in lines(tmp_path, "step")[0]["operations"]]
    assert set(logged) == {"tiles-64", "tiles-128", "split-k"}


@pytest.mark.parametrize(
    ("plan", "job", "words"),
    [
        ({}, {"world_size": 8}, "is for 2 ranks, but the job has 8"),
        ({}, {"rank": 2}, "rank 2 is not in the frequency plan"),
        ({}, {"rank": -1}, "rank -1 is not in the frequency plan"),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, {}, "for NVIDIA H100.* the GPU here is NVIDIA A40"),
        ({"clocks": (1741, 780)}, {}, "1741 MHz, which the NVIDIA A40 does not have"),
    ],
)
def test_plan_for_another_job_or_gpu_is_refused(
    fake_nvml: FakeNvml, tmp_path: Path, plan: dict[str, Any], job: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        started(tmp_path, frequency_plan(PIPELINE, **plan), **job)
    assert fake_nvml.calls() == []
    with started(tmp_path, frequency_plan(PIPELINE, gpu=A40)) as shim:
        run_step(shim)


def test_gpu_that_cuda_hides_from_the_job_is_left_alone(
    fake_nvml: FakeNvml,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with started(tmp_path) as shim:
        run_step(shim)
    assert "GPU 0, which the plan names, is hidden by CUDA_VISIBLE_DEVICES=2,3" in caplog.text
    assert fake_nvml.calls() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # the only one is its own in any case
    with started(tmp_path) as shim:
        run_step(shim)
    assert {call.gpu for call in fake_nvml.calls()} == {3}
    assert set_clocks(fake_nvml, 3) == merged(shim.plan.ranks[0].frequencies)


def test_rank_nobody_told_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun"):
        Shim(frequency_plan(PIPELINE))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Shim(frequency_plan(PIPELINE)) as shim:
        assert shim.rank == shim.stage == 1


def test_log_beside_the_plan_has_times_by_kind_and_what_was_in_force_and_is_handed_over(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    path = tmp_path / "run.freqplan.json"
    frequency_plan(PIPELINE).save(path)
    seen: list[StepRecord] = []
    with Shim(path, rank=1, world_size=2, every_request=True, on_step=seen.append) as shim:
        run_step(shim)
        run_step(shim)
    (start,) = lines(tmp_path, "start")
    assert start["plan_sha256"] == shim.plan.plan_sha256
    steps = lines(tmp_path, "step")
    assert [line["step"] for line in steps] == [0, 1]
    count = {(op[0], op[1], op[2]): op[3] for op in steps[0]["operations"]}
    operations = len(shim.plan.ranks[1].operations)
    assert sum(count.values()) == operations
    for line in steps:
        assert (line["asked"], line["in_force"], line["mismatches"]) == (operations, operations, 0)
        assert line["lag_s"] > 0
    assert [record.to_dict() for record in seen] == steps
    assert all(mean >= least > 0 for *_, mean, least in steps[0]["operations"])


def test_log_that_is_full_goes_on_in_a_file_of_its_own(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    with started(tmp_path, log_limit=4000) as shim:
        for _ in range(50):
            run_step(shim)
            wait_for(shim.log_is_idle)
    first, own, old = sorted(tmp_path.glob("run.jsonl*"))
    assert [own.name, old.name] == ["run.jsonl.rank0", "run.jsonl.rank0.old"]
    assert all(file.stat().st_size < 6000 for file in (first, own, old))
    kept = list(iterations_of_plan(read_run_log([first, old, own]), shim.plan.plan_sha256))
    assert kept[0].step == 0
    assert kept[-1].step == 49
    newest = list(read_run_log([own]))
    assert (newest[0].event, newest[-1].event) == ("start", "end")


# Writes many lines in pieces, as a network file system may, and is killed in one of them or not.
APPENDS = """
import os, random, sys, time
from envplan._io import files as _files
write, chance = os.write, random.Random(sys.argv[2])

def in_pieces(descriptor, data):
    time.sleep(chance.random() / 2000)
    if chance.random() < float(sys.argv[3]):
        write(descriptor, data[:3])
        os.kill(os.getpid(), 9)
    return write(descriptor, data[: chance.randrange(1, 20)])

_files.os.write = in_pieces
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND)
for k in range(100):
    _files.append_line(descriptor, b"%s %d end\\n" % (sys.argv[2].encode() * 10, k))
"""


def test_lines_of_several_ranks_are_whole_where_appending_is_not_atomic(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", APPENDS, str(log)]
    ranks = [
        subprocess.Popen([*command, name, chance])
        for name, chance in (("a", "0"), ("b", "0"), ("c", "0"), ("d", "0.01"), ("e", "0.01"))
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0, 0, -9, -9]
    text = log.read_text()
    found = [line.split() for line in text.splitlines()]
    if not text.endswith("\n"):  # a rank that was killed as the last one to write
        found.pop()
    for name in "abc":
        assert [int(k) for word, k, _ in found if word == name * 10] == list(range(100))
    assert {word for word, _, _ in found} <= {name * 10 for name in "abcde"}
    assert {end for *_, end in found} == {"end"}


def test_log_that_cannot_be_written_is_done_without(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, log=tmp_path / "none" / "run.jsonl") as shim:
        run_step(shim)
    assert "no run log" in caplog.text
    assert set_clocks(fake_nvml)


class DeviceMoment:
    """A moment on a device that comes when the test says so."""

    come = threading.Event()

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.come.wait(120)

    def elapsed_time(self, end: DeviceMoment) -> float:
        return 1e3 * (end.at - self.at)


def test_clocks_wait_for_the_device_while_training_runs_ahead(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    DeviceMoment.come.clear()
    with started(tmp_path, marker=DeviceMoment) as shim:
        run_step(shim)
        run_step(shim)
        assert set_clocks(fake_nvml) == []
        DeviceMoment.come.set()
        planned = merged(2 * shim.plan.ranks[0].frequencies)
        wait_for(lambda: set_clocks(fake_nvml) == planned)
    assert len(lines(tmp_path, "step")) == 2


def test_device_that_hangs_does_not_keep_the_clock(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.runtime.clock_requester.THREAD_TIMEOUT_S", 0.2)
    DeviceMoment.come.set()
    with started(tmp_path, marker=DeviceMoment) as shim:
        run_step(shim)
        wait_for(lambda: fake_nvml.locked(0) is not None)
        DeviceMoment.come.clear()
        run_step(shim)
        freed: list[float | None] = []

        def let_go() -> None:
            freed.append(fake_nvml.wait_until_free(60))
            DeviceMoment.come.set()

        waiting = threading.Thread(target=let_go)
        waiting.start()
    waiting.join()
    assert freed[0] is not None
    first, second = lines(tmp_path, "step")
    assert first["in_force"] > 0
    assert second["in_force"] <= 1  # it begins at the clock that the first one ended with


def test_evaluation_runs_at_the_highest_clock(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    with started(tmp_path, frequency_plan(PIPELINE, clocks=CLOCKS[1:])) as shim:
        run_step(shim)
        shim.full_speed()
        wait_for(lambda: fake_nvml.locked(0) == 1740)


def test_clock_error_is_logged_with_the_step_that_the_device_had_got_to(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    DeviceMoment.come.clear()
    with started(tmp_path, marker=DeviceMoment) as shim:
        for _ in range(3):
            run_step(shim)  # the training thread is ahead of the device
        guard = shim.guard
        assert guard is not None
        os.kill(guard.pid, signal.SIGKILL)
        # Its watcher has another process give the clock back, and then has a problem to tell.
        wait_for(lambda: "envplan-guard" not in [thread.name for thread in threading.enumerate()])
        DeviceMoment.come.set()
        wait_for(lambda: shim.clock_errors > 0)
    (error,) = lines(tmp_path, "clock_error")
    assert error["step"] == 0


#: A rank that follows a plan until somebody kills it.
RANK = """
import sys, time
from envplan.runtime import Shim

with Shim(sys.argv[1], rank=0, world_size=2) as shim:
    while True:
        for key in shim.operations:
            shim.begin(*key)
            time.sleep(0.001)
            shim.end(*key)
        shim.step()
"""


def test_a_rank_that_is_killed_and_started_again_follows_again(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    path = tmp_path / "run.freqplan.json"
    frequency_plan(PIPELINE).save(path)

    def num_logged_steps() -> int:
        return len(lines(tmp_path, "step", is_ended=False))

    for _ in range(2):  # as Ray, torchrun's elastic restart and a requeue of Slurm do
        num_steps = num_logged_steps() if (tmp_path / "run.jsonl").exists() else 0
        process = subprocess.Popen([sys.executable, "-c", RANK, str(path)])
        wait_for((tmp_path / "run.jsonl").exists)
        wait_for(lambda before=num_steps: num_logged_steps() > before + 5)
        process.kill()
        process.wait()
    with Shim(path, rank=0, world_size=2, every_request=True) as shim:  # at once
        assert shim.guard is not None
        run_step(shim)
    assert fake_nvml.wait_until_free(10) is not None
    assert len(lines(tmp_path, "start")) == 3
    assert lines(tmp_path, "step")[-1]["in_force"] == len(shim.operations)
