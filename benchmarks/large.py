"""Section h: large models as they were published, whole frontiers, one plan, and two cores."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.flow_peer import FlowPoint
from benchmarks.report import Section, Target, megabytes, ratio, seconds, table
from benchmarks.running import in_fresh_process, note, profile_file
from benchmarks.tables import DEEPSEEK, H100, LLAMA, equal_stages, large_job
from benchmarks.worker import fitted
from envplan import Pipeline, Profile
from envplan.frontier import Relaxation

SLOWDOWN = 0.01
MOST_SHARE = 0.2  # of one deadline in the whole frontier
LEAST_SPEEDUP = 1.6  # of two cores
FEW_BREAKPOINTS = 1000


class Job(NamedTuple):
    """A pipeline that runs a model."""

    name: str
    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def label(self) -> str:
        """The job's name in tables."""
        chunks = f" x {self.chunks}" if self.chunks > 1 else ""
        return f"{self.name}, {self.schedule} {self.stages}{chunks} x {self.microbatches}"

    def pipeline(self) -> Pipeline:
        """The job's pipeline."""
        return Pipeline(self.schedule, self.stages, self.microbatches, num_chunks=self.chunks)

    def profile(self) -> Profile:
        """What its operations cost."""
        return equal_stages(self.name) if self.name == H100 else large_job(self.name)


JOBS = (
    Job(LLAMA, "interleaved", 16, 16, 7),
    Job(LLAMA, "interleaved", 16, 32, 7),
    Job(DEEPSEEK, "dualpipe-v", 16, 64, 2),
    Job(H100, "1f1b", 16, 128),
    Job(H100, "1f1b", 16, 256),
    Job(H100, "1f1b", 16, 512),
)


def run(quick: bool, folder: Path) -> Section:
    """Time a plan of one deadline for large models, on one core and on two."""
    section = Section("Large models, one deadline, two cores")
    rows = []
    for job in JOBS[: 3 if quick else None]:
        note(job.label)
        result = measured(job, folder)
        section.raw.append({"of": job.label, **result})
        section.targets += _targets(job, result)
        rows.append(
            [
                job.label,
                f"{result['operations']:,}",
                f"{result['breakpoints']:,}",
                seconds(result["frontier_s"]),
                f"{result['frontier_s'] / result['solve_s']:.2f}",
                seconds(result["deadline_s"]),
                seconds(result["plan_s"]),
                f"{100 * result['gap']:.3f}%",
                ratio(result["speedup"]),
                megabytes(result["memory_peak"]),
            ]
        )
    section.paragraphs = [
        "Modelled profiles on H100: Llama-3 405B with its 126 layers on 16 stages of 7 chunks (of "
        "8 chunks, as it was trained, some would have no layer), DeepSeek-V3 with its 61 layers as "
        "DualPipeV on 16 stages, and 64 equal layers. CPU time on one core of the whole frontier; "
        "of the state at one deadline, T_min and T_star, without the frontier; and of a plan at 1% "
        "slowdown from nothing. Two cores: time that passes on one core over that on two.",
        table(
            [
                "job",
                "operations",
                "breakpoints",
                "frontier",
                "of one flow solve",
                "one deadline",
                "plan",
                "its gap",
                "two cores",
                "memory",
            ],
            rows,
        ),
    ]
    return section


def measured(job: Job, folder: Path) -> dict[str, Any]:
    """Figures of one job; times in s."""
    profile, pipeline = job.profile(), job.pipeline()
    how = {
        "profile": profile_file(folder, profile),
        "stages": job.stages,
        "microbatches": job.microbatches,
        "schedule": job.schedule,
        "chunks": job.chunks,
    }
    one, two = (in_fresh_process("trace", **how, jobs=jobs) for jobs in (1, 2))
    planned = in_fresh_process("plan", **how, slowdown=SLOWDOWN)
    begin = time.process_time()
    single = Relaxation(pipeline, fitted(profile, pipeline))
    single.state_at(int(single.min_time_ns * (1 + SLOWDOWN)))
    deadline_s = time.process_time() - begin
    powers = single.blocking_power_10uw
    point = FlowPoint(single.network, sum(powers))
    begin = time.process_time()
    point.solve()
    return {
        "operations": planned["operations"],
        "breakpoints": one["breakpoints"],
        "frontier_s": median(one["cpu_s"]),
        "deadline_s": deadline_s,
        "solve_s": time.process_time() - begin,
        "plan_s": planned["cpu_s"],
        "gap": planned["gap"],
        "speedup": min(one["wall_s"]) / min(two["wall_s"]),
        "memory_peak": max(one["memory_peak"], planned["memory_peak"]),
    }


def _targets(job: Job, result: dict[str, Any]) -> list[Target]:
    against = result["frontier_s"] / result["solve_s"]
    share, speedup = result["deadline_s"] / result["frontier_s"], result["speedup"]
    rows = []
    if result["breakpoints"] <= FEW_BREAKPOINTS:
        rows.append(("frontier against one solve", "1x", ratio(against), against < 1))
    if job.name == H100:
        most = f"{MOST_SHARE:.0%}"
        rows.append(("one deadline, of the frontier", most, f"{share:.0%}", share <= MOST_SHARE))
    if job == JOBS[4]:
        aim = ratio(LEAST_SPEEDUP)
        rows.append(("two cores", aim, ratio(speedup), speedup >= LEAST_SPEEDUP))
    return [Target(f"h: {job.label}, {what}", *rest) for what, *rest in rows]
