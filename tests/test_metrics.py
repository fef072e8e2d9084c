"""Metrics of a node: what guards, runs and GPUs say, in the form that Prometheus reads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cli_helpers import COMMAND, envplan
from envplan.pipeline import Pipeline
from envplan.runtime import Shim
from envplan.runtime.metric_families import Family, prometheus_text
from envplan.runtime.node_metrics import NodeMetrics
from envplan.runtime.status import RunStatus, read_statuses
from fake_nvml import GPU_IS_LOST, FakeNvml, wait_for
from shim_helpers import A40, end, frequency_plan, training

PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=3)

#: Samples by name, with their labels.
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(autouse=True)
def status_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the statuses of this test alone: others run beside it."""
    folder = tmp_path / "statuses"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("envplan.runtime.status.lock_folders", lambda _user: [folder])
    return folder


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def now() -> Samples:
    return samples(prometheus_text(NodeMetrics("nvml").collect()))


def value(found: Samples, name: str, **labels: str) -> float:
    (only,) = [v for has, v in found[name] if labels.items() <= has.items()]
    return only


def shim(folder: Path, **options: Any) -> Shim:
    plan = frequency_plan(PIPELINE, gpu=A40)
    return Shim(plan, rank=0, world_size=2, log=folder / "run.jsonl", **options)


def run_step(shim: Shim) -> None:
    for operation in shim.plan.ranks[0].operations:
        shim.begin(*operation[:3])
        shim.end(*operation[:3])
    shim.step()


def wait_until_set(shim: Shim) -> None:
    """Until all clocks that were asked for have been set."""
    guard = shim.guard
    assert guard is not None
    wait_for(lambda: guard.problems() == [] and not shim.has_unset_requests())


def only_status() -> RunStatus | None:
    found = list(read_statuses(os.geteuid()))
    assert len(found) < 2
    return found[0] if found else None


def test_gpus_without_a_run(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(2).power_limit = 250.0
    fake_nvml.gpu(3).throttle = 0x4
    found = now()
    assert value(found, "envplan_driver_up") == 1
    assert [v for _, v in found["envplan_clock_hertz"]] == [1740e6] * 4
    assert value(found, "envplan_power_limit_watts", gpu="2") == 250
    assert value(found, "envplan_clock_throttled", gpu="3", reason="power cap") == 1
    assert [v for _, v in found["envplan_guard_up"]] == [0] * 4
    assert "envplan_run_info" not in found


def test_a_run_that_follows_its_plan(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with shim(tmp_path, every_request=True) as running:
        for _ in range(3):
            run_step(running)
            wait_until_set(running)
        running.step()  # a step is decided when the next one ends
        wait_for(lambda: (status := only_status()) is not None and status.followed == 3)
        found = now()
        run = {"gpu": "0", "rank": "0"}
        assert value(found, "envplan_iterations_followed_total", **run) == 3
        assert value(found, "envplan_run_info", job_id="4711", plan_sha256="ab" * 32) == 1
        assert value(found, "envplan_guard_up", gpu="0") == 1
        assert value(found, "envplan_guard_up", gpu="1") == 0
        assert value(found, "envplan_clock_changes_total") == len(
            [call for call in fake_nvml.calls(0, "lock") if call.result == 0]
        )
        planned_mhz = running.plan.ranks[0].operations[-1].frequency_mhz
        assert value(found, "envplan_clock_wanted_hertz") == planned_mhz * 1e6
        assert value(found, "envplan_clock_hertz", gpu="0") == planned_mhz * 1e6
        assert value(found, "envplan_iteration_planned_seconds_total") == 3.0
        measured = value(found, "envplan_iteration_seconds_total")
        assert measured >= value(found, "envplan_last_iteration_seconds") > 0
    assert only_status() is None
    assert "envplan_run_info" not in now()


def test_iterations_that_do_not_fit_are_counted(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    with shim(tmp_path) as running:
        run_step(running)
        running.begin("backward", 2)
        running.step()
        wait_for(lambda: (status := only_status()) is not None and status.unfollowed)
        found = now()
        assert sum(v for _, v in found["envplan_iterations_unfollowed_total"]) == 1


def test_a_run_whose_guard_is_refused_is_seen(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.gpu(0).permission = 0
    with shim(tmp_path):
        wait_for(only_status)
        found = now()
        assert value(found, "envplan_run_clocks_set", rank="0", gpu="0") == 0


def test_a_clock_left_set_is_seen_and_given_back(fake_nvml: FakeNvml) -> None:
    process, guard = training(fake_nvml)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    end(process)
    found = now()
    assert value(found, "envplan_clock_left_set", gpu="0") == 1
    assert value(found, "envplan_guard_up", gpu="0") == 0
    assert value(found, "envplan_clock_locked_hertz", gpu="0") == 1005e6


def test_a_gpu_that_is_lost_leaves_the_others(fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("handle", GPU_IS_LOST, index=1)
    found = now()
    assert [v for _, v in found["envplan_gpu_up"]] == [1, 0, 1, 1]
    assert len(found["envplan_clock_hertz"]) == 3


def test_no_driver_is_a_metric(fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("init")
    assert value(now(), "envplan_driver_up") == 0


def test_what_others_write_as_a_status_is_not_trusted(
    fake_nvml: FakeNvml, tmp_path: Path, status_folder: Path
) -> None:
    folder = status_folder
    with shim(tmp_path):
        wait_for(only_status)
        good = next(folder.glob("*.status.json")).read_text()
    bad = {
        "nested": "[" * 60_000,
        "large": good + " " * 70_000,
        "text": "\xff",
        "number": good.replace('"rank": 0', '"rank": 1e400'),
        "field": good.replace('"rank"', '"rang"'),
        "reasons": good.replace('"unfollowed": {}', '"unfollowed": {"x": -1}'),
    }
    for name, text in bad.items():
        (folder / f"{name}.status.json").write_text(text, encoding="latin-1")
    (folder / "link.status.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe.status.json")
    old = folder / "old.status.json"
    old.write_text(good)
    os.utime(old, (time.time() - 60, time.time() - 60))
    assert list(read_statuses(os.geteuid())) == []
    (folder / "good.status.json").write_text(good)
    assert len(list(read_statuses(os.geteuid()))) == 1


def test_of_two_runs_of_a_rank_on_a_gpu_the_one_written_last_is_told(
    fake_nvml: FakeNvml, tmp_path: Path, status_folder: Path
) -> None:
    with shim(tmp_path):
        wait_for(only_status)
        text = next(status_folder.glob("*.status.json")).read_text()
    now_s = time.time()
    for name, followed, age_s in (("a", 7, 1), ("b", 5, 2)):
        path = status_folder / f"{name}.status.json"
        path.write_text(text.replace('"followed": 0', f'"followed": {followed}'))
        os.utime(path, (now_s - age_s, now_s - age_s))
    found = now()
    assert value(found, "envplan_iterations_followed_total") == 7
    labels = [(name, *sorted(has.items())) for name, values in found.items() for has, _ in values]
    assert len(labels) == len(set(labels))


def test_names_are_those_of_openmetrics_while_a_run_is_seen(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    """There a counter's family is called without _total, and so must no other family be."""
    with shim(tmp_path):
        wait_for(only_status)
        families = NodeMetrics("nvml").collect()
    names = [f.name.removesuffix("_total") if f.type == "counter" else f.name for f in families]
    assert "envplan_last_iteration_seconds" in names
    assert len(names) == len(set(names))


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_any_text_and_number_comes_through(label: str, help_text: str, number: float) -> None:
    family = Family("envplan_x", help_text, "gauge")
    family.add(number, label=label)
    # The parser of prometheus_client splits lines where Python does, and not only at "\n".
    if len((label + help_text).splitlines()) < 2 and "\r" not in label + help_text:
        (read,) = text_string_to_metric_families(prometheus_text([family]))
        (sample,) = read.samples
        assert (sample.labels, sample.value) == ({"label": label}, number)


def test_the_file_is_written_once(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "envplan.prom"
    command = [COMMAND, "guard", "--once", "--metrics-file", path]
    subprocess.run(command, check=True)
    assert value(samples(path.read_text()), "envplan_driver_up") == 1
    assert list(tmp_path.glob("*.prom*")) == [path]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus")
def test_promtool_finds_nothing_to_mend(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    with shim(tmp_path) as running:
        run_step(running)
        wait_until_set(running)
        running.begin("backward", 2)
        running.step()
        wait_for(lambda: (status := only_status()) is not None and status.followed)
        text = prometheus_text(NodeMetrics("nvml").collect())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_endpoint_speaks_openmetrics(fake_nvml: FakeNvml) -> None:
    command = [COMMAND, "guard", "--metrics-listen", "127.0.0.1:0"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    try:
        url = next(
            line.split()[-1]
            for line in iter(service.stdout.readline, "")
            if line.startswith("metrics at")
        )
        request = urllib.request.Request(
            url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )

        def families() -> list[str]:
            with urllib.request.urlopen(request) as answer:
                return [family.name for family in openmetrics(answer.read().decode())]

        wait_for(families)  # the first look may not be over
        assert "envplan_driver_up" in families()
    finally:
        service.terminate()
        service.wait()
    wait_for(lambda: not answers(url))  # it ends with the service


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def test_listening_needs_an_address(fake_nvml: FakeNvml) -> None:
    ran = envplan("guard", "--metrics-listen", "9417")
    assert ran.code == 2
    assert "must be an address and a port" in ran.err
    ran = envplan("guard", "--once", "--metrics-listen", "127.0.0.1:0")
    assert ran.code == 2
