"""Sweeps: points to rows, the journal, processes, Ray, what the command says, the picture."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import random
import secrets
import shlex
import shutil
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

from cli_helpers import (
    COMMAND,
    Ran,
    assert_refused,
    done,
    envplan,
    in_this_process,
    installed,
    says,
    small_profile,
    told,
)  # fmt: skip
from envplan import Pipeline, Plan, Profile, trace_frontier
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES
from envplan.planners import PLANNERS, job
from envplan.plotting.sweep import sweep_figure
from envplan.simulation.iteration import simulate
from envplan.sweep import SweepRow, read_config, run_sweep
from envplan.sweep.running import SweepResult, journal_of, open_journal
from envplan.sweep.table import COLUMNS
from envplan.units import s_from_ns

EXAMPLE = Path(__file__).parents[1] / "examples" / "sweep.toml"
PATIENCE_S = 240.0


def sweep_file(text: str) -> Path:
    Path("sweep.toml").write_text(text)
    return Path("sweep.toml")


def swept(text: str, journal: str = "journal", **options: Any) -> SweepResult:
    """The result of a sweep in this process."""
    with mock.patch("envplan.sweep.running.run_on_processes", in_this_process):
        return run_sweep(read_config(sweep_file(text)), journal, **options)


def sweep(text: str, *arguments: str) -> Ran:
    """What the command says that does the same."""
    sweep_file(text)
    with mock.patch("envplan.sweep.running.run_on_processes", in_this_process):
        return envplan("sweep", "sweep.toml", *arguments)


def grid(**lists: object) -> str:
    lists = {"profiles": ["profile.csv"], **lists}
    return "[grid]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lists.items())


def entries(journal: Path) -> list[dict[str, object]]:
    """The whole lines of a journal but its header."""
    data = journal.read_bytes() if journal.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()[1:]]


def size(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def results(rows: tuple[SweepRow, ...]) -> list[dict[str, object]]:
    """Rows without how long they took."""
    return [row.model_dump(exclude={"trace_s", "wall_s"}) for row in rows]


def table(path: str = "sweep.csv") -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


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
        {"slowdown": 0.05, "switch_latency": 0.004, "min_dwell": 0.02},
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


def test_rows_say_what_the_library_says_and_the_next_line_makes_the_plan(folder: Path) -> None:
    """Also for each point alone, whose conditions its line `envplan solve` must not leave out."""
    point = "[[points]]\nprofile = 'profile.csv'\nmicrobatches = 6\n"
    rows = swept("".join(f"{point}{more}\n" for more, *_ in POINTS)).rows
    profile = Profile.read_csv("profile.csv")
    for row, (more, traced_with, asked) in zip(rows, POINTS, strict=True):
        latency = traced_with.get("p2p_latency", 0.0)
        recompute = traced_with.get("recompute", False)
        pipeline = Pipeline("1f1b", 2, 6, p2p_latency=latency)
        names = traced_with.keys() & {"gpus_per_stage", "replicas"}
        shape = {name: traced_with[name] for name in names}
        fitted = profile.fitted({"forward", "backward"}, recompute=recompute)
        frontier = trace_frontier(pipeline, fitted, **shape)
        plan = frontier.plan(**asked)
        assert row.error is None
        assert (row.t_min_s, row.t_star_s) == (frontier.min_time, frontier.min_energy_time)
        assert (row.iteration_time_s, row.energy_j) == (plan.iteration_time, plan.energy)
        assert row.gap_percent == 100 * plan.gap
        assert row.savings_percent == plan.predicted.savings_percent
        assert row.slowdown_percent == plan.predicted.slowdown_percent
        assert (row.stages, row.microbatches, row.schedule) == (2, 6, "1f1b")
        assert row.source == "modelled"
        following = json.loads(sweep(point + more, "--json").out)["next"]
        done("", *shlex.split(following)[1:])
        found = Plan.load("plan.json")
        assert (found.iteration_time, found.energy) == (row.iteration_time_s, row.energy_j)
    kinds = ["slowdown"] * 2 + ["min-energy", "power-cap", "peak-power-cap", "energy-budget"]
    assert [row.target for row in rows[:6]] == kinds
    assert (rows[6].switch_latency_ms, rows[6].min_dwell_ms, rows[7].robust_percent) == (4, 20, 90)
    assert "recomputation" in (rows[-1].assumed or "")


def test_the_next_line_keeps_a_zero_that_the_sweep_asks_for(folder: Path) -> None:
    """Without it, waiting GPUs would draw 70 W, transfers take what the sidecar says, and so on."""
    zeros = "parts_within = 0\np2p_latency = 0\nblocking_power = 0\n"
    ran = sweep(f"[[points]]\nprofile = 'profile.csv'\nmicrobatches = 6\n{zeros}", "--json")
    document = json.loads(ran.out)
    words = shlex.split(document["next"])
    for option in ("--parts-within", "--p2p-latency", "--blocking-power"):
        assert words[words.index(option) + 1] == "0"
    done("", *words[1:])
    assert Plan.load("plan.json").energy == document["best"][0]["energy_j"]


def test_a_sweep_does_not_replace_a_profile_that_it_plans(folder: Path) -> None:
    before = Path("profile.csv").read_bytes()
    ran = sweep("[[points]]\nprofile = 'profile.csv'\nmicrobatches = 6\n", "-o", "profile.csv")
    assert_refused(ran, 2, "profile.csv: is an input itself; choose another output file")
    assert Path("profile.csv").read_bytes() == before


def test_every_schedule_gets_the_chunks_it_needs(folder: Path) -> None:
    names = [name for name in SCHEDULES if name != "dualpipe-v"]
    result = swept(grid(microbatches=[4], schedules=names))
    assert [(row.schedule, row.error) for row in result.rows] == [(name, None) for name in names]
    shapes = {row.schedule: (row.stages, row.chunks) for row in result.rows}
    assert shapes["zb-v"] == (1, 2)
    assert {shape for name, shape in shapes.items() if name != "zb-v"} == {(2, 1)}


@pytest.mark.parametrize(
    ("sidecar", "chunks", "schedule"),
    [
        ({}, None, "1f1b"),
        ({}, 2, "interleaved"),
        ({"job": {"chunks": 2}}, None, "interleaved"),
        ({"job": {"stages": 1}}, None, "interleaved"),
        ({"schedule": "1f1b"}, 2, "interleaved"),
        ({"schedule": "looped-bfs"}, 2, "looped-bfs"),
        ({"schedule": "looped-bfs", "job": {"chunks": 2}}, None, "looped-bfs"),
        ({"schedule": "zb-v"}, None, "zb-v"),
    ],
)
def test_a_schedule_that_is_left_out_is_the_one_that_solve_takes(
    folder: Path, sidecar: dict[str, Any], chunks: int | None, schedule: str
) -> None:
    file = Path("profile.meta.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | sidecar))
    (row,) = swept(grid(microbatches=[4], **({} if chunks is None else {"vp": chunks}))).rows
    done("solve --quiet" + ("" if chunks is None else f" --vp {chunks}"))
    plan = Plan.load("plan.json")
    assert (row.schedule, row.error) == (plan.job.schedule, None) == (schedule, None)
    assert (row.iteration_time_s, row.energy_j) == (plan.iteration_time, plan.energy)


def test_extra_operations_reach_the_pipeline(folder: Path) -> None:
    small_profile().save_csv("timed.csv")
    with Path("timed.csv").open("a") as file:
        header = Path("timed.csv").read_text().splitlines()[0].split(",")
        row = {"stage": "0", "instruction": "load", "frequency": "0", "time": "5", "energy": "9"}
        file.write(",".join(row.get(name, "") for name in header) + "\n")
    timed, plain = swept(grid(profiles=["timed.csv", "profile.csv"], extra="load")).rows
    assert (timed.t_min_s or 0) > 15
    assert timed.extra == "load"
    assert "no rows for load" in (plain.error or "")


def test_every_planner_has_its_plans(folder: Path) -> None:
    targets = {"slowdowns": [10], "target_times": [99.0], "min_energy": True}
    result = swept(grid(planners=list(PLANNERS), **targets))
    assert not result.failures
    count = Counter((row.planner, row.target) for row in result.rows)
    assert count["zeus_global", "time"] == count["zeus_per_stage", "min-energy"] == 1
    assert count["envpipe", "own"] == count["max_frequency", "own"] == 1
    best = {row.target: row.energy_j for row in result.rows if row.planner == "frontier"}
    for row in result.rows:
        assert (row.energy_j or 0.0) >= 0.999 * (best.get(row.target) or 0.0)


def test_seeds_replay_one_plan_with_other_noise(folder: Path) -> None:
    first, second = swept(grid(noise=3, seeds=[0, 1])).rows
    assert first.energy_j == second.energy_j
    assert first.replayed_time_s != second.replayed_time_s
    profile = Profile.read_csv("profile.csv")
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile).plan()
    timeline = simulate(plan, profile, noise=0.03, seed=1)
    assert second.replayed_time_s == s_from_ns(timeline.run_times_ns[0])


def test_points_of_one_pipeline_trace_their_frontier_once(folder: Path) -> None:
    planners = ["frontier", "zeus_global", "max_frequency"]
    text = grid(microbatches=[2, 3], planners=planners, slowdowns=[0, 5, 10])
    with mock.patch.object(job, "trace_frontier", wraps=job.trace_frontier) as traced:
        assert len(swept(text).rows) == 14
    assert [call.args[0].num_microbatches for call in traced.call_args_list] == [2, 3]


def test_what_is_done_is_not_done_again(folder: Path) -> None:
    more = grid(slowdowns=[1, 0, 2])
    first = swept(grid(slowdowns=[0, 1]))
    assert (first.computed, first.resumed) == (2, 0)
    second = swept(more)
    assert (second.computed, second.resumed) == (1, 2)
    assert [row.target_value for row in second.rows] == [1, 0, 2]
    assert second.rows[1] == first.rows[0]
    # A torn last line is cut off.
    journal = Path("journal")
    journal.write_bytes(journal.read_bytes()[:-40])
    again = swept(more)
    assert (again.computed, again.resumed, len(entries(journal))) == (1, 2, 3)
    # All is done anew when asked for, and when the profile or what its sidecar says has changed.
    assert swept(more, fresh=True).computed == 3
    sidecar = Path("profile.meta.json")
    known = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(known | {"job": {"p2p_latency_s": 0.05}}))
    slower = swept(more)
    assert (slower.computed, slower.rows[1].p2p_latency_s) == (3, 0.05)
    assert (slower.rows[1].t_min_s or 0) > (second.rows[1].t_min_s or 0)
    small_profile(clocks=(1740, 900)).save_csv("profile.csv")
    assert swept(more).computed == 3


def test_a_point_that_fails_does_not_lose_the_others(folder: Path) -> None:
    small_profile(microbatches=None).save_csv("silent.csv")
    names = ["nothere.csv", "profile.csv", "silent.csv"]
    result = swept(grid(profiles=names, target_times=[1e-3, 50.0], chunks=[1, 3]))
    errors = {place: row.error or "" for place, row in enumerate(result.rows)}
    assert (len(errors), len(result.failures), errors[5]) == (12, 11, "")
    says(errors[0], "no such file")
    says(errors[4], "T_min is")
    says(errors[6], "has 3 model stages, but profile profile has 2 stages")
    says(errors[8], "how many microbatches")
    assert result.rows[4].t_min_s is not None
    # Errors that may pass are tried again, and others are not.
    text = grid(target_times=[1e-3, 50.0])
    with mock.patch.object(job, "trace_frontier", side_effect=MemoryError("no more")):
        first = swept(text, "other")
    assert [row.error for row in first.rows] == ["MemoryError: no more"] * 2
    again = swept(text, "other")
    assert (again.computed, len(again.failures)) == (2, 1)
    assert swept(text, "other").computed == 0


def test_parallelism_is_the_sidecars_unless_the_file_says_it(folder: Path) -> None:
    sidecar = Path("profile.meta.json")
    known = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(known | {"tensor_parallel": 4, "job": {"replicas": 2}}))
    (said,) = swept(grid(microbatches=[4])).rows
    (own,) = swept(grid(microbatches=[4], tp=2, cp=3, dp=5)).rows
    assert (said.gpus_per_stage, said.replicas) == (4, 2)
    assert (own.gpus_per_stage, own.replicas) == (6, 5)
    assert (said.energy_j or 0) / 8 == pytest.approx((own.energy_j or 0) / 30)


# ---- the journal


HEADER = b'{"schema": "envplan/sweep-journal/v1"}\n'


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        *((HEADER[:cut], 0) for cut in (0, 1, 37)),  # torn in its header, it begins anew
        (b"stage,instruction\n0,forward\n", 1),
        (b"diary", 1),
        (b"{}\n", 1),
        (HEADER + b'{"key": "x", "row": 3}\n{}\n', 2),
    ],
)
def test_a_file_that_is_no_journal_is_left_alone(
    folder: Path, content: bytes, line: int, fresh: bool
) -> None:
    path = Path("journal")
    path.write_bytes(content)
    if line:
        words = rf"journal:{line}: is not a line of a sweep's journal"
        with pytest.raises(InputError, match=words), open_journal(path, fresh=fresh):
            pass
        assert path.read_bytes() == content
        return
    with open_journal(path, fresh=fresh) as book:
        assert book.rows == {}
        with pytest.raises(InputError, match="another sweep is writing to it"), open_journal(path):
            pass
    assert path.read_bytes() == HEADER
    with pytest.raises(InputError, match="cannot be written"), open_journal("nothere/j"):
        pass


# ---- processes


@pytest.fixture
def many(folder: Path) -> str:
    """A sweep of 400 cheap points in two groups."""
    small_profile(clocks=(1740, 1260, 780)).save_csv("profile.csv")
    text = grid(microbatches=[1, 2], slowdowns=[k / 20 for k in range(200)])
    sweep_file(text)
    return text


@pytest.fixture
def started(many: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, where Ctrl-C works if it does not here, once it
    has done something.
    """
    with _started() as process:
        wait_for(lambda: size(journal_of("sweep.csv")) > 5000)
        yield process


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(COMMAND), "sweep", "sweep.toml", "--jobs", "2", "--json"],
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


def test_a_process_that_dies_costs_one_point(folder: Path) -> None:
    killed: list[int] = []

    def progress(done: int, count: int, failed: int) -> None:
        if done >= 3 and not killed:
            (child,) = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            killed.append(child.pid)

    text = grid(microbatches=[32], slowdowns=[k / 20 for k in range(100)])
    result = run_sweep(read_config(sweep_file(text)), "journal", jobs=1, progress=progress)
    assert killed
    (lost,) = result.failures
    assert lost.error == "its process was ended by signal 9"
    again = swept(text)
    assert (again.computed, again.resumed) == (1, 99)
    assert not again.failures


def test_points_survive_kill_9_and_none_is_done_twice(many: str) -> None:
    journal = journal_of("sweep.csv")
    moments = random.Random(7)
    kills = 0
    for _ in range(2):
        before = size(journal)
        process = _started()
        while size(journal) <= before + 100 and process.poll() is None:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += len(entries(journal)) < 400
        assert not Path("sweep.csv").exists() or len(entries(journal)) == 400
    assert kills
    with journal.open("ab") as file:
        file.write(b'{"key": "torn by a ki')
    before = len(entries(journal))
    resumed = swept(many, str(journal))
    assert (len(resumed.rows), resumed.failures) == (400, [])
    assert (resumed.resumed, resumed.computed) == (before, 400 - before)
    times_done = Counter(entry["key"] for entry in entries(journal))
    assert len(times_done) == 400
    assert set(times_done.values()) == {1}
    assert results(swept(many, "other").rows) == results(resumed.rows)


def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(started: subprocess.Popen[str]) -> None:
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert json.loads(out)["error"] == "interrupted"
    assert "Traceback" not in err
    assert "what is done is kept in sweep.csv.journal" in err
    assert err.endswith("envplan: error: interrupted\n")
    wait_for(lambda: group_is_gone(started.pid))
    assert not Path("sweep.csv").exists()
    assert 0 < len(entries(journal_of("sweep.csv"))) < 400


def test_processes_end_when_the_sweep_they_work_for_is_killed(
    started: subprocess.Popen[str],
) -> None:
    started.kill()
    started.wait()
    wait_for(lambda: group_is_gone(started.pid))


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


def test_a_ray_cluster_gives_the_same_rows(folder: Path, ray_address: str) -> None:
    planners = ["frontier", "max_frequency"]
    text = grid(microbatches=[2, 4], slowdowns=[0, 2, 4], target_times=[1e-3], planners=planners)
    sweep_file(text)
    ran = installed("sweep", "sweep.toml", "--ray", ray_address, "--json", cwd=folder)
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert (summary["points"], summary["computed"], summary["failed"]) == (10, 10, 2)
    on_ray = swept(text, "sweep.csv.journal")
    assert on_ray.computed == 0
    assert results(on_ray.rows) == results(swept(text, "other").rows)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster can be reached"),
        ("127.0.0.1:here", "no Ray cluster can be reached"),
        ("ray://127.0.0.1:10001", "Ray clients cannot run sweeps"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_at_once(
    folder: Path, address: str, words: str
) -> None:
    pytest.importorskip("ray", reason="the sweep on a cluster needs ray: pip install envplan[ray]")
    with pytest.raises(InputError, match=words):
        swept(grid(), ray=address)


# ---- what the command writes and says


EIGHT = grid(
    microbatches=[2, 4], planners=["frontier", "max_frequency"], slowdowns=[0, 5], min_energy=True
)


def test_a_sweep_makes_a_table_and_a_plot_once_and_says_what_is_best(folder: Path) -> None:
    first = sweep(EIGHT, "--plot")
    says(
        first.out,
        "One iteration, all GPUs, modelled | T_star | +5% | 8 points: 8 planned, 0 failed",
        "wrote sweep.csv | wrote sweep.png | next: envplan solve profile.csv --microbatches",
    )
    rows, before = table(), Path("sweep.csv").read_bytes()
    assert list(rows[0]) == list(COLUMNS)
    assert [row["microbatches"] for row in rows] == ["2"] * 4 + ["4"] * 4
    assert all(row["source"] == "modelled" and not row["error"] for row in rows)
    assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")
    Path("sweep.csv").unlink()
    document = json.loads(sweep(EIGHT, "--json").out)
    assert (document["schema"], document["journal"]) == ("envplan/sweep/v1", "sweep.csv.journal")
    assert (document["computed"], document["resumed"]) == (0, 8)
    assert Path("sweep.csv").read_bytes() == before
    assert json.loads(sweep(EIGHT, "--json", "--fresh").out)["computed"] == 8
    most = max(float(row["savings_percent"]) for row in rows)
    assert document["best"][0]["savings_percent"] == most
    shares = {(one["name"], one["value"]): one for one in document["by_what_varies"]}
    assert {value for name, value in shares if name == "microbatches"} == {"2", "4"}
    assert "schedule" not in {name for name, _ in shares}
    for value in ("2", "4"):
        saved = [float(row["savings_percent"]) for row in rows if row["microbatches"] == value]
        share = shares["microbatches", value]
        assert share["points"] == len(saved)
        assert share["savings_percent"] == pytest.approx(sum(saved) / len(saved))
        assert share["most_percent"] == max(saved)
        assert f"{share['savings_percent']:.2f}" in first.out


def test_parquet_holds_what_csv_holds_and_failures_are_rows_that_are_said(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    text = EIGHT + "target_times = [0.001]\n"
    ran = sweep(text)
    says(
        ran.out,
        "10 points: 8 planned, 2 failed",
        "failed: profile.csv, 1f1b, frontier, 0.001 s, 2 microbatches: no plan",
    )
    expected = table()
    failed = [row for row in expected if row["error"]]
    assert (ran.code, len(failed)) == (0, 2)
    assert all(row["t_min_s"] and not row["energy_j"] for row in failed)
    shutil.copy("sweep.csv.journal", "sweep.parquet.journal")
    assert sweep(text, "-o", "sweep.parquet").code == 0
    written = parquet.read_table("sweep.parquet")
    assert tuple(written.column_names) == COLUMNS
    types = {field.name: str(field.type) for field in written.schema}
    assert (types["energy_j"], types["stages"], types["recompute"]) == ("double", "int64", "bool")
    for row, as_text in zip(written.to_pylist(), expected, strict=True):
        assert SweepRow.model_validate(row).model_dump() == row
        shown = {name: "" if value is None else str(value) for name, value in row.items()}
        assert shown == as_text


def test_when_all_fail_so_does_the_sweep_but_the_table_is_there(folder: Path) -> None:
    ran = sweep(grid(profiles=["nothere.csv"]), "--plot")
    assert (ran.code, Path("sweep.png").exists()) == (1, False)
    assert "1 points: 0 planned, 1 failed" in ran.out
    assert "no such file" in table()[0]["error"]
    # Profiles are looked for beside the sweep's file.
    sweep_file(grid())
    Path("elsewhere").mkdir()
    assert told("sweep ../sweep.toml -j 1", cwd=Path("elsewhere"))["failed"] == 0
    assert Path("elsewhere/sweep.csv").exists()


def test_the_example_runs(folder: Path) -> None:
    summary = json.loads(sweep(EXAMPLE.read_text(), "--json").out)
    assert (summary["points"], summary["failed"]) == (58, 0)
    last = table()[-1]
    assert (last["schedule"], last["stages"], last["chunks"]) == ("interleaved", "4", "2")
    assert last["replayed_time_s"]


# ---- the picture


def planned(profile: str = "a", planner: str = "frontier", **more: Any) -> SweepRow:
    usual = {"chunks": 1, "target": "slowdown", "recompute": False, "seed": 0}
    usual |= {"slowdown_percent": 0.0, "savings_percent": 1.0}
    return SweepRow(**usual | {"profile": profile, "planner": planner, **more})


def legend_of(*rows: SweepRow) -> list[str]:
    return [text.get_text() for text in sweep_figure(rows).legends[0].get_texts()]


def test_a_figure_joins_the_points_of_a_job_and_planner_by_slowdown() -> None:
    rows = [planned(slowdown_percent=slower) for slower in (4.0, 0.0, 2.0)]
    rows.append(planned(planner="zeus_global", slowdown_percent=1.0))
    drawn = [list(line.get_xdata()) for line in sweep_figure(rows).axes[0].lines]
    assert [0.0, 2.0, 4.0] in drawn
    assert [1.0] in drawn
    with pytest.raises(InputError, match="nothing to draw"):
        sweep_figure([planned(error="no plan")])


def test_plans_for_slow_clocks_are_a_line_and_a_row_of_their_own(folder: Path) -> None:
    point = "[[points]]\nprofile = 'profile.csv'\nmicrobatches = 4\nslowdown = 5\n"
    ran = sweep(f"{point}{point}switch_latency = 3\nmin_dwell = 20\n")
    assert "+5%, clocks 3 ms late, clocks for 20 ms" in ran.out
    slow = planned(switch_latency_ms=3.0, min_dwell_ms=20.0)
    assert legend_of(planned(), slow) == ["no conditions", "clocks 3 ms late, clocks for 20 ms"]


def test_a_dozen_panels_and_kinds_of_jobs_are_shown_at_most() -> None:
    rows = [planned(f"job{k:02d}") for k in range(20)]
    figure = sweep_figure(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == [f"job{k:02d}" for k in range(12)]
    assert "12 of 20 shown" in str(figure.get_suptitle())
    assert legend_of(*rows) == ["envplan"]
    kinds = [planned(name, microbatches=count) for name in "ab" for count in range(1, 21)]
    words = legend_of(*kinds)
    assert (words[:2], words[12:]) == (["1 microbatch", "2 microbatches"], ["and 8 more"])


def test_long_names_leave_the_axes_their_room() -> None:
    rows = [planned("a-very-long-name-of-a-profile" * 3 + str(k)) for k in (1, 2)]
    figure = sweep_figure(rows)
    figure.savefig(io.BytesIO())
    (legend,) = figure.legends
    box, axes = legend.get_window_extent(), figure.axes[0]
    assert axes.bbox.width > 0.4 * figure.bbox.width
    assert not box.overlaps(axes.get_tightbbox())
    assert box.x1 <= figure.bbox.width
