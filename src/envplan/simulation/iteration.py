"""Replaying a plan: what every GPU does when, what it draws, and where it waits for nothing.

Without noise and latency a replay is exact and gives a plan's stated time and energy to the last
nanosecond and femtojoule. With them it tells how much of the plan survives on a real machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan._io.notebook import drawing, png_of
from envplan.pipeline import Pipeline
from envplan.plan import Job, Plan, Target, replay_plan
from envplan.plan.build import operation_rows, plan_of
from envplan.profile import Profile, part_runs
from envplan.replay import Machine, Replay
from envplan.replay.noise import time_factors
from envplan.request.request import MAX_LATENCY_S
from envplan.units import MAX_INTEGER, UW_PER_W, j_from_fj, ns_from_s, s_from_ns

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

__all__ = ["Conditions", "Slice", "Timeline", "simulate"]

MAX_RUNS: Final = 100_000


class Conditions(Model):
    """What a plan meets when it is replayed, besides what it was made for.

    Attributes:
        noise: standard deviation of times, as a fraction of them, 0 to 1.
        seed: of the noise, not negative; the same seed gives the same runs.
        switch_latency: s from a clock request until the clock changes, up to 3600; None: what the
            plan was made for, 0 if it does not say.
        runs: how many times to replay with other noise, 1 to 100000.
        sync_time: s; when the iteration is over for everybody, if that is later than for this
            plan: its GPUs wait until then. In noisy runs, too.
    """

    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    switch_latency: Annotated[float, Field(ge=0, le=MAX_LATENCY_S)] | None = None
    runs: Annotated[int, Field(ge=1, le=MAX_RUNS)] = 1
    sync_time: Annotated[float, Field(ge=0, le=s_from_ns(MAX_INTEGER))] | None = None

    @model_validator(mode="after")
    def _runs_differ(self) -> Self:
        if self.runs > 1 and self.noise == 0:
            raise ValueError(f"without noise all {self.runs} runs are the same; give a noise")
        return self

    @property
    def sync_ns(self) -> int:
        """sync_time in whole ns; 0 without one."""
        return ns_from_s(self.sync_time or 0.0)

    def machine(self, job: Job) -> Machine:
        """How late the clocks of a job follow."""
        latency = self.switch_latency
        return job.machine if latency is None else Machine(ns_from_s(latency))

    def replays(self, exact: Replay) -> Iterator[Replay]:
        """What comes of an exact replay under noise, run by run; without noise the same."""
        if self.noise == 0:
            yield exact
            return
        spreads = np.full(len(exact.rows), self.noise)
        for factors in chain.from_iterable(time_factors(spreads, self.seed, self.runs)):
            yield exact.problem.replay(exact.rows, exact.machine, factors)


#: As the plan has it.
PLANNED: Final = Conditions()


def simulate(plan: Plan, profile: Profile, *, force: bool = False, **conditions: Any) -> Timeline:
    """Replay a plan: every operation starts as soon as those that it waits for let it.

    Noise multiplies the time of each operation by a factor drawn for it, lognormal with mean 1 and
    standard deviation `noise`. Power stays that of the option, so energy grows with time. All GPUs
    of a stage, in all replicas, are drawn alike. Run k draws the same factors in the same order
    whatever the plan and the number of runs, so plans can be compared draw by draw.

    Switch latency: an operation requests its clock at the moment it starts, and the request takes
    effect `switch_latency` later. So at time t a stage runs at the clock of the last request made
    by t - switch_latency, even if a further one has been made since. An operation during which the
    clock changes is split in proportion to the work done: if it has run for a share x of its time
    at the old clock, the share 1 - x of its time at the new one is left (rounded up to a whole ns),
    and each part draws the power of its clock. Running at a clock that the profile does not list
    for an operation, it takes the time and energy of the nearest clock listed (the higher of two)
    with the same config. Operations at 0 MHz request nothing and take their time at any clock. The
    iteration begins at the clock that the stage's last request of the iteration before has left.

    Args:
        profile: what the plan was made from.
        force: go on though the profile has changed since the plan was made.
        conditions: fields of Conditions: noise=0.02, seed=1, runs=100, switch_latency=s,
            sync_time=s.

    Returns:
        The timeline of the first run, with time and energy of all runs.

    Raises:
        InputError: an argument is out of range, the profile has changed, or the plan does not fit
            it or its own job.
    """
    met = Conditions.of(**conditions)
    exact = replay_plan(plan, profile, force=force, machine=met.machine(plan.job))
    return Timeline.of(plan, profile, met.replays(exact), met.sync_ns)


class Slice(NamedTuple):
    """What an operation does at one clock; one GPU's energy.

    Attributes:
        operation: which, an index into pipeline.operations.
        frequency_mhz: the clock in force; 0 for an operation that controls none.
        start_ns, finish_ns: when, ns.
        energy_fj: drawn meanwhile, fJ.
        part: of the operation, where its parts have clocks of their own; else "".
    """

    operation: int
    frequency_mhz: int
    start_ns: int
    finish_ns: int
    energy_fj: int
    part: str = ""


@dataclass(frozen=True)
class Timeline:
    """One iteration as it ran. Made by simulate.

    Attributes:
        plan: what ran.
        profile: what it was made from.
        replay: of the first run, one GPU a stage.
        sync_time_ns: when all pipelines are finished, a straggler included; ns.
        run_times_ns: iteration time of each run, ns; the first is this one.
        run_energies_fj: energy of each run over all GPUs until all have finished, fJ.
    """

    plan: Plan
    profile: Profile
    replay: Replay
    sync_time_ns: int
    run_times_ns: tuple[int, ...]
    run_energies_fj: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, profile: Profile, runs: Iterable[Replay], sync_ns: int) -> Timeline:
        """The timeline of replays of a plan, each waited for until sync_ns, if that is later."""
        first: Replay | None = None
        times, energies = [], []
        for replay in runs:
            first = first or replay
            times.append(replay.makespan_ns)
            until_fj = replay.energy_until(max(replay.makespan_ns, sync_ns))
            energies.append(until_fj * plan.job.num_gpus)
        assert first is not None
        sync_ns = max(sync_ns, first.makespan_ns)
        return cls(plan, profile, first, sync_ns, tuple(times), tuple(energies))

    @property
    def pipeline(self) -> Pipeline:
        """The operations and what they wait for."""
        return self.replay.problem.pipeline

    @property
    def iteration_time_ns(self) -> int:
        """When this pipeline is finished, ns."""
        return self.replay.makespan_ns

    @cached_property
    def stretch_ns(self) -> NDArray[np.int64]:
        """How much longer each operation could take, all else as it is, without anybody finishing
        later, (N,), ns."""
        times_ns = self.replay.finishes_ns - self.replay.starts_ns
        latest_ns = self.pipeline.latest_finishes(times_ns, self.sync_time_ns)
        return np.asarray(latest_ns) - self.replay.finishes_ns

    @cached_property
    def slices(self) -> list[Slice]:
        """What operations do at one clock each, by operation and time: one slice, unless a switch
        came late, or its parts have clocks of their own."""
        replay, problem, found = self.replay, self.replay.problem, list[Slice]()
        counts = np.bincount(replay.parts.operation)
        for one in map(Slice, *(column.tolist() for column in replay.parts)):
            table, row = problem.tables[problem.table[one.operation]], replay.rows[one.operation]
            split = counts[one.operation] > 1 or replay.factors is not None
            if split or not table.changes_clock[row]:
                found.append(one)
                continue
            begin = one.start_ns
            for piece in part_runs(table, int(row), replay.machine.latency_ns):
                now, end = (piece.frequency_mhz, begin), begin + piece.time_ns
                found.append(Slice(one.operation, *now, end, piece.energy_fj, piece.part))
                begin = end
        return found

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """What each stage does, in JSON types: its busy and blocked time (s), its energy over all
        GPUs of the stage in all replicas (J), its clocks from the one that it begins with, its rows
        and its bubbles."""
        replay, gpus, found = self.replay, self.num_gpus, []
        parts = [one for one in self.slices if one.part and one.frequency_mhz]
        for stage, (first, last) in enumerate(pairwise(self.pipeline.stage_begin.tolist())):
            busy_ns = int(replay.busy_ns[stage])
            blocked_ns = self.sync_time_ns - busy_ns
            waiting_uw = int(replay.problem.blocking_power_uw[stage])
            found.append(
                {
                    "stage": stage,
                    "busy_s": s_from_ns(busy_ns),
                    "blocked_s": s_from_ns(blocked_ns),
                    "computation_energy_j": j_from_fj(
                        sum(replay.energies_fj[first:last].tolist()) * gpus
                    ),
                    "blocking_energy_j": j_from_fj(waiting_uw * blocked_ns * gpus),
                    "clock_changes": [
                        {"at_s": s_from_ns(at), "frequency_mhz": mhz}
                        for at, mhz in self._clock_changes(stage, first, last, parts)
                    ],
                    "operations": self.rows[first:last],
                    "bubbles": self._bubbles(first, last),
                }
            )
        return found

    def _clock_changes(
        self, stage: int, first: int, last: int, parts: Sequence[Slice]
    ) -> list[tuple[int, int]]:
        """When (ns) a stage has another clock (MHz) than before, from the one that it begins with,
        changes by parts of operations included; 0 MHz where it has none."""
        problem, latency_ns = self.replay.problem, self.replay.machine.latency_ns
        left = problem.left_mhz[problem.over_all(self.replay.rows)[first:last]]
        asked_ns, asked_mhz = self.replay.requests(stage)
        within = (one for one in parts if first <= one.operation < last)
        coming = {(one.start_ns, one.frequency_mhz) for one in within}
        coming |= {*zip((asked_ns + latency_ns).tolist(), asked_mhz.tolist(), strict=True)}
        changes = [(0, next(reversed(left[left > 0].tolist()), 0))]
        for at, mhz in sorted(coming):
            if at <= self.sync_time_ns and mhz != changes[-1][1]:
                # At 0 ns a request without latency takes the place of the clock left over.
                changes = [*changes[: -1 if at == 0 else None], (at, mhz)]
        return changes

    def _bubbles(self, first: int, last: int) -> list[dict[str, Any]]:
        """The gaps in a stage's timeline, in which its GPUs wait (EnvPipe, USENIX ATC 2023), s.

        The operation before a gap could_stretch by so much without anybody finishing later, maybe
        pushing others; it could_fill so much of the gap with less energy used: it cannot take
        longer than at the clock where it uses least, waiting left out. Before the first operation
        nothing could.
        """
        problem = self.replay.problem
        starts, finishes = self.replay.starts_ns[first:last], self.replay.finishes_ns[first:last]
        thriftiest_ns = problem.time_ns[problem.over_all(problem.thriftiest_rows)[first:last]]
        begin, end = np.append(0, finishes), np.append(starts, self.sync_time_ns)
        stretch = np.append(0, self.stretch_ns[first:last])
        longer = np.append(0, thriftiest_ns - (finishes - starts))
        fill = np.minimum(np.minimum(end - begin, stretch), longer).clip(0)
        gaps = np.stack([begin, end, stretch, fill], axis=1)[end > begin]
        return [
            {
                "start_s": s_from_ns(start),
                "finish_s": s_from_ns(finish),
                "usable": most > 0,
                "could_stretch_s": s_from_ns(most),
                "could_fill_s": s_from_ns(useful),
            }
            for start, finish, most, useful in gaps.tolist()
        ]

    @property
    def critical_path(self) -> tuple[int, ...]:
        """Indices into pipeline.operations, in time order: a chain, each as soon as the one before
        it lets it, that lasts as long as the iteration."""
        return self.replay.critical_path

    @property
    def num_gpus(self) -> int:
        """GPUs of one stage in all replicas: what an operation's energy is multiplied by."""
        return self.plan.job.num_gpus

    @property
    def energy_fj(self) -> int:
        """Of all GPUs, until all have finished, fJ."""
        return self.run_energies_fj[0]

    @property
    def iteration_time(self) -> float:
        """When this pipeline is finished, s."""
        return s_from_ns(self.iteration_time_ns)

    @property
    def sync_time(self) -> float:
        """When all pipelines are finished, s."""
        return s_from_ns(self.sync_time_ns)

    @property
    def energy(self) -> float:
        """J of all GPUs until sync_time."""
        return j_from_fj(self.energy_fj)

    @property
    def computation_energy(self) -> float:
        """J of all GPUs while they run operations."""
        return j_from_fj(self._computation_fj)

    @property
    def blocking_energy(self) -> float:
        """J of all GPUs while they wait."""
        return j_from_fj(self.energy_fj - self._computation_fj)

    @property
    def _computation_fj(self) -> int:
        return self.num_gpus * sum(map(int, self.replay.energies_fj))

    @property
    def average_power(self) -> float:
        """W of all GPUs until sync_time."""
        return self.energy_fj / (self.sync_time_ns * UW_PER_W)

    @property
    def peak_power(self) -> float:
        """The most that all GPUs draw at a time, W; each operation draws its average throughout."""
        return float(self.power[1].max())

    @cached_property
    def power(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Power of all GPUs over time.

        Returns:
            Times in ns, ascending from 0 to sync_time_ns, (k + 1); and the W between one and the
            next, (k).
        """
        times, power_uw = self.replay.power_steps
        if self.sync_time_ns > self.iteration_time_ns:
            waiting_uw = self.replay.problem.blocking_power_uw.sum()
            times, power_uw = np.append(times, self.sync_time_ns), np.append(power_uw, waiting_uw)
        return times, power_uw.astype(np.float64) * (self.num_gpus / UW_PER_W)

    def at_max_frequency(self) -> Timeline:
        """The same job with every operation at its highest frequency, clocks there from the start.

        Its plan has no lower bound but 0, for no frontier is traced.
        """
        problem, job = self.replay.problem, self.plan.job
        highest = problem.replay(problem.max_frequency_rows)
        plan = plan_of(
            highest,
            job.model_copy(update={"switch_latency_s": None, "min_dwell_s": None}),
            0,
            profile=self.plan.profile,
            target=Target(kind="max-frequency", deadline_s=s_from_ns(highest.makespan_ns)),
            planner="max_frequency",
        )
        return Timeline.of(plan, self.profile, [highest], 0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row an operation as it ran, by stage and in execution order; energy of one GPU."""
        import pandas as pd

        rows = zip(self.pipeline.operations, self.rows, strict=True)
        return pd.DataFrame([{"stage": op.stage, **row} for op, row in rows])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Each operation as it ran in JSON types: times in s, energy of one GPU in J."""
        replay, path = self.replay, set(self.critical_path)
        columns = (replay.finishes_ns, replay.energies_fj, self.stretch_ns)
        known = zip(operation_rows(replay), *(c.tolist() for c in columns), strict=True)
        return [
            row
            | {
                "finish_s": s_from_ns(finish),
                "energy_j": j_from_fj(energy),
                "could_stretch_s": s_from_ns(stretch),
                "critical_path": i in path,
            }
            for i, (row, finish, energy, stretch) in enumerate(known)
        ]

    def __repr__(self) -> str:
        return (
            f"Timeline({self.iteration_time:.6g} s, {self.energy:.6g} J, "
            f"{len(self.pipeline.operations)} operations on {self.pipeline.num_stages} stages)"
        )

    def _repr_png_(self) -> bytes:
        return png_of(drawing("timeline").timeline_figure(self))

    def percentiles(self, percents: Sequence[float]) -> tuple[list[float], list[float]]:
        """Iteration time (s) and energy (J) that so many percent of the runs do not exceed."""
        times = [s_from_ns(time) for time in self.run_times_ns]
        energies = [j_from_fj(energy) for energy in self.run_energies_fj]
        return np.percentile(times, percents).tolist(), np.percentile(energies, percents).tolist()

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON types: times in s, energies in J, powers in W."""
        return {
            "planner": self.plan.planner,
            "profile": self.plan.profile.model_dump(exclude_none=True),
            "iteration_time_s": self.iteration_time,
            "sync_time_s": self.sync_time,
            "energy_j": self.energy,
            "computation_energy_j": self.computation_energy,
            "blocking_energy_j": self.blocking_energy,
            "average_power_w": self.average_power,
            "peak_power_w": self.peak_power,
            "stages": self.stages,
            "critical_path": [
                [op.stage, op.instruction, op.microbatch]
                for op in (self.pipeline.operations[i] for i in self.critical_path)
            ],
        }
