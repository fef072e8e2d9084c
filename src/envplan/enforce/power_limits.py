"""Power limits in the place of clocks, for schedulers and operators that speak of watts.

A power limit (NVML's, as nvidia-smi -pl sets it) holds for all operations of a GPU, where a plan
has a clock for each. Modelled: a GPU under a limit runs each operation at the fastest of the
profile's settings whose average power is within it. For each stage a limit is chosen such that
the iteration is in the plan's time and uses little energy; that costs more than the plan's clocks
do, and the result says how much.

The power that a job draws is told as steady (its average), peak (the most at any time, averaged
over an operation) and ramp (the largest change between two neighbouring seconds).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from envplan.clocks import MARK
from envplan.enforce.freqplan import FrequencyPlan
from envplan.plan import Plan, as_referenced, check_reference, replay_plan
from envplan.profile import Profile
from envplan.replay import Problem, Replay
from envplan.request.limits.power_ramp import PowerOverTime
from envplan.units import POWER_UNITS_PER_W, j_from_10fj, s_from_ns

if TYPE_CHECKING:
    from pydantic import JsonValue

__all__ = ["DrawnPower", "JobPower", "PowerLimits", "power_limits"]

LIMITS_SCHEMA: Final = "envplan/power-limits/v1"
JOB_SCHEMA: Final = "envplan/job-power/v1"
#: Neighbouring windows of the ramp, ns.
_RAMP_WINDOW_NS: Final = 10**9
#: Profiles are rounded: so much above a limit is within it, 10 uW.
_TOLERANCE_10UW: Final = 1_000


@dataclass(frozen=True)
class DrawnPower:
    """Power over an iteration.

    Attributes:
        steady_w: its average.
        peak_w: the most at any time; the averages of operations are taken for their power.
        ramp_w_per_s: the largest change of the average between two neighbouring seconds.
    """

    steady_w: float
    peak_w: float
    ramp_w_per_s: float

    @classmethod
    def over(cls, power: PowerOverTime) -> DrawnPower:
        """The figures of a power that changes over time."""
        lengths_ns = np.diff(power.times_ns)
        energy_10fj = sum(
            power_10uw * ns
            for power_10uw, ns in zip(power.power_10uw.tolist(), lengths_ns.tolist(), strict=True)
        )
        change = power.steepest_change(_RAMP_WINDOW_NS)
        return cls(
            steady_w=energy_10fj / power.period_ns / POWER_UNITS_PER_W,
            peak_w=int(power.power_10uw.max()) / POWER_UNITS_PER_W,
            ramp_w_per_s=j_from_10fj(change.change_10fj),
        )


@dataclass(frozen=True)
class JobPower:
    """The power of a job: of its hungriest GPU and node, and of all.

    Attributes:
        plan_sha256: of the plan.json.
        enforced_by: "clocks" or "power limits".
        gpu: the GPU of the highest peak.
        node: the node of the highest peak.
        job: all GPUs.
    """

    plan_sha256: str
    enforced_by: str
    gpu: DrawnPower
    node: DrawnPower
    job: DrawnPower

    def to_dict(self) -> dict[str, JsonValue]:
        """The power in JSON types."""
        return {"schema": JOB_SCHEMA, **asdict(self)}

    def to_line(self) -> str:
        """The power as a line of JSON."""
        return json.dumps(self.to_dict()) + "\n"


@dataclass(frozen=True)
class PowerLimits:
    """The power limit of each GPU of a job, and what they cost against the plan's clocks.

    Attributes:
        limits_w: of the GPUs of each stage, whole W.
        iteration_time_s: under the limits, modelled.
        energy_j: of all GPUs in an iteration under the limits, modelled.
        clocks_time_s: of the plan with its clocks.
        clocks_energy_j: likewise.
        power: under the limits.
        clocks_power: with the clocks.
        applied: the frequency plan, for ranks and devices.
    """

    limits_w: list[int]
    iteration_time_s: float
    energy_j: float
    clocks_time_s: float
    clocks_energy_j: float
    power: JobPower
    clocks_power: JobPower
    applied: FrequencyPlan

    @property
    def more_energy_percent(self) -> float:
        """The energy under the limits above that with the clocks."""
        return 100 * (self.energy_j / self.clocks_energy_j - 1)

    @property
    def more_time_percent(self) -> float:
        """The iteration time under the limits above that with the clocks."""
        return 100 * (self.iteration_time_s / self.clocks_time_s - 1)

    def to_dict(self) -> dict[str, JsonValue]:
        """The limits in JSON types."""
        return {
            "schema": LIMITS_SCHEMA,
            "plan_sha256": self.applied.plan_sha256,
            "source": "modelled",
            "iteration_time_s": self.iteration_time_s,
            "energy_j": self.energy_j,
            "clocks_iteration_time_s": self.clocks_time_s,
            "clocks_energy_j": self.clocks_energy_j,
            "more_time_percent": self.more_time_percent,
            "more_energy_percent": self.more_energy_percent,
            "gpus": [
                {
                    "rank": rank.rank,
                    "stage": rank.stage,
                    "device": rank.device,
                    "power_limit_w": self.limits_w[rank.stage],
                }
                for rank in self.applied.ranks
            ],
            "power": self.power.to_dict(),
            "clocks_power": self.clocks_power.to_dict(),
        }

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def power_limits(
    plan: Plan, profile: Profile, applied: FrequencyPlan, *, force: bool = False
) -> PowerLimits:
    """Choose the power limits that come nearest to a plan.

    Args:
        plan: the plan.
        profile: of the plan.
        applied: its frequency plan, which says which rank runs which stage.
        force: go on though the profile has changed since.

    Raises:
        InputError: plan and profile do not belong together.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    problem = plan.job.problem(profile)
    clocks = replay_plan(plan, profile, force=force)
    capped = _CappedJob(problem)
    deadline_ns = max(plan.target.deadline_ns, clocks.makespan_ns)
    limits_w = capped.least_energy_in(deadline_ns)
    replay = capped.replay(limits_w)
    gpus_of_stage = applied.world_size // applied.layout.stages
    return PowerLimits(
        limits_w=limits_w,
        iteration_time_s=s_from_ns(replay.makespan_ns),
        energy_j=j_from_10fj(replay.energy_10fj * gpus_of_stage),
        clocks_time_s=s_from_ns(clocks.makespan_ns),
        clocks_energy_j=j_from_10fj(clocks.energy_10fj * gpus_of_stage),
        power=_job_power(replay, applied, "power limits"),
        clocks_power=_job_power(clocks, applied, "clocks"),
        applied=applied,
    )


class _Score(NamedTuple):
    """What limits make of an iteration: its time, and its energy until the deadline."""

    time_ns: int
    energy_10fj: int


class _CappedJob:
    """A job whose GPUs run under power limits.

    Args:
        problem: pipeline and profile.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._tables = problem.table.tolist()
        self._row_within = cache(self._row_within_uncached)

    def candidates_w(self, stage: int) -> list[int]:
        """The limits of a stage that differ in what they allow, ascending, whole W."""
        begin, end = self._problem.pipeline.stage_begin[stage : stage + 2].tolist()
        limits_w: set[int] = set()
        for number in sorted(set(self._tables[begin:end])):
            powers_10uw = self._problem.tables[number].peak_10uw.tolist()
            limits_w.update(
                math.ceil((power_10uw - _TOLERANCE_10UW) / POWER_UNITS_PER_W)
                for power_10uw in powers_10uw
            )
        return sorted(limits_w - {0}) or [1]

    def replay(self, limits_w: Sequence[int]) -> Replay:
        """Replay the job under a limit for each stage, W."""
        stages = self._problem.stage.tolist()
        rows = [
            self._row_within(table, limits_w[stage])
            for table, stage in zip(self._tables, stages, strict=True)
        ]
        return self._problem.replay(np.array(rows, np.int32))

    def least_energy_in(self, deadline_ns: int) -> list[int]:
        """Limits with which the job is in time and uses little energy, W.

        From no limits at all, the limit of one stage after the other is lowered: the one that
        saves the most energy for the time that it takes, by steps that become smaller. Where even
        no limit is in time, there is none.
        """
        candidates = [
            self.candidates_w(stage) for stage in range(self._problem.pipeline.num_stages)
        ]
        chosen = [len(stage_candidates) - 1 for stage_candidates in candidates]
        step = 2 ** max(map(len, candidates)).bit_length()
        current = self._score(candidates, chosen, deadline_ns)
        while step:
            lowered = self._best_step(candidates, chosen, step, current, deadline_ns)
            if lowered is None:
                step //= 2
                continue
            chosen, current = lowered
        return _limits_of(candidates, chosen)

    def _best_step(
        self,
        candidates: Sequence[Sequence[int]],
        chosen: Sequence[int],
        step: int,
        current: _Score,
        deadline_ns: int,
    ) -> tuple[list[int], _Score] | None:
        """The best of lowering one stage's limit by some candidates; None: none saves in time."""
        best: tuple[float, list[int], _Score] | None = None
        for stage, index in enumerate(chosen):
            if index < step:
                continue
            lowered = [*chosen[:stage], index - step, *chosen[stage + 1 :]]
            score = self._score(candidates, lowered, deadline_ns)
            saved_10fj = current.energy_10fj - score.energy_10fj
            if score.time_ns > deadline_ns or saved_10fj <= 0:
                continue
            merit = saved_10fj / max(1, score.time_ns - current.time_ns)
            if best is None or merit > best[0]:
                best = merit, lowered, score
        return None if best is None else best[1:]

    def _score(
        self, candidates: Sequence[Sequence[int]], chosen: Sequence[int], deadline_ns: int
    ) -> _Score:
        replay = self.replay(_limits_of(candidates, chosen))
        return _Score(replay.makespan_ns, replay.energy_until(deadline_ns))

    def _row_within_uncached(self, table_number: int, limit_w: int) -> int:
        """The fastest row of a table within a limit; the one of least power where none is."""
        table = self._problem.tables[table_number]
        settings = self._problem.rows_by_setting[table_number].items()
        rows = [row for (_, config), row in settings if not config.startswith(MARK)]
        within = [
            row
            for row in rows
            if table.peak_10uw[row] <= limit_w * POWER_UNITS_PER_W + _TOLERANCE_10UW
        ]
        if not within:
            return min(rows, key=lambda row: int(table.peak_10uw[row]))
        return min(within, key=lambda row: (int(table.time_ns[row]), int(table.energy_10fj[row])))


def _limits_of(candidates: Sequence[Sequence[int]], chosen: Sequence[int]) -> list[int]:
    return [
        stage_candidates[index] for stage_candidates, index in zip(candidates, chosen, strict=True)
    ]


def _job_power(replay: Replay, applied: FrequencyPlan, enforced_by: str) -> JobPower:
    """The power of a replay, for GPUs, nodes and the job as the frequency plan has them."""
    of_stage = _stage_powers(replay)
    per_node = len({rank.device for rank in applied.ranks})
    node_stages: list[Counter[int]] = []
    for first in range(0, applied.world_size, per_node):
        node = applied.ranks[first : first + per_node]
        node_stages.append(Counter(rank.stage for rank in node))
    unlike_nodes = {tuple(sorted(stages.items())) for stages in node_stages}
    nodes = [
        DrawnPower.over(
            PowerOverTime.sum([of_stage[stage].times(count) for stage, count in stages])
        )
        for stages in unlike_nodes
    ]
    gpus_of_stage = applied.world_size // applied.layout.stages
    whole = PowerOverTime.sum([power.times(gpus_of_stage) for power in of_stage])
    return JobPower(
        plan_sha256=applied.plan_sha256,
        enforced_by=enforced_by,
        gpu=max(map(DrawnPower.over, of_stage), key=lambda drawn: drawn.peak_w),
        node=max(nodes, key=lambda drawn: drawn.peak_w),
        job=DrawnPower.over(whole),
    )


def _stage_powers(replay: Replay) -> list[PowerOverTime]:
    """The power over time of one GPU of each stage, waiting included."""
    parts = replay.parts
    stage_of_part = replay.problem.stage[parts.operation]
    powers = []
    for stage, waiting_10uw in enumerate(replay.problem.blocking_power_10uw.tolist()):
        times_ns = [0]
        power_10uw: list[int] = []
        for index in np.flatnonzero(stage_of_part == stage).tolist():
            begin_ns, end_ns = int(parts.begin_ns[index]), int(parts.end_ns[index])
            if begin_ns > times_ns[-1]:
                power_10uw.append(waiting_10uw)
                times_ns.append(begin_ns)
            if end_ns > begin_ns:
                power_10uw.append(int(parts.energy_10fj[index]) // (end_ns - begin_ns))
                times_ns.append(end_ns)
        if replay.makespan_ns > times_ns[-1]:
            power_10uw.append(waiting_10uw)
            times_ns.append(replay.makespan_ns)
        powers.append(PowerOverTime(np.array(times_ns), np.array(power_10uw)))
    return powers
