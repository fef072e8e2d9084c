"""Replay of one iteration: what every GPU does when, what it draws, and where it waits for nothing.

Without noise and latency a replay is exact: it gives a plan's stated time and energy to the last
digit. With them it tells how much of the plan survives on a real machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Unpack

import numpy as np

from envplan._io.notebook import drawing, png_of
from envplan.pipeline import Pipeline
from envplan.plan import Plan, Target, replay_plan
from envplan.plan.build import plan_of
from envplan.profile import Profile, part_runs
from envplan.replay import Replay
from envplan.simulation.conditions import ConditionFields, Conditions
from envplan.simulation.results import (
    Bubble,
    ClockChange,
    OperationRun,
    Percentiles,
    PowerSteps,
    Slice,
    StageUse,
)
from envplan.units import POWER_UNITS_PER_W, j_from_10fj, s_from_ns

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

__all__ = ["Timeline", "simulate"]


def simulate(
    plan: Plan, profile: Profile, *, force: bool = False, **conditions: Unpack[ConditionFields]
) -> Timeline:
    """Replay a plan: every operation starts as soon as those that it waits for let it.

    Noise multiplies the time of each operation by a factor drawn for it, lognormal with mean 1 and
    standard deviation `noise`. Power stays that of the option, so energy grows with time. All GPUs
    of a stage, in all replicas, are drawn alike. Run k draws the same factors in the same order
    whatever the plan and the number of runs, so plans can be compared draw by draw.

    Switch latency: a clock comes `switch_latency` after it is asked for. So at time t a stage runs
    at the clock of the last request made by t - switch_latency, even if a further one has been made
    since. Where `ask` is "start", an operation's clock is asked for as it starts; where it is
    "ahead", `switch_latency` before, but not before the operation before it on the stage starts,
    nor before the iteration begins. Under noise it is then asked for when a timer says so that
    knows the plan's times only, so that it may come early or late; csrc/replay.hpp says exactly
    when. An operation during which the clock changes is split in proportion to the work done: if it
    has run for a share x of its time at the old clock, the share 1 - x of its time at the new one
    is left (rounded up to a whole ns), and each part draws the power of its clock. Running at a
    clock that the profile does not list for an operation, it takes the time and energy of the
    nearest clock listed (the higher of two) with the same config. Operations at 0 MHz request
    nothing and take their time at any clock. The iteration begins at the clock that the stage's
    last request of the iteration before has left.

    Args:
        profile: what the plan was made from.
        force: go on though the profile has changed since the plan was made.
        conditions: fields of Conditions: noise=0.02, seed=1, runs=100, switch_latency=s,
            ask="ahead", sync_time=s.

    Returns:
        The timeline of the first run, with time and energy of all runs.

    Raises:
        InputError: an argument is out of range, the profile has changed, or the plan does not fit
            it or its own job.
    """
    checked = Conditions.of(**conditions)
    exact = replay_plan(plan, profile, force=force, machine=checked.machine(plan.job))
    return Timeline.of(plan, profile, checked.replays(exact), checked.sync_ns)


@dataclass(frozen=True)
class Timeline:
    """One iteration as it ran. Made by simulate.

    Attributes:
        plan: what ran.
        profile: what it was made from.
        replay: of the first run, one GPU a stage.
        sync_time_ns: when all pipelines are finished, a straggler included; ns.
        run_times_ns: iteration time of each run, ns; the first is this one.
        run_energies_10fj: energy of each run over all GPUs until all have finished, 10 fJ.
    """

    plan: Plan
    profile: Profile
    replay: Replay
    sync_time_ns: int
    run_times_ns: tuple[int, ...]
    run_energies_10fj: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, profile: Profile, runs: Iterable[Replay], sync_ns: int) -> Timeline:
        """The timeline of replays of a plan, each waited for until sync_ns, if that is later."""
        shown: Replay | None = None
        times_ns, energies_10fj = [], []
        for replay in runs:
            shown = shown or replay
            times_ns.append(replay.makespan_ns)
            until_10fj = replay.energy_until(max(replay.makespan_ns, sync_ns))
            energies_10fj.append(until_10fj * plan.job.num_gpus)
        assert shown is not None, "there is at least one run"
        return cls(
            plan=plan,
            profile=profile,
            replay=shown,
            sync_time_ns=max(sync_ns, shown.makespan_ns),
            run_times_ns=tuple(times_ns),
            run_energies_10fj=tuple(energies_10fj),
        )

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
        """How much longer each operation could take without anybody finishing later, (N,), ns.

        All other operations keep their times. Project scheduling calls this the total float.
        """
        times_ns = self.replay.finishes_ns - self.replay.starts_ns
        latest_ns = self.pipeline.latest_finishes(times_ns, self.sync_time_ns)
        return np.asarray(latest_ns) - self.replay.finishes_ns

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Operations while their clocks stay the same, by operation and time.

        An operation is one slice, unless a switch came late or its parts have clocks of their own.
        """
        replay = self.replay
        columns = [column.tolist() for column in replay.parts]
        num_segments = np.bincount(replay.parts.operation)
        slices: list[Slice] = []
        for segment in map(Slice, *columns):
            # Segments of a late clock, and of times with noise, are shown as they ran.
            was_split = num_segments[segment.operation] > 1 or replay.factors is not None
            if was_split or not self._changes_clock(segment.operation):
                slices.append(segment)
            else:
                slices.extend(self._slices_of_parts(segment))
        return tuple(slices)

    def _changes_clock(self, operation: int) -> bool:
        """Whether the parts of an operation have clocks of their own."""
        problem = self.replay.problem
        table = problem.tables[problem.table[operation]]
        return bool(table.changes_clock[self.replay.rows[operation]])

    def _slices_of_parts(self, whole: Slice) -> Iterator[Slice]:
        """A slice for each part of an operation whose parts have clocks of their own."""
        problem = self.replay.problem
        table = problem.tables[problem.table[whole.operation]]
        option = int(self.replay.rows[whole.operation])
        start_ns = whole.start_ns
        for run in part_runs(table, option, self.replay.machine.latency_ns):
            finish_ns = start_ns + run.time_ns
            yield Slice(
                operation=whole.operation,
                frequency_mhz=run.frequency_mhz,
                start_ns=start_ns,
                finish_ns=finish_ns,
                energy_10fj=run.energy_10fj,
                part=run.part,
            )
            start_ns = finish_ns

    @cached_property
    def operations(self) -> tuple[OperationRun, ...]:
        """Each operation as it ran, as pipeline.operations lists them, (N,)."""
        replay, problem = self.replay, self.replay.problem
        on_critical_path = set(self.critical_path)
        table_numbers, options = problem.table.tolist(), replay.rows.tolist()
        starts_ns, finishes_ns = replay.starts_ns.tolist(), replay.finishes_ns.tolist()
        energies_10fj = replay.energies_10fj.tolist()
        stretch_ns = self.stretch_ns.tolist()
        runs = []
        for index, operation in enumerate(problem.pipeline.operations):
            table, option = problem.tables[table_numbers[index]], options[index]
            run = OperationRun(
                stage=operation.stage,
                instruction=operation.instruction,
                microbatch=operation.microbatch,
                chunk=operation.chunk,
                frequency_mhz=int(table.frequency_mhz[option]),
                config=table.config[option],
                start_s=s_from_ns(starts_ns[index]),
                finish_s=s_from_ns(finishes_ns[index]),
                energy_j=j_from_10fj(energies_10fj[index]),
                could_stretch_s=s_from_ns(stretch_ns[index]),
                critical_path=index in on_critical_path,
            )
            runs.append(run)
        return tuple(runs)

    @cached_property
    def stages(self) -> tuple[StageUse, ...]:
        """Time and energy of each stage, with its operations, clocks and bubbles."""
        begins: list[int] = self.pipeline.stage_begin.tolist()
        stages = []
        for stage, (begin, end) in enumerate(pairwise(begins)):
            stages.append(self._stage_use(stage, begin, end))
        return tuple(stages)

    def _stage_use(self, stage: int, begin: int, end: int) -> StageUse:
        """A stage, the operations of which are those from begin up to end."""
        replay = self.replay
        busy_ns = int(replay.busy_ns[stage])
        blocked_ns = self.sync_time_ns - busy_ns
        computation_10fj = sum(replay.energies_10fj[begin:end].tolist())
        blocking_10fj = int(replay.problem.blocking_power_10uw[stage]) * blocked_ns
        return StageUse(
            stage=stage,
            busy_s=s_from_ns(busy_ns),
            blocked_s=s_from_ns(blocked_ns),
            computation_energy_j=j_from_10fj(computation_10fj * self.num_gpus),
            blocking_energy_j=j_from_10fj(blocking_10fj * self.num_gpus),
            clock_changes=tuple(self._clock_changes(stage, begin, end)),
            operations=self.operations[begin:end],
            bubbles=tuple(self._bubbles(begin, end)),
        )

    def _clock_changes(self, stage: int, begin: int, end: int) -> list[ClockChange]:
        """The clocks of a stage in time order, from the one that the last iteration has left."""
        problem = self.replay.problem
        options = problem.over_all(self.replay.rows)[begin:end]
        left_mhz = problem.left_mhz[options]
        controlled_mhz = left_mhz[left_mhz > 0].tolist()
        first_mhz = controlled_mhz[-1] if controlled_mhz else 0
        changes = [ClockChange(0, first_mhz)]
        for at_ns, frequency_mhz in sorted(self._clocks_in_force(stage, begin, end)):
            if at_ns > self.sync_time_ns or frequency_mhz == changes[-1].frequency_mhz:
                continue
            if at_ns == 0:
                # A request without latency takes the place of the clock left over.
                changes.pop()
            changes.append(ClockChange(at_ns, frequency_mhz))
        return changes

    def _clocks_in_force(self, stage: int, begin: int, end: int) -> set[tuple[int, int]]:
        """Times (ns) at which clocks (MHz) of a stage come into force, those of parts included."""
        requested_ns, requested_mhz = self.replay.requests(stage)
        effective_ns = requested_ns + self.replay.machine.latency_ns
        clocks = set(zip(effective_ns.tolist(), requested_mhz.tolist(), strict=True))
        for part in self._controlled_parts:
            if begin <= part.operation < end:
                clocks.add((part.start_ns, part.frequency_mhz))
        return clocks

    @cached_property
    def _controlled_parts(self) -> list[Slice]:
        """Parts of operations that have clocks of their own."""
        return [piece for piece in self.slices if piece.part and piece.frequency_mhz]

    def _bubbles(self, begin: int, end: int) -> Iterator[Bubble]:
        """The gaps in a stage's timeline, in time order."""
        problem = self.replay.problem
        starts_ns = self.replay.starts_ns[begin:end]
        finishes_ns = self.replay.finishes_ns[begin:end]
        least_effective_options = problem.over_all(problem.least_effective_rows)[begin:end]
        least_effective_times_ns = problem.time_ns[least_effective_options]
        # Gap k follows operation k - 1; nothing is before the first one.
        gap_start_ns = np.append(0, finishes_ns)
        gap_finish_ns = np.append(starts_ns, self.sync_time_ns)
        gap_ns = gap_finish_ns - gap_start_ns
        stretch_ns = np.append(0, self.stretch_ns[begin:end])
        useful_ns = np.append(0, least_effective_times_ns - (finishes_ns - starts_ns))
        fill_ns = np.minimum.reduce([gap_ns, stretch_ns, useful_ns]).clip(0)
        # Columns in the order of a Bubble's fields.
        gaps = np.stack([gap_start_ns, gap_finish_ns, stretch_ns, fill_ns], axis=1)
        for gap in gaps[gap_ns > 0].tolist():
            yield Bubble(*map(s_from_ns, gap))

    @property
    def critical_path(self) -> tuple[int, ...]:
        """A chain of operations as long as the iteration: indices into pipeline.operations.

        In time order; each begins as soon as the one before it lets it.
        """
        return self.replay.critical_path

    @property
    def num_gpus(self) -> int:
        """GPUs of one stage in all replicas: what an operation's energy is multiplied by."""
        return self.plan.job.num_gpus

    @property
    def energy_10fj(self) -> int:
        """Energy of all GPUs until all have finished, 10 fJ."""
        return self.run_energies_10fj[0]

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
        return j_from_10fj(self.energy_10fj)

    @property
    def computation_energy(self) -> float:
        """J of all GPUs while they run operations."""
        return j_from_10fj(self._computation_10fj)

    @property
    def blocking_energy(self) -> float:
        """J of all GPUs while they wait."""
        return j_from_10fj(self.energy_10fj - self._computation_10fj)

    @property
    def _computation_10fj(self) -> int:
        return self.num_gpus * sum(map(int, self.replay.energies_10fj))

    @property
    def average_power(self) -> float:
        """W of all GPUs until sync_time."""
        return self.energy_10fj / (self.sync_time_ns * POWER_UNITS_PER_W)

    @property
    def peak_power(self) -> float:
        """The most that all GPUs draw at a time, W; each operation draws its average throughout."""
        return float(self.power.power_w.max())

    @cached_property
    def power(self) -> PowerSteps:
        """Power of all GPUs over time, until all have finished."""
        times_ns, power_10uw = self.replay.power_steps
        if self.sync_time_ns > self.iteration_time_ns:
            waiting_10uw = self.replay.problem.blocking_power_10uw.sum()
            times_ns = np.append(times_ns, self.sync_time_ns)
            power_10uw = np.append(power_10uw, waiting_10uw)
        return PowerSteps(
            times_ns, power_10uw.astype(np.float64) * (self.num_gpus / POWER_UNITS_PER_W)
        )

    def at_max_frequency(self) -> Timeline:
        """The same job with every operation at its highest frequency, clocks there from the start.

        Its plan has no lower bound but 0, for no frontier is traced.
        """
        problem, job = self.replay.problem, self.plan.job
        highest = problem.replay(problem.max_frequency_rows)
        plan = plan_of(
            highest,
            job.model_copy(update={"switch_latency_s": None, "ask": None, "min_dwell_s": None}),
            0,
            profile=self.plan.profile,
            target=Target(kind="max-frequency", deadline_s=s_from_ns(highest.makespan_ns)),
            planner="max_frequency",
        )
        return Timeline.of(plan, self.profile, [highest], 0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row an operation as it ran, by stage and in execution order; energy of one GPU."""
        import pandas as pd

        return pd.DataFrame([{"stage": run.stage, **run.to_dict()} for run in self.operations])

    def __repr__(self) -> str:
        return (
            f"Timeline({self.iteration_time:.6g} s, {self.energy:.6g} J, "
            f"{len(self.pipeline.operations)} operations on {self.pipeline.num_stages} stages)"
        )

    def _repr_png_(self) -> bytes:
        return png_of(drawing("timeline").timeline_figure(self))

    def percentiles(self, percents: Sequence[float]) -> Percentiles:
        """Iteration time and energy that so many percent of the runs do not exceed."""
        times_s = [s_from_ns(time_ns) for time_ns in self.run_times_ns]
        energies_j = [j_from_10fj(energy_10fj) for energy_10fj in self.run_energies_10fj]
        return Percentiles(
            iteration_time_s=np.percentile(times_s, percents).tolist(),
            energy_j=np.percentile(energies_j, percents).tolist(),
        )

    def to_dict(self) -> dict[str, object]:
        """All of it in JSON types: times in s, energies in J, powers in W."""
        critical = [self.pipeline.operations[index] for index in self.critical_path]
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
            "stages": [stage.to_dict() for stage in self.stages],
            "critical_path": [[op.stage, op.instruction, op.microbatch] for op in critical],
        }
