"""A site that follows a signal: eight running jobs on fake GPUs, each a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envplan.enforce.order_file import Order
from envplan.site import read_jobs
from fake_nvml import FakeNvml, open_fake_nvml, wait_for
from site_helpers import Iteration, Watch, add_job, one_stage_profile, read_iterations

JOBS = tuple("abcdefgh")
ACTIVITY = 0.4
CLOCKS = (1740, 1500, 1260, 1020, 780)
WORKER = Path(__file__).with_name("live_worker.py")


class Site:
    """Eight jobs that run, a GPU each."""

    def __init__(self, folder: Path, fake: FakeNvml) -> None:
        self.folder, self.fake = folder, fake
        (folder / "jobs").mkdir()
        for first, scale_s in ((0, 0.02), (1, 0.03)):
            profile = one_stage_profile(fake, ACTIVITY, scale_s, CLOCKS)
            add_job(folder / "jobs", JOBS[first], profile, 6, rungs=8)
            for name in JOBS[first + 2 :: 2]:
                for suffix in (".json", ".freqplan.json"):
                    shutil.copy(
                        folder / "jobs" / f"{JOBS[first]}{suffix}",
                        folder / "jobs" / f"{name}{suffix}",
                    )
        for device in range(len(JOBS)):
            fake.gpu(device).activity = ACTIVITY
        self.jobs = read_jobs(folder / "jobs")
        self.full_w = sum(max(point.power_w for point in job.plan_points()) for job in self.jobs)
        self.workers = {name: self._start(name) for name in JOBS}
        for name in JOBS:
            wait_for(lambda name=name: len(self.iterations(name)) > 2)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        freqplan = self.folder / "jobs" / f"{name}.freqplan.json"
        profile = self.folder / f"{JOBS[JOBS.index(name) % 2]}.csv"
        arguments = [str(WORKER), str(freqplan), str(profile)]
        arguments += [str(self.order_file(name)), str(JOBS.index(name))]
        arguments += [str(self.folder / f"{name}.steps")]
        return subprocess.Popen([sys.executable, *arguments])

    def order_file(self, name: str) -> Path:
        return self.folder / "orders" / f"{name}.order.json"

    def iterations(self, name: str) -> list[Iteration]:
        return read_iterations(self.folder / f"{name}.steps")

    def first_iteration_of(self, name: str) -> int:
        """The iteration of a job that its last order has really begun with."""
        (job,) = [job for job in self.jobs if job.name == name]
        time_s = job.plans[Order.load(self.order_file(name)).rung].iteration_time_s
        first = None
        for iteration in reversed(self.iterations(name)):
            if iteration.followed_s != time_s:
                break
            first = iteration.number
        assert first is not None, name
        return first

    def running_at(self, name: str, time_s: float) -> int:
        """The iteration of a job that ran at a time since 1970."""
        begun = [i.number for i in self.iterations(name) if i.begin_time <= time_s]
        return begun[-1]

    def mean_power_w(self, begin_s: float, end_s: float) -> float:
        """Power of all GPUs between two times of CLOCK_MONOTONIC, by the clocks that were set."""
        energy_j = 0.0
        for device in range(len(JOBS)):
            changes = [c for c in self.fake.calls(device) if c.result == 0 and c.kind == "lock"]
            before = [c.mhz for c in changes if c.time <= begin_s]
            now_s, mhz = begin_s, before[-1]
            for change in [c for c in changes if begin_s < c.time <= end_s]:
                energy_j += (change.time - now_s) * self._power_w(mhz)
                now_s, mhz = change.time, change.mhz
            energy_j += (end_s - now_s) * self._power_w(mhz)
        return energy_j / (end_s - begin_s)

    def _power_w(self, mhz: int) -> float:
        return self.fake.model.uncapped_power_w(mhz, ACTIVITY)

    def let_run(self, count: int) -> tuple[float, float]:
        """Let every job run some more iterations; when these began and ended."""
        counts = {name: len(self.iterations(name)) for name in JOBS}
        begin_s = max(self.iterations(name)[-1].begin_s for name in JOBS)
        for name in JOBS:
            wait_for(lambda name=name: len(self.iterations(name)) > counts[name] + count)
        return begin_s, min(self.iterations(name)[-1].begin_s for name in JOBS)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.terminate()
        for worker in self.workers.values():
            worker.wait(60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    fake = open_fake_nvml(tmp_path, monkeypatch, count=len(JOBS))
    site = Site(tmp_path, fake)
    yield site
    site.close()
    fake.close()


def test_eight_jobs_follow_a_signal_within_two_iterations(site: Site) -> None:
    signal_file = site.folder / "signal"
    signal_file.write_text("100%")
    watch = Watch(site.folder, site.full_w, "--no-alternate")
    watch.wait_for("followed")
    for share in (0.85, 0.97, 0.75):
        signal_file.write_text(f"{100 * share}%")
        written = watch.wait_for("orders")
        assert written["missing_w"] == 0
        assert written["power_w"] <= share * site.full_w * (1 + 1e-9)
        written_at = {
            order["job"]: site.order_file(order["job"]).stat().st_mtime
            for order in written["orders"]
        }
        followed = watch.wait_for("followed")
        assert set(followed["jobs"]) == set(written_at)
        begin_s, end_s = site.let_run(6)
        for name, time_s in written_at.items():
            assert site.first_iteration_of(name) - site.running_at(name, time_s) <= 2, name
        assert site.mean_power_w(begin_s, end_s) <= 1.02 * share * site.full_w
    assert watch.interrupt() == 0
    assert (site.folder / "watch.err").read_text() == ""
    site.let_run(2)  # they go on
    site.close()
    assert site.fake.wait_until_free(10) is not None


def test_a_killed_job_a_lost_signal_and_damaged_orders_break_no_budget(site: Site) -> None:
    signal_file = site.folder / "signal"
    signal_file.write_text("100%")
    watch = Watch(site.folder, site.full_w, "--no-alternate")
    watch.wait_for("followed")
    site.workers["c"].kill()
    site.workers["c"].wait()
    signal_file.write_text("80%")
    watch.wait_for("orders")
    os.truncate(site.order_file("a"), 30)
    site.order_file("b").unlink()
    assert sorted(watch.wait_for("rewritten")["jobs"]) in (["a"], ["b"], ["a", "b"])
    wait_for(lambda: site.order_file("b").exists())
    signal_file.unlink()
    assert watch.wait_for("signal_lost")["budget_w"] == pytest.approx(0.8 * site.full_w)

    # A job that is started anew follows its order from its first iteration on.
    before = len(site.iterations("c"))
    site.workers["c"] = site._start("c")
    wait_for(lambda: len(site.iterations("c")) > before + 2)
    order = Order.load(site.order_file("c"))
    planned_s = site.jobs[JOBS.index("c")].plans[order.rung].iteration_time_s
    assert {i.followed_s for i in site.iterations("c")[before:]} == {planned_s}
    for name in JOBS:
        job = site.jobs[JOBS.index(name)]
        planned_s = job.plans[Order.load(site.order_file(name)).rung].iteration_time_s
        wait_for(lambda name=name, s=planned_s: site.iterations(name)[-1].followed_s == s)
    begin_s, end_s = site.let_run(6)
    assert site.mean_power_w(begin_s, end_s) <= 1.02 * 0.8 * site.full_w
    assert watch.interrupt() == 0
    site.close()
    assert site.fake.wait_until_free(10) is not None
