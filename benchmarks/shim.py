"""What an operation costs the training thread under the shim: `python -m benchmarks.shim`.

One step is 32 microbatches forward and backward on one stage; the guard sets the clock of a
modelled GPU. In most cases nothing is computed in between, so requests come far faster than in
training, and all that other threads of the shim do with the interpreter delays the training thread.
In the last case operations take a millisecond, in which the interpreter is free.
"""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import NamedTuple

from benchmarks.machine import describe_machine
from benchmarks.report import table
from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    FrequencyPlan,
    RankPlan,
    StageTimes,
    Switching,
)
from envplan.enforce.topology import Topology
from envplan.pipeline import Pipeline
from envplan.runtime import Shim

TARGET_US = 20.0
PARTS = tuple(f"part{k}" for k in range(8))
MICROBATCHES, WARM_UP_STEPS = 32, 20


@dataclass(frozen=True)
class Case:
    """What the shim has to do.

    Attributes:
        name: of the case.
        clocks_mhz: of the operations, in turn.
        parts: of each operation, in turn at each clock; the time of their begins is measured then.
        ahead: whether clocks are asked for by timers, which are set and then overtaken here.
        queues: whether the device queues its work, so that a thread waits for its events.
        operation_s: that each operation takes.
        num_steps: that are measured.
    """

    name: str
    clocks_mhz: tuple[int, ...]
    parts: tuple[str, ...] = ()
    ahead: bool = False
    queues: bool = False
    operation_s: float = 0.0
    num_steps: int = 300


CASES = (
    Case("the clock never changes", (1260,)),
    Case("the clock changes at every operation", (1740, 1260)),
    Case("every clock is asked for ahead", (1740, 1260), ahead=True),
    Case("so it is on a device that queues its work", (1740, 1260), ahead=True, queues=True),
    Case("a part asks for its clock", (1740, 1260), parts=PARTS),
    Case("ahead; operations of 1 ms", (1740, 1260), ahead=True, operation_s=1e-3, num_steps=50),
)


class HostEvent:
    """An event of a device that is never behind the host."""

    def record(self) -> None:
        """It is now."""
        self.time_ns = perf_counter_ns()

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from here to a later event."""
        return (end.time_ns - self.time_ns) / 1e6


@dataclass(frozen=True)
class Costs:
    """What a case has cost.

    Attributes:
        calls_us: the time of begin plus end of each operation, or of the begin of each part; a
            step's end is in its last operation's.
        training_cpu_us: processor time of the training thread for each of them, on average, what
            the operations take included.
        queued_us: how long the training thread waited for a processor that others had, likewise; it
            would not on a machine with processors to spare. None: the thread does more than these
            calls.
        other_cpu_us: processor time of the shim's other threads, likewise.
    """

    calls_us: list[float]
    training_cpu_us: float
    queued_us: float | None
    other_cpu_us: float

    @property
    def mean_us(self) -> float:
        """The average of the calls."""
        return fmean(self.calls_us)

    @property
    def own_mean_us(self) -> float:
        """The average without the waits for a processor, as far as these are known."""
        return self.mean_us - (self.queued_us or 0.0)

    def quantile_us(self, share: float) -> float:
        """The time that so large a share of the calls takes at most."""
        return sorted(self.calls_us)[int(share * (len(self.calls_us) - 1))]


def main() -> None:
    """Print what the shim costs the training thread."""
    print("; ".join(f"{name} {value}" for name, value in describe_machine().items()) + "\n")
    header = ["begin and end of an operation, or begin of a part", "mean (us)", "median", "99 %"]
    header += ["99.9 %", "most", "CPU of training", "CPU of others", "waits for a core"]
    header += ["mean without these", "is < 20"]
    print(table(header, [_row(case, measure(case)) for case in CASES]))


def _row(case: Case, costs: Costs) -> list[str]:
    numbers_us = [
        costs.mean_us,
        median(costs.calls_us),
        costs.quantile_us(0.99),
        costs.quantile_us(0.999),
        max(costs.calls_us),
        costs.training_cpu_us,
        costs.other_cpu_us,
        costs.queued_us,
        costs.own_mean_us,
    ]
    met = "yes" if costs.own_mean_us < TARGET_US else "**no**"
    return [case.name, *map(_in_words, numbers_us), met]


def _in_words(number_us: float | None) -> str:
    return "not known" if number_us is None else f"{number_us:.1f}"


def measure(case: Case) -> Costs:
    """Measure a case."""
    plan = frequency_plan(case.clocks_mhz, case.parts, ahead=case.ahead)
    calls_us: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Shim(
            plan,
            rank=0,
            world_size=1,
            backend="modelled",
            log=Path(folder) / "run.jsonl",
            marker=HostEvent if case.queues else None,
        ) as shim,
    ):
        for _ in range(WARM_UP_STEPS):
            run_step(shim, case)
        _wait_for_other_threads(shim)
        training_before, others_before_ns = _thread_times(), _cpu_of_other_threads_ns()
        for _ in range(case.num_steps):
            calls_us += run_step(shim, case)
        training = _thread_times()
        _wait_for_other_threads(shim)
        others_ns = _cpu_of_other_threads_ns() - others_before_ns
    num_calls = len(calls_us)
    queued_ns = training.queued_ns - training_before.queued_ns
    return Costs(
        calls_us=calls_us,
        training_cpu_us=(training.ran_ns - training_before.ran_ns) / num_calls / 1e3,
        queued_us=None if case.operation_s or case.parts else queued_ns / num_calls / 1e3,
        other_cpu_us=others_ns / num_calls / 1e3,
    )


def run_step(shim: Shim, case: Case) -> list[float]:
    """Run one step and time each call of the shim, us."""
    times_us = []
    for instruction, microbatch, chunk, _ in shim.plan.ranks[0].operations:
        begin_ns = perf_counter_ns()
        shim.begin(instruction, microbatch, chunk)
        begun_ns = perf_counter_ns()
        for part in case.parts:
            part_ns = perf_counter_ns()
            shim.part(part, backward=instruction == "backward")
            times_us.append((perf_counter_ns() - part_ns) / 1e3)
        if case.operation_s:
            time.sleep(case.operation_s)
        end_ns = perf_counter_ns()
        shim.end(instruction, microbatch, chunk)
        if not case.parts:
            times_us.append((begun_ns - begin_ns + perf_counter_ns() - end_ns) / 1e3)
    begin_ns = perf_counter_ns()
    shim.step()
    if not case.parts:
        times_us[-1] += (perf_counter_ns() - begin_ns) / 1e3
    return times_us


def _wait_for_other_threads(shim: Shim) -> None:
    """Until the run log has caught up."""
    while not shim.log_is_idle():
        time.sleep(0.01)
    time.sleep(0.1)


class ThreadTimes(NamedTuple):
    """How long a thread ran on a processor, and how long it waited for one, ns."""

    ran_ns: int
    queued_ns: int


def _thread_times(thread: str = "thread-self") -> ThreadTimes:
    """Those of a thread so far.

    Args:
        thread: its folder in /proc.
    """
    ran_ns, queued_ns, _ = Path(f"/proc/{thread}/schedstat").read_text().split()
    return ThreadTimes(int(ran_ns), int(queued_ns))


def _cpu_of_other_threads_ns() -> int:
    """Processor time of all threads of this process but this one, ns."""
    others = [
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    ]
    return sum(_thread_times(f"self/task/{thread.native_id}").ran_ns for thread in others)


def frequency_plan(
    clocks: tuple[int, ...], parts: tuple[str, ...], *, ahead: bool
) -> FrequencyPlan:
    """One rank that goes through the clocks in turn, or in each operation with its parts."""
    operations = [
        (op.instruction, op.microbatch, op.chunk, clocks[k % len(clocks)])
        for k, op in enumerate(Pipeline("1f1b", 1, MICROBATCHES).operations)
    ]
    turns = zip(parts, clocks * len(parts), strict=False)
    config = " ".join(f"@{part}={mhz}" for part, mhz in turns)
    num_operations = len(operations)
    times = StageTimes(waits_s=[0.0] * num_operations, durations_s=[0.05] * num_operations)
    switching = Switching(ask="ahead", latency_s=0.02, source="given", times=[[times]])
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256="0" * 64,
        profile_sha256="0" * 64,
        clocks_source="modelled",
        supported_clocks_mhz=sorted(clocks),
        world_size=1,
        layout=Topology(stages=1, tp=1, cp=1, dp=1, rank_order="tp-cp-dp-pp"),
        deadline_s=1.0,
        iteration_time_s=1.0,
        energy_j=1.0,
        raised=[],
        switching=switching if ahead else None,
        ranks=[
            RankPlan(
                rank=0,
                stage=0,
                device=0,
                clocks_mhz=sorted(clocks),
                operations=operations,
                configs=[config] * len(operations) if parts else None,
            )
        ],
    )


if __name__ == "__main__":
    main()
