from __future__ import annotations

import json
import multiprocessing
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cli_helpers import COMMAND, in_this_process, small_profile
from envplan import Pipeline, Profile, trace_frontier
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES
from envplan.planners import PLANNERS
from envplan.simulation import simulate
from envplan.sweep import Row, read_config, run_sweep, work
from envplan.sweep.running import SweepResult, journal_of, open_journal
from envplan.units import s_from_ns

PATIENCE_S = 240.0


def sweep_file(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def run_here(config: Path, journal: Path, **options: object) -> SweepResult:
    with mock.patch("envplan.sweep.running.run_on_processes", in_this_process):
        return run_sweep(read_config(config), journal, **options)


def swept(folder: Path, text: str, **options: object) -> SweepResult:
    small_profile().save_csv(folder / "profile.csv")
    return run_here(sweep_file(folder, text), folder / "journal", **options)


def grid(**lists: object) -> str:
    return "[grid]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lists.items())


def entries(journal: Path) -> list[dict[str, object]]:
    """The whole lines of a journal but its header."""
    data = journal.read_bytes() if journal.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()[1:]]


def size(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def results(rows: tuple[Row, ...]) -> list[dict[str, object]]:
    """Rows without how long they took."""
    return [row.model_dump(exclude={"trace_s", "wall_s"}) for row in rows]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


#: What a point says, how its frontier is traced, and what is asked of it.
POINTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("", {}, {}),
    ("slowdown = 3", {}, {"slowdown": 0.03}),
    ("min_energy = true", {}, {"min_energy": True}),
    ("power_cap = 460", {}, {"power_cap": 460}),
    ("peak_power_cap = 560", {}, {"peak_power_cap": 560}),
    ("energy_budget = 790", {}, {"energy_budget": 790}),
    (
        "slowdown = 5\nswitch_latency = 4\nmin_dwell = 20",
        {},
        {"slowdown": 0.05, "switch_latency": 0.004, "min_hold": 0.02},
    ),
    (
        "slowdown = 5\nrobust = 90\nnoise = 1",
        {},
        {"slowdown": 0.05, "probability": 0.9, "noise": 0.01},
    ),
    ("tp = 2\ndp = 5", {"gpus_per_stage": 2, "replicas": 5}, {}),
    ("p2p_latency = 0.01", {"p2p_latency": 0.01}, {}),
    ("recompute = true", {"recompute": True}, {}),
]


def test_rows_say_what_the_library_says(tmp_path: Path) -> None:
    point = "[[points]]\nprofile = 'profile.csv'\nmicrobatches = 6\n"
    rows = swept(tmp_path, "".join(f"{point}{more}\n" for more, *_ in POINTS)).rows
    profile = Profile.read_csv(tmp_path / "profile.csv")
    for row, (_, job, asked) in zip(rows, POINTS, strict=True):
        pipeline = Pipeline("1f1b", 2, 6, p2p_latency=job.pop("p2p_latency", 0.0))
        fitted = profile.fitted({"forward", "backward"}, recompute=job.pop("recompute", False))
        frontier = trace_frontier(pipeline, fitted, **job)
        plan = frontier.plan(**asked)
        assert row.error is None
        assert (row.t_min_s, row.t_star_s) == (frontier.min_time, frontier.min_energy_time)
        assert (row.iteration_time_s, row.energy_j) == (plan.iteration_time, plan.energy)
        assert row.gap_percent == 100 * plan.gap
        assert row.savings_percent == plan.predicted.savings_percent
        assert row.slowdown_percent == plan.predicted.slowdown_percent
        assert (row.stages, row.microbatches, row.schedule) == (2, 6, "1f1b")
        assert row.source == "modelled"
    kinds = ["slowdown"] * 2 + ["min-energy", "power-cap", "peak-power-cap", "energy-budget"]
    assert [row.target for row in rows[:6]] == kinds
    assert (rows[6].switch_latency_ms, rows[6].min_dwell_ms, rows[7].robust_percent) == (4, 20, 90)
    assert "recomputation" in (rows[-1].assumed or "")


def test_every_schedule_gets_the_chunks_it_needs(tmp_path: Path) -> None:
    names = [name for name in SCHEDULES if name != "dualpipe-v"]
    result = swept(tmp_path, grid(profiles=["profile.csv"], microbatches=[4], schedules=names))
    assert [(row.schedule, row.error) for row in result.rows] == [(name, None) for name in names]
    shapes = {row.schedule: (row.stages, row.chunks) for row in result.rows}
    assert shapes["zb-v"] == (1, 2)
    assert {shape for name, shape in shapes.items() if name != "zb-v"} == {(2, 1)}


def test_extra_operations_reach_the_pipeline(tmp_path: Path) -> None:
    small = small_profile()
    small.save_csv(tmp_path / "timed.csv")
    with (tmp_path / "timed.csv").open("a") as file:
        header = (tmp_path / "timed.csv").read_text().splitlines()[0].split(",")
        row = {"stage": "0", "instruction": "load", "frequency": "0", "time": "5", "energy": "9"}
        file.write(",".join(row.get(name, "") for name in header) + "\n")
    points = "".join(
        f"[[points]]\nprofile = '{name}.csv'\nmicrobatches = 3\nextra = 'load'\n"
        for name in ("timed", "profile")
    )
    result = swept(tmp_path, points)
    assert (result.rows[0].t_min_s or 0) > 15
    assert result.rows[0].extra == "load"
    assert "no rows for load" in (result.rows[1].error or "")


def test_every_planner_has_its_plans(tmp_path: Path) -> None:
    result = swept(
        tmp_path,
        grid(
            profiles=["profile.csv"],
            planners=list(PLANNERS),
            slowdowns=[10],
            target_times=[99.0],
            min_energy=True,
        ),
    )
    assert not result.failures
    told = Counter((row.planner, row.target) for row in result.rows)
    assert told["zeus_global", "time"] == told["zeus_per_stage", "min-energy"] == 1
    assert told["envpipe", "own"] == told["max_frequency", "own"] == 1
    best = {row.target: row.energy_j for row in result.rows if row.planner == "frontier"}
    for row in result.rows:
        assert (row.energy_j or 0.0) >= 0.999 * (best.get(row.target) or 0.0)


def test_seeds_replay_one_plan_with_other_noise(tmp_path: Path) -> None:
    result = swept(tmp_path, grid(profiles=["profile.csv"], noise=3, seeds=[0, 1]))
    first, second = result.rows
    assert first.energy_j == second.energy_j
    assert first.replayed_time_s != second.replayed_time_s
    profile = Profile.read_csv(tmp_path / "profile.csv")
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile).plan()
    timeline = simulate(plan, profile, noise=0.03, seed=1)
    assert second.replayed_time_s == s_from_ns(timeline.run_times_ns[0])


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    few = grid(profiles=["profile.csv"], slowdowns=[0, 1])
    more = grid(profiles=["profile.csv"], slowdowns=[1, 0, 2])
    first = swept(tmp_path, few)
    assert (first.computed, first.resumed) == (2, 0)
    second = swept(tmp_path, more)
    assert (second.computed, second.resumed) == (1, 2)
    assert [row.target_value for row in second.rows] == [1, 0, 2]
    assert second.rows[1] == first.rows[0]
    assert swept(tmp_path, more, fresh=True).computed == 3
    small_profile(clocks=(1740, 900)).save_csv(tmp_path / "profile.csv")
    config = read_config(tmp_path / "sweep.toml")
    assert run_sweep(config, tmp_path / "journal", jobs=1).computed == 3


def test_points_of_one_pipeline_trace_their_frontier_once(tmp_path: Path) -> None:
    text = grid(
        profiles=["profile.csv"],
        microbatches=[2, 3],
        planners=["frontier", "zeus_global", "max_frequency"],
        slowdowns=[0, 5, 10],
    )
    with mock.patch.object(work, "trace_frontier", wraps=work.trace_frontier) as traced:
        assert len(swept(tmp_path, text).rows) == 14
    assert [call.args[0].num_microbatches for call in traced.call_args_list] == [2, 3]


def test_a_point_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    small_profile(microbatches=None).save_csv(tmp_path / "silent.csv")
    names = ["nothere.csv", "profile.csv", "silent.csv"]
    result = swept(tmp_path, grid(profiles=names, target_times=[1e-3, 50.0], chunks=[1, 3]))
    errors = [row.error for row in result.rows]
    assert (len(errors), len(result.failures)) == (12, 11)
    assert errors[5] is None
    for place, words in (
        (0, "no such file"),
        (4, "T_min is"),
        (6, "has 3 model stages, but profile profile has 2 stages"),
        (8, "how many microbatches"),
    ):
        assert words in errors[place]
    assert result.rows[4].t_min_s is not None


def test_errors_that_may_pass_are_tried_again_and_others_are_not(tmp_path: Path) -> None:
    text = grid(profiles=["profile.csv"], target_times=[1e-3, 50.0])
    with mock.patch.object(work, "trace_frontier", side_effect=MemoryError("no more")):
        first = swept(tmp_path, text)
    assert [row.error for row in first.rows] == ["MemoryError: no more"] * 2
    again = swept(tmp_path, text)
    assert (again.computed, len(again.failures)) == (2, 1)
    assert swept(tmp_path, text).computed == 0


def test_a_process_that_dies_costs_one_point(tmp_path: Path) -> None:
    killed: list[int] = []

    def progress(done: int, count: int, failed: int) -> None:
        if done >= 3 and not killed:
            (child,) = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            killed.append(child.pid)

    slowdowns = [k / 20 for k in range(100)]
    text = grid(profiles=["profile.csv"], microbatches=[32], slowdowns=slowdowns)
    small_profile().save_csv(tmp_path / "profile.csv")
    config = read_config(sweep_file(tmp_path, text))
    result = run_sweep(config, tmp_path / "journal", jobs=1, progress=progress)
    assert killed
    (lost,) = result.failures
    assert lost.error == "its process was ended by signal 9"
    again = swept(tmp_path, text)
    assert (again.computed, again.resumed) == (1, 99)
    assert not again.failures


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    text = grid(profiles=["profile.csv"], slowdowns=[0, 1, 2])
    swept(tmp_path, text)
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes()[:-40])
    again = swept(tmp_path, text)
    assert (again.computed, again.resumed) == (1, 2)
    assert len(entries(journal)) == 3


@pytest.mark.parametrize("cut", [0, 1, 37])
def test_a_journal_torn_in_its_header_begins_anew(tmp_path: Path, cut: int) -> None:
    header, path = b'{"schema": "envplan/sweep-journal/v1"}\n', tmp_path / "journal"
    path.write_bytes(header[:cut])
    with open_journal(path) as book:
        assert book.rows == {}
        with pytest.raises(InputError, match="another sweep is writing to it"), open_journal(path):
            pass
    assert path.read_bytes() == header


@pytest.mark.parametrize("content", [b"stage,instruction\n0,forward\n", b"diary", b"{}\n"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_file_that_is_no_journal_is_left_alone(
    tmp_path: Path, content: bytes, fresh: bool
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with (
        pytest.raises(InputError, match=r"journal:1: is not a line of a sweep's journal"),
        open_journal(path, fresh=fresh),
    ):
        pass
    assert path.read_bytes() == content


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    swept(tmp_path, grid(profiles=["profile.csv"], slowdowns=[0, 1]))
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    lines[1] = b'{"key": "x", "row": 3}\n'
    (tmp_path / "journal").write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"journal:2: "), open_journal(tmp_path / "journal"):
        pass
    with (
        pytest.raises(InputError, match="cannot be written"),
        open_journal(tmp_path / "nothere" / "j"),
    ):
        pass


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A sweep of 400 cheap points in two groups."""
    small_profile(clocks=(1740, 1260, 780)).save_csv(tmp_path / "profile.csv")
    slowdowns = [k / 20 for k in range(200)]
    text = grid(profiles=["profile.csv"], microbatches=[1, 2], slowdowns=slowdowns)
    return sweep_file(tmp_path, text)


def started(config: Path) -> subprocess.Popen[str]:
    """The command in a process group of its own, where Ctrl-C works if it does not here."""
    return subprocess.Popen(
        [str(COMMAND), "sweep", config.name, "--jobs", "2", "--json"],
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def group_is_gone(leader: int) -> bool:
    """Whether no process of the group runs; those that are dead but not yet buried do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            return False
    return True


def test_points_survive_kill_9_and_none_is_done_twice(many: Path) -> None:
    journal = journal_of(many.with_name("sweep.csv"))
    moments = random.Random(7)
    kills = 0
    for _ in range(2):
        before = size(journal)
        process = started(many)
        while size(journal) <= before + 100 and process.poll() is None:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += len(entries(journal)) < 400
        assert not many.with_name("sweep.csv").exists() or len(entries(journal)) == 400
    assert kills
    with journal.open("ab") as file:
        file.write(b'{"key": "torn by a ki')
    before = len(entries(journal))
    resumed = run_here(many, journal)
    assert (len(resumed.rows), resumed.failures) == (400, [])
    assert (resumed.resumed, resumed.computed) == (before, 400 - before)
    times_done = Counter(entry["key"] for entry in entries(journal))
    assert len(times_done) == 400
    assert set(times_done.values()) == {1}
    assert results(run_here(many, many.with_name("other")).rows) == results(resumed.rows)


def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(many: Path) -> None:
    journal = journal_of(many.with_name("sweep.csv"))
    process = started(many)
    wait_for(lambda: size(journal) > 5000)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert json.loads(out)["error"] == "interrupted"
    assert "Traceback" not in err
    assert "what is done is kept in sweep.csv.journal" in err
    assert err.endswith("envplan: error: interrupted\n")
    wait_for(lambda: group_is_gone(process.pid))
    assert not many.with_name("sweep.csv").exists()
    assert 0 < len(entries(journal)) < 400


def test_processes_end_when_the_sweep_they_work_for_is_killed(many: Path) -> None:
    journal = journal_of(many.with_name("sweep.csv"))
    process = started(many)
    wait_for(lambda: size(journal) > 5000)
    process.kill()
    process.wait()
    wait_for(lambda: group_is_gone(process.pid))
    process.communicate()


_CLUSTER = """
import sys
import ray
context = ray.init(
    address="local", num_cpus=1, include_dashboard=False, object_store_memory=80_000_000,
    log_to_driver=False, _temp_dir=sys.argv[1],
)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture
def ray_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one CPU on this machine."""
    pytest.importorskip("ray", reason="the sweep on a cluster needs ray: pip install envplan[ray]")
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
    ):
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        cluster = subprocess.Popen(
            [sys.executable, "-c", _CLUSTER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        assert address, "Ray did not start"
        try:
            yield address
        finally:
            cluster.communicate("", timeout=PATIENCE_S)


def test_a_ray_cluster_gives_the_same_rows(tmp_path: Path, ray_address: str) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    text = grid(
        profiles=["profile.csv"],
        microbatches=[2, 4],
        slowdowns=[0, 2, 4],
        target_times=[1e-3],
        planners=["frontier", "max_frequency"],
    )
    config = sweep_file(tmp_path, text)
    ran = subprocess.run(
        [str(COMMAND), "sweep", config.name, "--ray", ray_address, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert (summary["points"], summary["computed"], summary["failed"]) == (10, 10, 2)
    on_ray = run_here(config, tmp_path / "sweep.csv.journal")
    assert on_ray.computed == 0
    assert results(on_ray.rows) == results(run_here(config, tmp_path / "other").rows)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster can be reached"),
        ("127.0.0.1:here", "no Ray cluster can be reached"),
        ("ray://127.0.0.1:10001", "Ray clients cannot run sweeps"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_at_once(
    tmp_path: Path, address: str, words: str
) -> None:
    pytest.importorskip("ray", reason="the sweep on a cluster needs ray: pip install envplan[ray]")
    with pytest.raises(InputError, match=words):
        swept(tmp_path, grid(profiles=["profile.csv"]), ray=address)
