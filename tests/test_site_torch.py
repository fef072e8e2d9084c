"""Demand response end to end: PyTorch jobs on CPUs and fake GPUs follow a site's orders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from envplan.enforce.order_file import Order
from envplan.site import SiteJob, read_jobs
from fake_nvml import FakeNvml, open_fake_nvml, wait_for
from site_helpers import Iteration, Watch, add_job, one_stage_profile, read_iterations

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch_jobs import start, stop  # they import torch
from torch_worker import MICROBATCHES

JOBS = ("a", "b", "c")
RANKS = 2
ACTIVITY = 0.4
CLOCKS = (1740, 1500, 1260, 1020, 780)


class Training:
    """Three jobs of two ranks that train, each rank with a GPU of its own."""

    def __init__(self, folder: Path, fake: FakeNvml) -> None:
        self.folder, self.fake = folder, fake
        (folder / "jobs").mkdir()
        for number, name in enumerate(JOBS):
            scale_s = 0.01 * (1 + 0.2 * number)
            profile = one_stage_profile(fake, ACTIVITY, scale_s, CLOCKS, stages=RANKS)
            add_job(folder / "jobs", name, profile, MICROBATCHES, rungs=8)
            (folder / name).mkdir()
            (folder / name / "first_gpu").write_text(str(RANKS * number))
        self.jobs: dict[str, SiteJob] = {job.name: job for job in read_jobs(folder / "jobs")}
        self.full_w = sum(
            max(point.power_w for point in job.plan_points()) for job in self.jobs.values()
        )
        self.ranks: dict[str, list[BaseProcess]] = {
            name: start("follow_orders", folder / name, RANKS) for name in JOBS
        }
        for name in JOBS:
            self.let_run(name, 3)

    def order(self, name: str) -> Order:
        return Order.load(self.folder / "orders" / f"{name}.order.json")

    def iterations(self, name: str, rank: int) -> list[Iteration]:
        return read_iterations(self.folder / name / f"steps.{rank}")

    def let_run(self, name: str, count: int) -> None:
        for rank in range(RANKS):
            before = len(self.iterations(name, rank))
            wait_for(lambda r=rank, n=before: len(self.iterations(name, r)) >= n + count)

    def wait_until_followed(self, name: str) -> None:
        """Until the ranks of a job run by the rung of its order, and have for an iteration."""
        planned_s = self.jobs[name].plans[self.order(name).rung].iteration_time_s
        for rank in range(RANKS):
            wait_for(
                lambda r=rank: (
                    [i.followed_s for i in self.iterations(name, r)][-2:] == [planned_s] * 2
                )
            )

    def assert_ranks_agree(self, name: str) -> None:
        """All ranks of a job have followed the same rung in each iteration."""
        first, second = (
            [(i.number, i.followed_s) for i in self.iterations(name, rank)] for rank in range(RANKS)
        )
        count = min(len(first), len(second))
        assert first[:count] == second[:count]

    def assert_within_two_iterations(self, name: str, written_at: float) -> None:
        """A job follows its order no later than two iterations after the one that ran then.

        Between two iterations it is the second that runs: the shim has logged the first one already
        when the rank has yet to write down that it begins the second.
        """
        for rank in range(RANKS):
            iterations = self.iterations(name, rank)
            running = 1 + max(i.number for i in iterations if i.begin_time <= written_at)
            now_s = iterations[-1].followed_s
            first = max((i.number for i in iterations if i.followed_s != now_s), default=-1) + 1
            assert first - running <= 2, (name, rank)

    def clocks_now(self, name: str) -> list[set[int]]:
        """For each rank the clocks that its GPU is set to during two iterations."""
        first_gpu = RANKS * JOBS.index(name)
        counts = [len(self.fake.clock_changes(first_gpu + rank)) for rank in range(RANKS)]
        self.let_run(name, 2)
        return [
            set(self.fake.clock_changes(first_gpu + rank)[counts[rank] - 1 :])
            for rank in range(RANKS)
        ]

    def planned_clocks(self, name: str) -> list[set[int]]:
        """For each rank the clocks of the rung that its order names."""
        rung = self.jobs[name].plans[self.order(name).rung]
        return [set(clocks) for clocks in rung.frequencies_mhz]

    def assert_clocks_are_planned(self, name: str) -> None:
        """That GPUs run at the rung's clocks, and between iterations at the highest at most."""
        for now, planned in zip(self.clocks_now(name), self.planned_clocks(name), strict=True):
            highest = {max(self.fake.model.clocks_mhz)}
            assert planned <= now <= planned | highest

    def end(self, name: str) -> None:
        (self.folder / name / "stop").touch()
        for process in self.ranks[name]:
            process.join(120)

    def close(self) -> None:
        for processes in self.ranks.values():
            stop(processes)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    fake = open_fake_nvml(tmp_path, monkeypatch, count=len(JOBS) * RANKS)
    training = Training(tmp_path, fake)
    yield training
    training.close()
    fake.close()


def test_jobs_follow_the_grid_while_one_is_killed_and_an_order_is_cut_short(
    training: Training,
) -> None:
    signal_file = training.folder / "signal"
    signal_file.write_text("100%")
    watch = Watch(training.folder, training.full_w, "--no-alternate")
    watch.wait_for("followed")

    signal_file.write_text("80%")
    written = watch.wait_for("orders")
    written_at = {
        order["job"]: (training.folder / "orders" / f"{order['job']}.order.json").stat().st_mtime
        for order in written["orders"]
    }
    watch.wait_for("followed")
    for name, time_s in written_at.items():
        training.wait_until_followed(name)
        training.assert_ranks_agree(name)
        training.assert_within_two_iterations(name, time_s)
    assert sum(training.order(name).power_w for name in JOBS) <= 0.8 * training.full_w * (1 + 1e-9)

    stop(training.ranks["c"])
    killed_gpus = [RANKS * JOBS.index("c") + rank for rank in range(RANKS)]
    wait_for(lambda: all(training.fake.locked(gpu) is None for gpu in killed_gpus))

    signal_file.write_text("70%")
    watch.wait_for("orders")
    os.truncate(training.folder / "orders" / "a.order.json", 50)
    assert watch.wait_for("rewritten")["jobs"] == ["a"]
    for name in ("a", "b"):
        training.wait_until_followed(name)
        training.assert_ranks_agree(name)
        training.assert_clocks_are_planned(name)
    assert sum(training.order(name).power_w for name in JOBS) <= 0.7 * training.full_w * (1 + 1e-9)

    assert watch.interrupt() == 0
    for name in ("a", "b"):
        training.end(name)
        for rank, process in enumerate(training.ranks[name]):
            assert process.exitcode == 0
            told = json.loads((training.folder / name / f"follow_orders.{rank}.json").read_text())
            assert told["mismatches"] == 0
    assert training.fake.wait_until_free(10) is not None
