"""What an operation costs the training thread under the shim: `python -m benchmarks.shim`.

One step is 32 microbatches forward and backward on one stage. Nothing is computed in between, so
requests come far faster than in training; the guard sets the clock of a modelled GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter_ns

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
MICROBATCHES, STEPS, WARM_UP = 32, 300, 20
CASES = {
    "the clock never changes": (1260,),
    "the clock changes at every operation": (1740, 1260),
}


def main() -> None:
    """Print what the shim costs the training thread."""
    print("; ".join(f"{name} {value}" for name, value in describe_machine().items()) + "\n")
    rows = []
    cases = [(name, measure(clocks)) for name, clocks in CASES.items()]
    cases.append(("every clock is asked for ahead", measure((1740, 1260), ahead=True)))
    cases.append(("a part asks for its clock", measure((1740, 1260), parts=PARTS)))
    for name, costs in cases:
        mean = sum(costs) / len(costs)
        met = "yes" if mean < TARGET_US else "**no**"
        tail = sorted(costs)[int(0.999 * len(costs))]
        rows.append([name, f"{mean:.2f}", f"{median(costs):.2f}", f"{tail:.2f}", met])
    print(
        table(
            [
                "begin and end of one operation, or begin of a part",
                "mean (us)",
                "median",
                "99.9 %",
                "< 20",
            ],
            rows,
        )
    )


def measure(
    clocks: tuple[int, ...], parts: tuple[str, ...] = (), *, ahead: bool = False
) -> list[float]:
    """Time of begin plus end of each operation, us; the step's share is in its last one's.

    Args:
        clocks: in turn.
        parts: of each operation, in turn at each clock; then the time of their begins instead.
        ahead: whether clocks are asked for by timers, which are set and then overtaken here.
    """
    costs: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Shim(
            frequency_plan(clocks, parts, ahead=ahead),
            rank=0,
            world_size=1,
            backend="modelled",
            log=Path(folder) / "run.jsonl",
        ) as shim,
    ):
        order = [operation[:3] for operation in shim.plan.ranks[0].operations]
        for step in range(STEPS):
            times = run_step(shim, order, parts)
            costs += times if step >= WARM_UP else []
    return costs


def run_step(shim: Shim, order: list[tuple[str, int, int]], parts: tuple[str, ...]) -> list[float]:
    """Run one step and time each call of the shim, us."""
    times = []
    for instruction, microbatch, chunk in order:
        begin = perf_counter_ns()
        shim.begin(instruction, microbatch, chunk)
        for part in parts:
            begin = perf_counter_ns()
            shim.part(part, backward=instruction == "backward")
            times.append((perf_counter_ns() - begin) / 1e3)
        shim.end(instruction, microbatch, chunk)
        if not parts:
            times.append((perf_counter_ns() - begin) / 1e3)
    begin = perf_counter_ns()
    shim.step()
    if not parts:
        times[-1] += (perf_counter_ns() - begin) / 1e3
    return times


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
