"""deploy/slurm on a real Slurm of two nodes: plans followed, and no clock left however jobs end.

Both nodes are on this machine, each with GPUs of its own (fake_nvml) that the node's name chooses.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from envplan.devices.modelled import gpu
from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml, fake_library
from shim_helpers import A40, frequency_plan

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts a Slurm, as root"),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)),
        reason="needs Debian's slurmctld, slurmd, slurm-client and munge",
    ),
]

HERE = Path(__file__).parent
DEPLOY = HERE.parent / "deploy" / "slurm"
#: How this interpreter runs what the nodes call: its folder need not have the commands.
PROGRAMS = {
    "envplan": '-c "from envplan.cli.main import main; main()"',
    "torchrun": "-m torch.distributed.run",
}
RANKS_PER_NODE = 2


class Cluster:
    """Two nodes with GPUs.

    Args:
        folder: for everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, FakeNvml] = {}
        for node in ("n1", "n2"):
            (folder / node).mkdir()
            self.nodes[node] = FakeNvml(folder / node / "nvml.state", gpu("a40"), RANKS_PER_NODE)
        for name, program in PROGRAMS.items():
            run = f'exec {sys.executable} {program} "$@"\n'
            self.script(f"bin/{name}", self._environment() + run)
        for hook in ("prolog", "epilog"):
            self.script(
                f"slurm/{hook}.sh",
                f"export ENVPLAN={folder}/bin/envplan\n"
                f"exec {DEPLOY / hook}.sh >> {folder}/{hook}.log 2>&1\n",
            )
        self.plan = folder / "run.freqplan.json"
        plan = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=2), dp=2, gpu=A40)
        ranks = [
            rank.model_copy(update={"device": rank.rank % RANKS_PER_NODE}) for rank in plan.ranks
        ]
        plan.model_copy(update={"ranks": ranks}).save(self.plan)
        self.record = folder / "record.txt"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm" / "slurm.conf"),
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PLAN": str(self.plan),
            "TRAIN": str(HERE / "slurm_training.py"),
            "RECORD": str(self.record),
            "RANKS_PER_NODE": str(RANKS_PER_NODE),
            "ENVPLAN": str(folder / "bin" / "envplan"),
        }

    def _environment(self) -> str:
        return (
            "export LD_LIBRARY_PATH=" + str(fake_library()) + "\n"
            f"export ENVPLAN_FAKE_NVML={self.folder}/$SLURMD_NODENAME/nvml.state\n"
            "export OMP_NUM_THREADS=1\n"
        )

    def script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)

    def slurm(self, action: str) -> None:
        command = [HERE / "two_node_slurm.sh", action, self.folder / "slurm"]
        subprocess.run(command, check=True, env=self.environment)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def submit(self, iterations: int) -> str:
        """Submit the training; its job's number."""
        return self.run(
            *("sbatch", "--parsable", f"--output={self.folder}/job-%j.out"),
            f"--export=ALL,ITERATIONS={iterations}",
            str(DEPLOY / "train.sbatch"),
        )

    def state(self, job: str) -> str:
        text = self.run("scontrol", "show", "job", "-o", job)
        return text.partition("JobState=")[2].split()[0]

    def output(self, job: str) -> str:
        return (self.folder / f"job-{job}.out").read_text()

    def wait_for_state(self, job: str, *states: str) -> None:
        self.wait(lambda: self.state(job) in states, f"job {job} is {self.state(job)}")

    def wait_for_iterations(self, job: str, count: int) -> None:
        self.wait(lambda: len(self.iterations(job)) >= count, f"job {job} does not train")

    def wait(self, condition: Callable[[], object], problem: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, problem
            time.sleep(0.2)

    def iterations(self, job: str) -> list[tuple[int, int]]:
        """(rank, iteration) in the order in which they ended."""
        if not self.record.exists():
            return []
        lines = [line.split() for line in self.record.read_text().splitlines()]
        return [(int(rank), int(number)) for of, rank, number in lines if of == job]

    def locked(self) -> list[int]:
        return [
            index
            for fake in self.nodes.values()
            for index in range(RANKS_PER_NODE)
            if fake.gpu(index).locked
        ]

    def wait_until_free(self) -> None:
        self.wait(lambda: not self.locked(), f"locked: {self.locked()}")

    def guards(self) -> list[int]:
        """The processes of guards that have a clock of these nodes."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                try:
                    command = (process / "cmdline").read_bytes()
                    environment = (process / "environ").read_bytes()
                except OSError:
                    continue
                is_ours = str(self.folder).encode() in environment
                if b"envplan.devices.guard" in command and is_ours:
                    found.append(int(process.name))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    made.slurm("start")
    try:
        yield made
    finally:
        subprocess.run(["scancel", "--user=root"], env=made.environment, check=False)
        made.slurm("stop")
        for fake in made.nodes.values():
            fake.close()


def test_a_job_follows_its_plan_to_the_end(cluster: Cluster) -> None:
    job = cluster.submit(iterations=10)
    cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert cluster.state(job) == "COMPLETED", cluster.output(job)
    assert sorted(cluster.iterations(job)) == [(r, i) for r in range(4) for i in range(10)]
    assert cluster.output(job).count("the plan would be followed") == 2
    for fake in cluster.nodes.values():
        for index in range(RANKS_PER_NODE):
            planned = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=2), dp=2)
            assert set(planned.ranks[index].frequencies) <= set(fake.clock_changes(index))
    cluster.wait_until_free()


def test_a_cancelled_job_leaves_no_clock(cluster: Cluster) -> None:
    job = cluster.submit(iterations=10_000)
    cluster.wait_for_iterations(job, 8)
    assert len(cluster.locked()) == 4
    cluster.run("scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    cluster.wait_until_free()


def test_a_requeued_job_follows_again(cluster: Cluster) -> None:
    job = cluster.submit(iterations=60)
    cluster.wait_for_iterations(job, 8)
    cluster.run("scontrol", "requeue", job)
    cluster.wait_until_free()
    before = len(cluster.iterations(job))
    cluster.wait_for_state(job, "PENDING", "RUNNING")
    # Slurm lets a requeued job wait for two minutes.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.wait_for_iterations(job, before + 8)
    assert len(cluster.locked()) == 4
    cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_until_free()


def test_a_node_that_fails_leaves_no_clock(cluster: Cluster) -> None:
    """Everything of the job on a node is killed at once, guards included, as by a crash."""
    job = cluster.submit(iterations=10_000)
    cluster.wait_for_iterations(job, 8)
    guards = cluster.guards()
    assert len(guards) == 4
    for process in [*training_processes(cluster), *guards]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert cluster.locked()
    cluster.run("scancel", job)
    cluster.wait_for_state(job, "CANCELLED", "FAILED", "NODE_FAIL", "COMPLETED")
    cluster.wait_until_free()  # by the epilog
    job = cluster.submit(iterations=3)
    cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert cluster.state(job) == "COMPLETED", cluster.output(job)


def training_processes(cluster: Cluster) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if b"slurm_training.py" in command and b"python" in command:
                found.append(int(process.name))
    return found
