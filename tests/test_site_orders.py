"""Orders of a site: written whole, ahead of the jobs, and again when the signal changes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cli_helpers import assert_refused, done, envplan, says, small_profile, told
from envplan import InputError
from envplan.enforce.order_file import Order
from envplan.site import Budget, SiteJob, plan_site, read_jobs
from envplan.site.model import SitePlan
from envplan.site.order_writer import SAFE_LEAD, OrderWriter, orderable
from envplan.site.plan import SiteOverheads
from envplan.site.run_progress import RunProgress
from envplan.site.signal import read_signal
from envplan.site.watch import SiteWatch
from envplan.site.watch_events import (
    AllFollow,
    NotFollowing,
    OrdersFailed,
    OrdersLost,
    OrdersWritten,
    PlanFailed,
    SignalLost,
    WatchEvent,
)
from fake_nvml import wait_for
from site_helpers import Watch, add_job


@pytest.fixture(scope="module")
def jobs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "jobs"
    folder.mkdir()
    add_job(folder, "a", small_profile(2, blocking=60.0), 4, rungs=6)
    add_job(folder, "b", small_profile(3, blocking=60.0), 5, rungs=6)
    return folder


@pytest.fixture
def jobs(jobs_folder: Path, tmp_path: Path) -> list[SiteJob]:
    """Two jobs, whose run logs are in a folder of this test."""
    toml = tmp_path / "site.toml"
    toml.write_text(
        "".join(
            f'[[jobs]]\nname = "{name}"\nfrontier = "{jobs_folder / name}.json"\n'
            f'freqplan = "{jobs_folder / name}.freqplan.json"\nlog = "{name}.jsonl"\n'
            for name in ("a", "b")
        )
    )
    return orderable(read_jobs(toml))


def full_power_w(jobs: list[SiteJob]) -> float:
    return sum(max(point.power_w for point in job.plan_points()) for job in jobs)


def log(path: Path, *lines: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, **line}) + "\n" for line in lines)


def start(rank: int) -> dict[str, object]:
    return {"event": "start", "rank": rank}


def step(rank: int, number: int, iteration_s: float = 0.5) -> dict[str, object]:
    return {"event": "step", "rank": rank, "step": number, "iteration_s": iteration_s}


def follows(rank: int, sequence: int, late: int = 0, at_s: float = 0.0) -> dict[str, object]:
    return {
        "event": "order",
        "rank": rank,
        "sequence": sequence,
        "step": 9,
        "rung": 1,
        "late": late,
        "time": at_s or time.time(),
    }


# The run log tells how far a job is


def test_a_job_is_as_far_as_its_farthest_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    progress = RunProgress(path)
    progress.update()
    assert progress.last_iteration == -1
    log(path, start(0), start(1), step(0, 0), step(1, 0), step(0, 1, 0.7))
    progress.update()
    assert (progress.last_iteration, progress.iteration_time_s) == (1, 0.7)
    log(path, follows(1, 5), step(1, 1))
    progress.update()
    assert progress.last_iteration == 1
    assert progress.acknowledged[1].sequence == 5


def test_a_job_that_is_started_anew_counts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log(path, start(0), start(1), step(0, 900), follows(0, 5), follows(1, 5))
    log(path, start(1), start(0), follows(0, 5), step(0, 0))
    progress = RunProgress(path)
    progress.update()
    assert progress.last_iteration == 0
    assert set(progress.acknowledged) == {0}


def test_ranks_whose_share_of_the_log_is_full_go_on_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log(path, start(0), step(0, 7))
    progress = RunProgress(path)
    progress.update()
    log(tmp_path / "run.jsonl.rank0", start(0), step(0, 8), step(0, 9))
    progress.update()
    assert progress.last_iteration == 9


def test_lines_of_others_and_cut_ones_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log(path, start(0), step(0, 3), {"event": "step"}, {"event": "step", "rank": 0, "step": "x"})
    with path.open("ab") as file:
        file.write(b"[1]\n\xff\n" + json.dumps(step(0, 4)).encode())
    progress = RunProgress(path)
    progress.update()
    assert progress.last_iteration == 3
    with path.open("ab") as file:
        file.write(b"\n")
    progress.update()
    assert progress.last_iteration == 4


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log(path, start(0), *(step(0, number) for number in range(20_000)))
    progress = RunProgress(path)
    progress.update()
    assert progress.last_iteration == 19_999


# Orders as they are written


def interval_at(jobs: list[SiteJob], part: float):  # type: ignore[no-untyped-def]
    return plan_site(jobs, Budget.fixed(part * full_power_w(jobs))).intervals[0]


def test_orders_keep_the_budget_and_name_rungs_of_the_ladders(
    jobs: list[SiteJob], tmp_path: Path
) -> None:
    for part in (0.99, 0.9, 0.8):
        interval = interval_at(jobs, part)
        list(OrderWriter(tmp_path, jobs).write(interval))
        planned_w = 0.0
        for job, share in zip(jobs, interval.jobs, strict=True):
            order = Order.load(tmp_path / f"{job.name}.order.json")
            rungs = job.plans
            fast = rungs[order.rung if order.faster_rung is None else order.faster_rung]
            slow = rungs[order.rung]
            of_fast = order.faster_share
            time_s = (1 - of_fast) * slow.iteration_time_s + of_fast * fast.iteration_time_s
            energy_j = (1 - of_fast) * slow.energy_j + of_fast * fast.energy_j
            assert order.iteration_time_s == pytest.approx(time_s)
            assert order.power_w == pytest.approx(energy_j / time_s)
            assert order.power_w == share.power_w
            planned_w += energy_j / time_s
        assert planned_w <= part * full_power_w(jobs) * (1 + 1e-9)


def test_an_order_is_ahead_of_the_job_by_what_is_safe(jobs: list[SiteJob], tmp_path: Path) -> None:
    log(tmp_path / "a.jsonl", start(0), step(0, 41, 0.5))
    written = list(OrderWriter(tmp_path, jobs).write(interval_at(jobs, 0.9)))
    by_name = {one.job.name: one.order for one in written}
    assert by_name["a"].from_iteration == 42 + SAFE_LEAD
    assert by_name["a"].lead == SAFE_LEAD
    assert by_name["b"].from_iteration is None
    cached = OrderWriter(tmp_path, jobs, lead_s=3.2)
    again = list(cached.write(interval_at(jobs, 0.8)))
    assert again[0].order.lead == SAFE_LEAD + 7


def test_only_what_changes_is_written_and_numbers_rise(jobs: list[SiteJob], tmp_path: Path) -> None:
    writer = OrderWriter(tmp_path, jobs)
    first = list(writer.write(interval_at(jobs, 0.9)))
    assert list(writer.write(interval_at(jobs, 0.9))) == []
    later = OrderWriter(tmp_path, jobs)  # as another process would
    assert list(later.write(interval_at(jobs, 0.9))) == []
    second = list(later.write(interval_at(jobs, 0.8)))
    old = {one.job.name: one.order.sequence for one in first}
    assert all(one.order.sequence > old[one.job.name] for one in second)


def test_sequences_rise_though_the_clock_goes_back(
    jobs: list[SiteJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = OrderWriter(tmp_path, jobs)
    first = list(writer.write(interval_at(jobs, 0.9)))
    monkeypatch.setattr("time.time_ns", lambda: 10**9)
    second = list(writer.write(interval_at(jobs, 0.8)))
    assert second[0].order.sequence == first[0].order.sequence + 1


def test_lost_and_damaged_orders_are_written_again(jobs: list[SiteJob], tmp_path: Path) -> None:
    writer = OrderWriter(tmp_path, jobs)
    written = list(writer.write(interval_at(jobs, 0.9)))
    assert writer.rewrite_lost() == []
    written[0].path.unlink()
    os.truncate(written[1].path, 40)
    again = writer.rewrite_lost()
    for one, before in zip(again, written, strict=True):
        order = Order.load(one.path)
        assert order.sequence == before.order.sequence + 1
        assert order.rung == before.order.rung
    assert writer.rewrite_lost() == []


# Signals


@pytest.mark.parametrize(
    ("text", "power_w"),
    [
        ("612kW", 612e3),
        ("612000 W\n", 612e3),
        ("75%", 600.0),
        (" 0.3 MW ", 0.3e6),
        ('{"power": 500}', 500.0),
        ('{"power": "50%", "until": "18:00"}', 400.0),
        ("0%", 0.0),
    ],
)
def test_a_signal_is_a_power_or_a_share(tmp_path: Path, text: str, power_w: float) -> None:
    path = tmp_path / "signal"
    path.write_text(text)
    assert read_signal(str(path), 800.0).power_w == pytest.approx(power_w)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "612k",
        "612",
        '{"power": 61',
        "much",
        "-5kW",
        "120%",
        "{",
        '{"energy": 3}',
        "[3]",
        "nan",
        "1e999",
        "5 parsecs",
        "\0",
    ],
)
def test_what_is_no_power_is_no_signal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "signal"
    path.write_text(text)
    with pytest.raises(InputError):
        read_signal(str(path), 800.0)


class Grid(BaseHTTPRequestHandler):
    text = b"70%"

    def do_GET(self) -> None:
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(self.text)
            return
        if self.path == "/strange":
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        self.send_response(200 if self.path == "/signal" else 404)
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def grid() -> Iterator[str]:
    """The address of an operator's server."""
    server = HTTPServer(("127.0.0.1", 0), Grid)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_signal_may_be_at_a_url(grid: str) -> None:
    assert read_signal(f"{grid}/signal", 1000.0).power_w == pytest.approx(700.0)
    with pytest.raises(InputError, match="Not Found"):
        read_signal(f"{grid}/nothing", 1000.0)
    for url in ("http://127.0.0.1:9/signal", f"{grid}/cut", f"{grid}/strange", f"{grid}/a b"):
        with pytest.raises(InputError, match="cannot be read"):
            read_signal(url, 1000.0)


# Following a signal


class Watched:
    """A watch over two jobs, whose ranks the test plays."""

    def __init__(self, jobs: list[SiteJob], folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        self.signal = folder / "signal"
        self.full_w = full_power_w(jobs)
        self.watch = SiteWatch(
            jobs,
            str(self.signal),
            full_power_w=self.full_w,
            reserved_w=0.0,
            overheads=SiteOverheads(),
            alternates=True,
            plan_power="average",
            writer=OrderWriter(folder, jobs),
            keep_plan=lambda plan: plan.save(folder / "site.json"),
        )

    def events(self) -> list[WatchEvent]:
        return list(self.watch.round())

    def all_ranks_follow(self, late: int = 0) -> None:
        for job in self.jobs:
            assert job.ladder is not None
            assert job.run_log is not None
            order = Order.load(self.folder / f"{job.name}.order.json")
            for rank in range(job.ladder.freqplan.world_size):
                log(job.run_log, follows(rank, order.sequence, late))


@pytest.fixture
def watched(jobs: list[SiteJob], tmp_path: Path) -> Watched:
    return Watched(jobs, tmp_path)


def test_a_signal_that_changes_brings_orders_and_jobs_that_follow_are_told(
    watched: Watched,
) -> None:
    watched.signal.write_text("100%")
    (first,) = watched.events()
    assert isinstance(first, OrdersWritten)
    assert [order.job for order in first.orders] == ["a", "b"]
    assert watched.events() == []
    watched.all_ranks_follow()
    (followed,) = watched.events()
    assert isinstance(followed, AllFollow)
    assert followed.jobs == ["a", "b"]

    watched.signal.write_text("80%")
    (written,) = watched.events()
    assert isinstance(written, OrdersWritten)
    assert written.budget_w == pytest.approx(0.8 * watched.full_w)
    assert written.power_w <= written.budget_w * (1 + 1e-9)
    assert written.missing_w == 0
    watched.all_ranks_follow(late=1)
    (followed,) = watched.events()
    assert isinstance(followed, AllFollow)
    assert followed.most_late == 1
    assert watched.events() == []


def test_a_signal_that_fails_leaves_the_last_one_and_is_said_once(watched: Watched) -> None:
    lost, written = watched.events()
    assert isinstance(lost, SignalLost)
    assert isinstance(written, OrdersWritten)
    assert written.budget_w == watched.full_w
    assert watched.events() == []
    watched.signal.write_text("80%")
    assert isinstance(watched.events()[0], OrdersWritten)
    watched.signal.write_text("")
    (lost,) = watched.events()
    assert isinstance(lost, SignalLost)
    assert lost.budget_w == pytest.approx(0.8 * watched.full_w)
    assert watched.events() == []
    watched.signal.write_text("80%")
    assert watched.events() == []


def test_below_the_least_power_jobs_do_what_they_can_and_it_is_said(watched: Watched) -> None:
    watched.signal.write_text("1%")
    (written,) = watched.events()
    assert isinstance(written, OrdersWritten)
    least_w = sum(min(point.power_w for point in job.plan_points()) for job in watched.jobs)
    assert written.power_w == pytest.approx(least_w, rel=1e-5)
    assert written.missing_w == pytest.approx(least_w - 0.01 * watched.full_w, rel=1e-4)


def test_orders_that_are_lost_meanwhile_are_written_again(watched: Watched) -> None:
    watched.signal.write_text("90%")
    watched.events()
    os.truncate(watched.folder / "b.order.json", 10)
    (lost,) = watched.events()
    assert isinstance(lost, OrdersLost)
    assert lost.jobs == ["b"]
    watched.all_ranks_follow()
    assert isinstance(watched.events()[0], AllFollow)


def test_first_orders_that_cannot_be_written_are_tried_again_and_all_are_waited_for(
    watched: Watched,
) -> None:
    watched.signal.write_text("100%")  # as it counts before a signal was read
    (watched.folder / "b.order.json").mkdir()
    (failed,) = watched.events()
    assert isinstance(failed, OrdersFailed)
    (watched.folder / "b.order.json").rmdir()
    (written,) = watched.events()
    assert isinstance(written, OrdersWritten)
    assert [order.job for order in written.orders] == ["a", "b"]
    watched.all_ranks_follow()
    (followed,) = watched.events()
    assert isinstance(followed, AllFollow)
    assert followed.jobs == ["a", "b"]


def test_until_all_orders_are_written_nobody_says_that_all_follow(watched: Watched) -> None:
    watched.signal.write_text("90%")
    (watched.folder / "b.order.json").mkdir()
    watched.events()
    job = watched.jobs[0]
    assert job.ladder is not None
    assert job.run_log is not None
    order = Order.load(watched.folder / "a.order.json")
    for rank in range(job.ladder.freqplan.world_size):
        log(job.run_log, follows(rank, order.sequence))
    assert watched.events() == []
    (watched.folder / "b.order.json").rmdir()
    watched.events()
    watched.all_ranks_follow()
    (followed,) = watched.events()
    assert isinstance(followed, AllFollow)
    assert followed.jobs == ["a", "b"]
    assert watched.events() == []


def test_a_silent_job_is_given_up_though_other_orders_cannot_be_written(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.signal.write_text("90%")
    (watched.folder / "b.order.json").mkdir()
    watched.events()
    monkeypatch.setattr("envplan.site.acknowledgements._GIVE_UP_AFTER_S", -1.0)
    (silent,) = watched.events()
    assert isinstance(silent, NotFollowing)
    assert silent.jobs == ["a"]
    assert watched.events() == []


def test_where_orders_cannot_be_written_it_is_tried_again(watched: Watched) -> None:
    watched.signal.write_text("90%")
    (watched.folder / "b.order.json").mkdir()
    (failed,) = watched.events()
    assert isinstance(failed, OrdersFailed)
    assert watched.events() == []
    (watched.folder / "b.order.json").rmdir()
    (written,) = watched.events()
    assert isinstance(written, OrdersWritten)
    assert [order.job for order in written.orders] == ["a", "b"]


def test_a_plan_that_cannot_be_written_ends_no_watch_and_is_tried_again(watched: Watched) -> None:
    (watched.folder / "site.json").mkdir()
    watched.signal.write_text("100%")
    failed, written = watched.events()
    assert isinstance(failed, PlanFailed)
    assert isinstance(written, OrdersWritten)
    watched.signal.write_text("90%")
    (written,) = watched.events()  # the failure is said once
    assert isinstance(written, OrdersWritten)
    watched.all_ranks_follow()
    assert isinstance(watched.events()[0], AllFollow)
    (watched.folder / "site.json").rmdir()
    assert watched.events() == []
    assert SitePlan.load(watched.folder / "site.json") == watched.watch.plan


# The command


def test_the_command_writes_an_order_for_each_job(folder: Path, jobs_folder: Path) -> None:
    out = done(f"site {jobs_folder} --power 950W --orders orders")
    says(out, "Orders in orders", "as it is read", "no run log tells")
    assert sorted(path.name for path in (folder / "orders").iterdir()) == [
        "a.order.json",
        "b.order.json",
    ]
    says(done(f"site {jobs_folder} --power 950W --orders orders"), "say so already")
    document = told(f"site {jobs_folder} --power 700W --orders orders")
    assert [order["job"] for order in document["orders"]] == ["a", "b"]
    says(done("check site.json"), "site plan, holds")
    says(done("check orders/a.order.json"), "order, holds", "of job a: rung")


def test_orders_are_written_though_the_picture_cannot_be(
    folder: Path, jobs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise InputError("cannot be written (No space left on device)", path=folder / "site.png")

    monkeypatch.setattr("envplan.plotting.figures.save_figure", fail)
    ran = envplan("site", jobs_folder, "--power", "950W", "--orders", "orders", "--plot", "a.png")
    assert_refused(ran, 2, "No space left on device")
    assert len(list((folder / "orders").iterdir())) == 2


def test_check_notices_that_a_frequency_plan_has_changed(folder: Path, jobs_folder: Path) -> None:
    for file in jobs_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    done("site . --power 950W --orders orders")
    document = json.loads((folder / "site.json").read_text())
    digest = hashlib.sha256((folder / "a.freqplan.json").read_bytes()).hexdigest()
    assert document["jobs"][0]["freqplan_sha256"] == digest
    with (folder / "a.freqplan.json").open("a") as file:
        file.write(" ")
    ran = envplan("check", "site.json")
    assert ran.code == 2
    assert "frequency plan of job a has changed" in ran.err


def test_a_watch_says_what_shedding_costs_and_draws_each_plan(
    folder: Path, jobs_folder: Path
) -> None:
    (folder / "jobs").symlink_to(jobs_folder)
    (folder / "signal").write_text("100%")
    picture = folder / "site.png"
    watch = Watch(folder, 950.0, "--shed", "--plot")
    try:
        curve = watch.wait_for("shed_curve")["shed_curve"]
        assert curve[0]["shared_percent"] < curve[-1]["shared_percent"]
        watch.wait_for("orders")
        wait_for(picture.exists)
        picture.unlink()
        (folder / "signal").write_text("80%")
        watch.wait_for("orders")
        wait_for(picture.exists)
    finally:
        code = watch.interrupt()
    assert code == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--watch signal", "needs --orders DIR"),
        ("--orders orders --power power.csv", "one power that counts now"),
        ("--orders orders --every 0", "--every"),
        ("--orders jobs.toml/x", "cannot be made"),
    ],
)
def test_what_orders_cannot_do_is_refused_in_a_line(
    folder: Path, jobs_folder: Path, more: str, words: str
) -> None:
    (folder / "power.csv").write_text("hour,power\n0,950\n1,900\n")
    (folder / "jobs.toml").write_text("")
    power = "" if "--power" in more else "--power 950W"
    ran = envplan("site", str(jobs_folder), *power.split(), *more.split())
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert not (folder / "site.json").exists()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("", "has no frequency plan"),
        ('freqplan = "JOBS/b.freqplan.json"', "was not made from the profile"),
        ('freqplan = "JOBS/a.freqplan.json"\nreplicas = 3', "is for 1 replicas, not 3"),
        ('log = "a.jsonl"', "has a run log and no frequency plan"),
        ('freqplan = "JOBS/a.json"', "is not a frequency plan"),
    ],
)
def test_jobs_that_cannot_have_orders_are_refused_in_a_line(
    folder: Path, jobs_folder: Path, job: str, words: str
) -> None:
    (folder / "site.toml").write_text(
        f'[[jobs]]\nname = "a"\nfrontier = "{jobs_folder}/a.json"\n'
        + job.replace("JOBS", str(jobs_folder))
    )
    ran = envplan("site", "site.toml", "--power", "950W", "--orders", "orders")
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_jobs_that_may_pause_run_on_under_orders_and_it_is_said(
    folder: Path, jobs_folder: Path
) -> None:
    (folder / "site.toml").write_text(
        f'[[jobs]]\nname = "a"\nfrontier = "{jobs_folder}/a.json"\nmay_pause = true\n'
        f'freqplan = "{jobs_folder}/a.freqplan.json"\n'
    )
    ran = envplan("site", "site.toml", "--power", "400W", "--orders", "orders")
    assert ran.code == 0
    assert "orders pause no job: a may pause" in ran.err
    assert Order.load("orders/a.order.json").power_w <= 400 * (1 + 1e-9)
