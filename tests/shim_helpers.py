"""For tests of the runtime: frequency plans made without a profile, guards and their owners."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    FrequencyPlan,
    RankPlan,
    StageEnergy,
)
from envplan.enforce.topology import Topology
from envplan.pipeline import Pipeline
from envplan.plan import Rung
from envplan.runtime import Guard
from fake_nvml import FakeNvml, wait_for

A40 = "NVIDIA A40"
CLOCKS = (1740, 1500, 1260, 1020, 780)


#: A training: it asks for a clock, waits for a line, and then ends in some way.
_TRAINING = """
import contextlib, os, signal, sys, time
from envplan.runtime import Guard

guard = Guard.start(sys.argv[1], 0)
guard.request(1005)
print(guard.pid, flush=True)
sys.stdin.readline()
{end}
"""


def logged_lines(log: Path, *, is_ended: bool = True) -> list[dict[str, Any]]:
    """The lines of a run log.

    Args:
        log: its file.
        is_ended: all lines must be whole; else the last may be half written, or left so by a rank
            that was killed, and is passed over.
    """
    whole_lines, _, rest = log.read_text().rpartition("\n")
    assert not (is_ended and rest)
    return [json.loads(line) for line in whole_lines.splitlines()]


def holding(fake: FakeNvml, index: int = 0) -> Guard:
    """A guard of ours that has set a GPU to 1005 MHz."""
    guard = Guard.start("nvml", index)
    guard.request(1005)
    wait_for(lambda: fake.locked(index) == 1005)
    return guard


def training(
    fake: FakeNvml,
    end: str = "time.sleep(600)",
    *,
    backend: str = "nvml",
    python: str = sys.executable,
    **how: Any,
) -> tuple[subprocess.Popen[str], int]:
    """A process that has set GPU 0 to 1005 MHz and goes on to its end, and its guard."""
    process = subprocess.Popen(
        [python, "-c", _TRAINING.format(end=end), backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    guard = process.stdout.readline()
    assert guard, "did not start"
    wait_for(lambda: fake.locked() == 1005)
    process.stdin.write("go\n")
    process.stdin.flush()
    return process, int(guard)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        self.heard.append((instruction, microbatch, chunk))

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        assert self.heard[-1] == (instruction, microbatch, chunk)

    def iteration_begins(self) -> None:
        pass

    def step(self) -> None:
        self.heard.append("step")

    def full_speed(self) -> None:
        self.heard.append("full speed")

    def missed(self, why: str) -> None:
        self.heard.append(f"missed: {why}")


def assert_follows(
    changes: Sequence[int], iterations: Sequence[Sequence[int]], highest: int = CLOCKS[0]
) -> None:
    """That a GPU's clock was changed as iterations want, or to the highest one between them."""
    left = list(changes)
    clock = 0
    for planned in iterations:
        if left and left[0] == highest != clock:
            clock = left.pop(0)
        for mhz in planned:
            if mhz != clock:
                assert left, "clocks are missing"
                clock = left.pop(0)
                assert clock == mhz
    following = iterations[0][0]  # of the iteration that would come next
    assert left in ([], [highest], [following], [highest, following])


def frequency_plan(
    pipeline: Pipeline,
    *,
    dp: int = 1,
    gpu: str | None = None,
    clocks: Sequence[int] = CLOCKS,
    rung_times: Sequence[float] = (),
    configs: Sequence[str] = (),
    stage_energy: StageEnergy | None = None,
) -> FrequencyPlan:
    """Every operation at another clock than the one before it; each rung one clock further on.

    Configs, if there are any, go on likewise.

    The plan's own iteration time is 1 s; ranks of one pipeline are neighbours.
    """
    stages = pipeline.num_stages
    counts = [sum(op.stage == stage for op in pipeline.operations) for stage in range(stages)]

    def chosen(shift: int) -> list[list[int]]:
        return [
            [clocks[(stage + k + shift) % len(clocks)] for k in range(counts[stage])]
            for stage in range(stages)
        ]

    def named(shift: int, stage: int) -> list[str]:
        return [configs[(stage + k + shift) % len(configs)] for k in range(counts[stage])]

    def operations(stage: int) -> list[tuple[str, int, int, int]]:
        mine = [op for op in pipeline.operations if op.stage == stage]
        return [
            (op.instruction, op.microbatch, op.chunk, mhz)
            for op, mhz in zip(mine, chosen(0)[stage], strict=True)
        ]

    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256="ab" * 32,
        profile_sha256="cd" * 32,
        gpu=gpu,
        clocks_source="given",
        supported_clocks_mhz=sorted(clocks),
        world_size=stages * dp,
        layout=Topology(stages=stages, tp=1, cp=1, dp=dp, rank_order="pp-tp-cp-dp"),
        deadline_s=1.0,
        iteration_time_s=1.0,
        energy_j=1.0,
        stage_energies=[stage_energy] * stages if stage_energy else None,
        raised=[],
        ranks=[
            RankPlan(
                rank=rank,
                stage=rank % stages,
                device=rank,
                clocks_mhz=sorted(clocks),
                operations=operations(rank % stages),
                configs=named(0, rank % stages) if configs else None,
            )
            for rank in range(stages * dp)
        ],
        ladder=[
            Rung(
                iteration_time_s=time,
                energy_j=1.0,
                frequencies_mhz=chosen(k + 1),
                configs=[named(k + 1, stage) for stage in range(stages)] if configs else None,
            )
            for k, time in enumerate(rung_times)
        ]
        or None,
    )
