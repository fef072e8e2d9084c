"""Two nodes of four ranks that train for some minutes, watched by a real Prometheus.

    python tests/observed_soak.py FOLDER --minutes 8 [--draw PNG]

Each node has mount namespaces of its own for its lock files, four GPUs (fake_nvml), the service
`envplan guard` and node_exporter. On the way, in this order: two ranks meet iterations of another
order, one rank meets iterations that end in an exception, a training and its guard are killed at
once, another training is told to end and started again, a power limit is lowered. At the end every
iteration must be accounted for in the metrics and no clock may be left. Needs root and Debian's
prometheus and prometheus-node-exporter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from envplan.devices.modelled import gpu  # noqa: E402
from envplan.enforce.freqplan import StageEnergy  # noqa: E402
from envplan.pipeline import Pipeline  # noqa: E402
from fake_nvml import FakeNvml, fake_library  # noqa: E402
from shim_helpers import A40, frequency_plan  # noqa: E402

NODES = ("n1", "n2")
RANKS_PER_NODE = 4
PORT = 19090
EXPORTER_PORTS = {"n1": 19101, "n2": 19102}

#: One rank: follows its plan until it is told to end. A file ODD lets it run in another order, and
#: FAULTY lets every third iteration end in an exception, which the training survives.
RANK = """
import signal, sys, time
from pathlib import Path
from envplan.runtime import Shim

plan, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
is_over = []
signal.signal(signal.SIGTERM, lambda *_: is_over.append(1))
with Shim(plan, rank=rank, log=folder / f"rank{rank}.jsonl") as shim:
    done = 0
    while not is_over:
        keys = list(shim.operations)
        if (folder / "ODD").exists() and rank % 4 >= 2:
            keys[0], keys[1] = keys[1], keys[0]
        is_faulty = (folder / "FAULTY").exists() and rank % 4 == 3 and done % 3 == 0
        try:
            for number, key in enumerate(keys):
                shim.begin(*key)
                time.sleep(0.98 / len(keys))
                if is_faulty and number == 2:
                    raise RuntimeError("a batch that cannot be read")
                shim.end(*key)
        except RuntimeError:
            pass
        shim.step()
        done += 1
        (folder / f"rank{rank}.done").write_text(str(done))
"""

#: A node: lock files of its own, its service, its exporter, its ranks, until it is told to end.
NODE = """
import os, signal, subprocess, sys, time
python, envplan, folder, plan, first, count, port, rank_code = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", "/run/envplan"], check=True)
os.makedirs(f"{folder}/textfile", exist_ok=True)
service = subprocess.Popen([envplan, "guard", "--metrics-file", f"{folder}/textfile/envplan.prom"])
exporter = subprocess.Popen(["prometheus-node-exporter", "--collector.disable-defaults",
    "--collector.textfile", f"--collector.textfile.directory={folder}/textfile",
    f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
over = []
signal.signal(signal.SIGTERM, lambda *_: over.append(1))
def start(rank):
    return subprocess.Popen([python, "-c", rank_code, plan, str(rank), folder])
ranks = {rank: start(rank) for rank in range(int(first), int(first) + int(count))}
while not over:
    time.sleep(0.2)
    for rank, process in ranks.items():
        if process.poll() is not None and not over:
            time.sleep(15)  # as long as a job takes to come again
            ranks[rank] = start(rank)
for process in ranks.values():
    process.terminate()
for process in ranks.values():
    process.wait()
time.sleep(6)  # a last look of the service
exporter.terminate()
service.terminate()
"""


def main() -> None:
    """Run the soak; exit code 1 where something is not accounted for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0, help="at least 4")
    parser.add_argument("--draw", type=Path)
    arguments = parser.parse_args()
    problems = soak(arguments.folder, arguments.minutes, arguments.draw)
    print("\n".join(problems) or "every iteration accounted for, no clock left")
    sys.exit(1 if problems else 0)


def soak(folder: Path, minutes: float, picture: Path | None) -> list[str]:
    """Run two nodes under Prometheus.

    Returns:
        What was not as it should be, a line each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fakes = {node: _node_gpus(folder, node) for node in NODES}
    plan = folder / "run.freqplan.json"
    _plan().save(plan)
    Path("/run/envplan").mkdir(mode=0o700, exist_ok=True)
    prometheus = _start_prometheus(folder)
    nodes = {
        node: _start_node(folder, node, plan, number * RANKS_PER_NODE)
        for number, node in enumerate(NODES)
    }
    problems = []
    try:
        problems += _events(folder, fakes, minutes)
        if picture is not None:
            from tools.dashboard import draw

            draw(f"http://127.0.0.1:{PORT}", picture, minutes)
        problems += _unaccounted(folder)
    finally:
        for process in nodes.values():
            process.terminate()
        for process in nodes.values():
            process.wait()
        prometheus.terminate()
        prometheus.wait()
    for node, fake in fakes.items():
        left = [index for index in range(RANKS_PER_NODE) if fake.gpu(index).locked]
        if left:
            problems.append(f"{node}: clocks are left on GPUs {left}")
        fake.close()
    return problems


def _node_gpus(folder: Path, node: str) -> FakeNvml:
    (folder / node).mkdir(exist_ok=True)
    return FakeNvml(folder / node / "nvml.state", gpu("a40"), RANKS_PER_NODE)


def _plan() -> Any:
    plan = frequency_plan(
        Pipeline("1f1b", num_stages=2, num_microbatches=3),
        dp=4,
        gpu=A40,
        stage_energy=StageEnergy(planned_j=250.0, baseline_j=292.0),
    )
    ranks = [rank.model_copy(update={"device": rank.rank % RANKS_PER_NODE}) for rank in plan.ranks]
    return plan.model_copy(update={"ranks": ranks})


def _start_node(folder: Path, node: str, plan: Path, first: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "ENVPLAN_FAKE_NVML": str(folder / node / "nvml.state"),
        "LD_LIBRARY_PATH": str(fake_library()),
        "SLURM_JOB_ID": "4711",
        "WORLD_SIZE": str(RANKS_PER_NODE * len(NODES)),
    }
    envplan = Path(sys.executable).with_name("envplan")
    command = ["unshare", "-m", sys.executable, "-c", NODE, sys.executable, str(envplan)]
    command += [str(folder / node), str(plan), str(first), str(RANKS_PER_NODE)]
    return subprocess.Popen([*command, str(EXPORTER_PORTS[node]), RANK], env=environment)


def _start_prometheus(folder: Path) -> subprocess.Popen[bytes]:
    targets = "".join(
        f"      - targets: ['127.0.0.1:{port}']\n        labels: {{instance: {node}}}\n"
        for node, port in EXPORTER_PORTS.items()
    )
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 5s, evaluation_interval: 5s}\n"
        f"rule_files: ['{ROOT}/deploy/prometheus/envplan.rules.yml']\n"
        f"scrape_configs:\n  - job_name: node\n    static_configs:\n{targets}"
    )
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    return subprocess.Popen(
        [
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
            f"--web.listen-address=127.0.0.1:{PORT}",
        ],
        stderr=(folder / "prometheus.log").open("w"),
    )


def _events(folder: Path, fakes: dict[str, FakeNvml], minutes: float) -> list[str]:
    """Let things happen, and look whether they are seen."""
    problems = []
    part_s = 60 * minutes / 8
    time.sleep(2 * part_s)
    if _value("sum(envplan_guard_up)") != 8 or _value("count(envplan_run_info)") != 8:
        problems.append("8 ranks with 8 guards are not seen")
    odd = folder / "n2" / "ODD"
    odd.touch()
    time.sleep(part_s)
    odd.unlink()
    if _value("sum(envplan_iterations_unfollowed_total)") <= 0:
        problems.append("iterations of another order are not seen")
    faulty = folder / "n1" / "FAULTY"
    faulty.touch()
    time.sleep(part_s)
    faulty.unlink()
    if not _value('sum(envplan_iterations_unfollowed_total{instance="n1",rank="3"})') > 0:
        problems.append("iterations that ended in an exception are not seen")
    for process in _pids_of(folder, rank=1):
        os.kill(process, signal.SIGKILL)
    time.sleep(part_s)
    if fakes["n1"].gpu(1).locked and _value('envplan_guard_up{instance="n1",gpu="1"}') == 0:
        problems.append("the clock that a killed training left is not given back")
    training, *_ = _pids_of(folder, rank=2)
    os.kill(training, signal.SIGTERM)
    time.sleep(part_s)
    if _value("count(envplan_run_info)") != 8:
        problems.append("a training that was told to end and started again is not seen")
    fakes["n2"].gpu(0).power_limit = 150.0
    time.sleep(2 * part_s)
    if _value('envplan_power_limit_watts{instance="n2",gpu="0"}') != 150:
        problems.append("a lower power limit is not seen")
    return problems


def _pids_of(folder: Path, rank: int) -> list[int]:
    """The processes of a rank of n1: its training and its guard, the training first."""
    trainings = []
    guards = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if command[-3:-1] == [str(rank).encode(), str(folder / "n1").encode()]:
            trainings.append(int(process.name))
        if b"envplan.devices.guard_process" in command:
            guards.append((parent, int(process.name)))
    return trainings + [guard for parent, guard in guards if parent in trainings]


def _unaccounted(folder: Path) -> list[str]:
    """Ranks whose metrics do not have the iterations that they ran, but for those of the moment."""
    problems = []
    for number, node in enumerate(NODES):
        for rank in range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE):
            done = int((folder / node / f"rank{rank}.done").read_text())
            labels = f'{{instance="{node}",rank="{rank}"}}'
            seen = _value(f"envplan_iterations_followed_total{labels}")
            seen += _value(f"sum(envplan_iterations_unfollowed_total{labels}) or vector(0)")
            if not done - 20 <= seen <= done + 1:  # scraped and written every 5 s each
                problems.append(f"rank {rank} ran {done} iterations, the metrics have {seen:g}")
    return problems


def _value(query: str) -> float:
    """The value of an instant query; NaN where there is none."""
    fields = urllib.parse.urlencode({"query": query})
    url = f"http://127.0.0.1:{PORT}/api/v1/query?{fields}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else float("nan")


if __name__ == "__main__":
    main()
