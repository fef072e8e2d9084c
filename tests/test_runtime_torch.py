"""torch.distributed.pipelining under frequency plans: four real processes on fake GPUs."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml, fake_nvml, open_fake_nvml
from shim_helpers import A40, frequency_plan

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch_worker import work  # it imports torch

__all__ = ["fake_nvml"]

RANKS = 4
STEPS = 3
PIPELINES = {
    "gpipe": Pipeline("gpipe", num_stages=RANKS, num_microbatches=8),
    "1f1b": Pipeline("1f1b", num_stages=RANKS, num_microbatches=8),
    "interleaved": Pipeline("interleaved", num_stages=RANKS, num_microbatches=8, num_chunks=2),
}


def start(task: str, folder: Path) -> list[BaseProcess]:
    # Forked, because importing torch takes seconds and has been done here.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(task, folder, rank, RANKS)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    return list(ranks)


def run(task: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank says."""
    processes = start(task, folder)
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    stop(processes)
    assert codes == [0] * RANKS, (folder / f"{task}.err").read_text()
    return [json.loads((folder / f"{task}.{rank}.json").read_text()) for rank in range(RANKS)]


def stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


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
        assert all(len(step) == 8 for step in after["losses"]) or rank < RANKS - 1
        assert after["mismatches"] == 0


@pytest.mark.parametrize("position", range(len(PIPELINES)))
@pytest.mark.parametrize("rank", range(RANKS))
def test_clocks_set_are_those_of_the_plan(
    compared: tuple[Any, FakeNvml, Path], rank: int, position: int
) -> None:
    pipeline = list(PIPELINES.values())[position]
    planned = STEPS * frequency_plan(pipeline).ranks[rank].frequencies
    changes = [mhz for k, mhz in enumerate(planned) if k == 0 or mhz != planned[k - 1]]
    text = ",".join(map(str, compared[1].clock_changes(rank)))
    runs = [run.strip(",") for run in f",{text},".split(",0,")]
    assert [run for run in runs if run][position] == ",".join(map(str, changes))


def test_all_clocks_are_given_back_at_the_end(compared: tuple[Any, FakeNvml, Path]) -> None:
    assert [compared[1].locked(rank) for rank in range(RANKS)] == [None] * RANKS


def test_all_ranks_log_whole_lines_into_one_file(compared: tuple[Any, FakeNvml, Path]) -> None:
    lines = [json.loads(line) for line in (compared[2] / "1f1b.jsonl").read_text().splitlines()]
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
        assert followed[rank][-1] == 1.0
    for rank in (2, 3):
        assert set(followed[rank][4:14]) == {1.0}, followed


def test_all_clocks_are_back_within_a_second_of_one_rank_being_killed(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    write_plans(tmp_path)
    processes = start("run_on", tmp_path)
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("running.*"))) < RANKS:
            assert time.monotonic() < end, (tmp_path / "run_on.err").read_text()
            time.sleep(0.01)
        assert any(fake_nvml.locked(rank) for rank in range(RANKS))
        processes[2].kill()
        assert fake_nvml.wait_until_free(timeout=1.0) is not None
    finally:
        stop(processes)
