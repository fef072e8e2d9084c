"""From a plan to a frequency plan: ranks, clocks the GPU has, and no change faster than it follows.

Nothing here makes an operation slower than it was planned. A clock the GPU lacks is replaced by the
next one above, and operations whose clock would change too soon are raised to a neighbour's; where
the profile knows the higher clock and says that it is slower after all, as noise may have it, a
still higher one is taken. So every operation takes at most its planned time, and with it every
start and the iteration as a whole; the replay that follows confirms it to the nanosecond.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from envplan.devices.modelled import GPUS, ModelledGpu, gpu
from envplan.errors import InputError
from envplan.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    ClockSource,
    Dwell,
    FrequencyPlan,
    LadderRung,
    Layout,
    Operation,
    RaisedClock,
    RankPlan,
    StageClocks,
)
from envplan.pipeline import Pipeline
from envplan.plan import Plan, Priced, option_tables, price, rows_by_knobs
from envplan.power import peak_uw
from envplan.profile import OptionTable, Profile
from envplan.simulation import price_with_latency
from envplan.topology import Topology
from envplan.units import (
    j_from_fj,
    ns_from_s,
    ns_from_s_ceil,
    ns_from_s_floor,
    s_from_ns,
    w_from_uw,
)
from envplan.verify import as_referenced, check_operations, check_reference, stated_powers

__all__ = [
    "Clocks",
    "apply_plan",
    "given_clocks",
    "live_clocks",
    "modelled_clocks",
    "profile_clocks",
    "stage_clocks",
]

_MAX_CLOCKS: Final = 10_000
_MAX_MHZ: Final = 10**6


@dataclass(frozen=True)
class Clocks:
    """The SM clocks that a GPU can be set to.

    Attributes:
        mhz: ascending.
        source: where they come from.
        gpu: the GPU's name; None if nobody said.
    """

    mhz: tuple[int, ...]
    source: ClockSource
    gpu: str | None


def modelled_clocks(name: str) -> Clocks:
    """Those of a known GPU.

    Args:
        name: its short name, such as "a40", or the one its driver gives it.

    Raises:
        InputError: it is not known; the message lists those that are.
    """
    model = _known(name) or gpu(name)
    return Clocks(tuple(sorted(model.clocks_mhz)), "modelled", model.name)


def profile_clocks(profile: Profile, stage: int | None = None) -> Clocks:
    """Those of the GPU that a profile names; if it is not a known one, those in the profile.

    Args:
        stage: of the profile; None: of all of them, which run on the same GPU.
    """
    name = profile.metadata.gpu if stage is None else profile.metadata.gpu_of(stage)
    if name is not None and _known(name):
        return modelled_clocks(name)
    clocks: set[int] = set()
    for s in range(profile.num_stages) if stage is None else [stage]:
        for instruction in profile.instructions:
            if profile.has(s, instruction):
                clocks.update(profile.table(s, instruction).frequency_mhz.tolist())
    return Clocks(tuple(sorted(clocks - {0})), "profile", name)


def stage_clocks(profile: Profile, pipeline: Pipeline) -> list[Clocks]:
    """For each stage of a pipeline the clocks of its GPU, (num_stages,).

    Raises:
        InputError: parts of the model that one stage runs were profiled on different GPUs.
    """
    if profile.metadata.stage_gpus is None:
        return [profile_clocks(profile)] * pipeline.num_stages
    clocks = []
    for stage, (first, last) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        parts = sorted({op.profile_stage for op in pipeline.operations[first:last]})
        names = sorted({profile.metadata.gpu_of(part) or "" for part in parts})
        if len(names) > 1:
            raise InputError(
                f"stage {stage} runs stages {', '.join(map(str, parts))} of the profile, which "
                f"were profiled on {' and '.join(names)}; one stage runs on one GPU"
            )
        clocks.append(profile_clocks(profile, parts[0]))
    return clocks


def given_clocks(text: str, name: str | None = None) -> Clocks:
    """Those that a text lists, as in "210,900,1410" or, in steps, "210-1410:15".

    Args:
        name: of the GPU.

    Raises:
        InputError: it lists none, or no clocks.
    """
    clocks: set[int] = set()
    for part in text.split(","):
        span = _span(part.strip())
        if not span or span[0] < 1 or span[-1] > _MAX_MHZ or len(span) > _MAX_CLOCKS:
            raise InputError(
                f"--clocks must list MHz, as in 210,900,1410 or 210-1410:15, not {part.strip()!r}"
            )
        clocks.update(span)
    return Clocks(tuple(sorted(clocks)), "given", name)


def _span(text: str) -> range:
    """The numbers of "210" or "210-1410:15"; none if the text is neither."""
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}):(0*[1-9]\d{0,6}))?", text, re.ASCII)
    if match is None:
        return range(0)
    low, high, step = match.groups()
    return range(int(low), int(high or low) + 1, int(step or 1))


def live_clocks(profile: Profile, *, force: bool = False) -> Clocks:
    """Those that every NVIDIA GPU of this machine has, as its driver says.

    Args:
        force: take them though the profile was made on another GPU.

    Raises:
        DeviceError: there is no GPU or no driver.
        InputError: the GPUs differ, or the profile is another GPU's.
    """
    from envplan.devices import backend

    if profile.metadata.stage_gpus is not None and not force:
        raise InputError(
            "the plan's stages run on different GPUs, and this machine knows its own only; name "
            "one for each stage with --gpu, or leave both out to take what the profile says"
        )
    source = backend("nvml")
    try:
        infos = [device.info for device in source.devices()]
    finally:
        source.close()
    names = sorted({info.name for info in infos})
    if len(names) > 1:
        raise InputError(
            f"this machine has different GPUs, {' and '.join(names)}; name one with --gpu, or its "
            "clocks with --clocks"
        )
    if profile.metadata.gpu not in (None, names[0]) and not force:
        raise InputError(
            f"the plan's profile is of {profile.metadata.gpu}, but this machine has {names[0]}; "
            "profile it and plan again, or go on with --force"
        )
    common = set.intersection(*(set(info.supported_clocks) for info in infos))
    if not common:
        raise InputError(
            f"the driver says of no clock that every {names[0]} here supports it; list them with "
            "--clocks"
        )
    return Clocks(tuple(sorted(common)), "nvml", names[0])


def _known(name: str) -> ModelledGpu | None:
    """The modelled GPU of either of its names."""
    wanted = name.lower()
    return next((m for m in GPUS.values() if wanted in (m.key, m.name.lower())), None)


def apply_plan(
    plan: Plan,
    profile: Profile,
    *,
    topology: Topology,
    clocks: Clocks | Sequence[Clocks] | None = None,
    devices: Sequence[int] = tuple(range(8)),
    min_dwell: float | None = None,
    ladder: bool = True,
    force: bool = False,
    plan_sha256: str | None = None,
) -> FrequencyPlan:
    """The frequency plan of a plan.

    Args:
        plan: what to do.
        profile: the profile it was made from.
        topology: which rank runs which stage.
        clocks: what the GPU can be set to, or for each stage its own; default: stage_clocks.
        devices: GPU indices of a node; rank r gets number r modulo their count.
        min_dwell: s; merge neighbouring operations until no clock changes sooner than this after
            the last change. None: leave them alone.
        ladder: include the plan's ladder, if it has one.
        force: go on though the profile has changed since.
        plan_sha256: of the plan's file; default: of the text that Plan.save writes.

    Raises:
        InputError: profile and plan do not belong together, the plan does not hold, or the GPU has
            no clock that keeps up with it.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    pipeline = plan.job.pipeline()
    check_operations(plan, pipeline)
    _refuse_too_large(topology, pipeline)
    gpus = _by_stage(clocks, pipeline) or stage_clocks(profile, pipeline)
    maker = _Maker(plan, pipeline, profile, gpus, _num_gpus(plan, topology))
    configs = [operation.config for stage in plan.stages for operation in stage]
    planned = maker.planned(_flat(plan.frequencies), configs, "")
    if not force:
        _check_deadline(maker.price(planned), plan, "envplan check says more")
    supported = maker.snapped(planned)
    applied, dwell = supported, None
    if min_dwell is not None:
        applied, dwell = maker.merged(supported, min_dwell)
    priced = maker.price(applied)
    if not force:
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        advice = "plan again, from a profile of this GPU and with solve's own --min-dwell"
        _check_deadline(priced, plan, advice)
        _check_dwell(applied, priced, maker, plan.job.min_dwell_s)
        _check_peak(applied, priced, maker, plan.target.peak_power_w)
    rungs = _rungs(plan, maker, min_dwell, priced) if ladder else None
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256=plan_sha256 or hashlib.sha256(plan.to_json().encode()).hexdigest(),
        profile_sha256=profile.sha256,
        gpu=gpus[0].gpu if len(set(gpus)) == 1 else None,
        clocks_source=gpus[0].source,
        supported_clocks_mhz=sorted({mhz for gpu in gpus for mhz in gpu.mhz}),
        stage_gpus=_stage_gpus(gpus),
        world_size=topology.world_size,
        layout=Layout(
            stages=topology.stages,
            tp=topology.tp,
            cp=topology.cp,
            dp=topology.dp,
            rank_order=topology.rank_order,
        ),
        deadline_s=plan.target.deadline_s,
        iteration_time_s=s_from_ns(priced.makespan_ns),
        energy_j=maker.joules(priced.energy_fj),
        raised=maker.raised(planned, supported),
        dwell=dwell,
        ranks=_ranks(topology, pipeline, applied, configs, rungs or [], devices),
        ladder=rungs,
    )


def _num_gpus(plan: Plan, topology: Topology) -> int:
    """GPUs of one stage in all replicas: what an operation's energy is multiplied by.

    Raises:
        InputError: the plan keeps to joules or watts of another number.
    """
    count, target = topology.world_size // topology.stages, plan.target
    absolute = target.kind in ("energy-budget", "power-cap") or target.peak_power_w is not None
    if count != plan.job.num_gpus and absolute:
        raise InputError(
            f"every stage has {count} GPUs, but the plan's J or W are those of "
            f"{plan.job.num_gpus}; solve again with --gpus-per-stage {topology.tp * topology.cp} "
            f"--replicas {topology.dp}"
        )
    return count


def _by_stage(clocks: Clocks | Sequence[Clocks] | None, pipeline: Pipeline) -> list[Clocks]:
    """The clocks given for each stage; none where none are.

    Raises:
        InputError: they are given for more or fewer stages than there are.
    """
    if clocks is None:
        return []
    if isinstance(clocks, Clocks):
        return [clocks] * pipeline.num_stages
    if len(clocks) != pipeline.num_stages:
        raise InputError(
            f"{len(clocks)} GPUs are named for {pipeline.num_stages} stages; name one for all, or "
            "one for each"
        )
    return list(clocks)


def _stage_gpus(gpus: Sequence[Clocks]) -> list[StageClocks] | None:
    if len(set(gpus)) == 1:
        return None
    return [
        StageClocks(gpu=gpu.gpu, clocks_source=gpu.source, supported_clocks_mhz=list(gpu.mhz))
        for gpu in gpus
    ]


def _refuse_too_large(topology: Topology, pipeline: Pipeline) -> None:
    count = topology.world_size // topology.stages * len(pipeline.operations)
    if count > MAX_OPERATIONS:
        raise InputError(
            f"{topology.world_size} ranks have {count} operations together; a frequency plan holds "
            f"at most {MAX_OPERATIONS}"
        )


def _check_deadline(priced: Priced, plan: Plan, advice: str) -> None:
    deadline_s = plan.target.deadline_s
    if priced.makespan_ns > ns_from_s_floor(deadline_s):
        raise InputError(
            f"replayed, the plan takes {s_from_ns(priced.makespan_ns)!r} s, more than its deadline "
            f"of {deadline_s!r} s; {advice}"
        )


def _check_dwell(
    applied: _Choice, priced: Priced, maker: _Maker, min_dwell_s: float | None
) -> None:
    too_soon = maker.too_soon(applied, priced, min_dwell_s)
    if too_soon is not None:
        raise InputError(
            f"with clocks raised to those the GPU has, or for --min-dwell, {too_soon}, within the "
            f"{min_dwell_s!r} s that the plan keeps; plan again from a profile of clocks that the "
            "GPU has"
        )


def _keeps_limits(choice: _Choice, priced: Priced, maker: _Maker, plan: Plan) -> bool:
    """Whether a rung's clocks last, and draw no more, than the plan says."""
    if maker.too_soon(choice, priced, plan.job.min_dwell_s) is not None:
        return False
    cap_w = plan.target.peak_power_w
    return cap_w is None or maker.peak_w(choice, priced) <= cap_w


def _check_peak(applied: _Choice, priced: Priced, maker: _Maker, cap_w: float | None) -> None:
    if cap_w is None:
        return
    peak_w = maker.peak_w(applied, priced)
    if peak_w > cap_w:
        raise InputError(
            "with clocks raised to those the GPU has, or for --min-dwell, the GPUs draw "
            f"{peak_w!r} W at the peak, more than the plan's cap of {cap_w!r} W; plan again for a "
            "lower cap, or from a profile of clocks that the GPU has"
        )


def _flat(stages: Iterable[Iterable[int]]) -> list[int]:
    return [value for stage in stages for value in stage]


def _rungs(
    plan: Plan, maker: _Maker, min_dwell: float | None, fastest: Priced
) -> list[LadderRung] | None:
    """The plan's ladder with clocks the GPU has, without rungs that no longer save anything or
    keep to the plan's limits."""
    if plan.ladder is None:
        return None
    rungs: list[LadderRung] = []
    last_ns, least_fj = fastest.makespan_ns, maker.above_waiting_fj(fastest)
    for n, rung in enumerate(plan.ladder):
        count = len(maker.pipeline.operations)
        frequencies = _flat(rung.frequencies_mhz)
        configs = [c for stage in rung.configs for c in stage] if rung.configs else [""] * count
        lengths = [last - first for first, last in maker.stages]
        if [len(stage) for stage in rung.frequencies_mhz] != lengths or len(configs) != count:
            raise InputError(f"ladder[{n}] does not have one clock for every operation")
        choice = maker.snapped(maker.planned(frequencies, configs, f"ladder[{n}]: "))
        if min_dwell is not None:
            choice, _ = maker.merged(choice, min_dwell)
        priced = maker.price(choice)
        above_fj = maker.above_waiting_fj(priced)
        saves = priced.makespan_ns > last_ns and above_fj < least_fj
        if saves and _keeps_limits(choice, priced, maker, plan):
            last_ns, least_fj = priced.makespan_ns, above_fj
            rungs.append(
                LadderRung(
                    iteration_time_s=s_from_ns(last_ns),
                    energy_j=maker.joules(priced.energy_fj),
                    frequencies_mhz=[choice.mhz[first:last] for first, last in maker.stages],
                    configs=rung.configs,
                )
            )
    return rungs


def _ranks(
    topology: Topology,
    pipeline: Pipeline,
    applied: _Choice,
    configs: Sequence[str],
    rungs: Sequence[LadderRung],
    devices: Sequence[int],
) -> list[RankPlan]:
    operations: list[list[Operation]] = [[] for _ in range(topology.stages)]
    for op, mhz in zip(pipeline.operations, applied.mhz, strict=True):
        operations[op.stage].append((op.instruction, op.microbatch, op.chunk, mhz))
    begins = pipeline.stage_begin.tolist()
    clocks = [
        sorted(
            {operation[3] for operation in stage}.union(*(r.frequencies_mhz[s] for r in rungs))
            - {0}
        )
        for s, stage in enumerate(operations)
    ]
    stages = [topology.stage_of(rank) for rank in range(topology.world_size)]
    return [
        RankPlan(
            rank=rank,
            stage=stage,
            device=devices[rank % len(devices)],
            clocks_mhz=clocks[stage],
            operations=operations[stage],
            configs=list(configs[begins[stage] : begins[stage + 1]]) if any(configs) else None,
        )
        for rank, stage in enumerate(stages)
    ]


class _Choice(NamedTuple):
    """A clock for every operation.

    Attributes:
        mhz: of each operation; 0 where none is set.
        row: the row of each operation's table that stands for it: that of its clock, or, where the
            profile does not know that, of the highest clock below.
    """

    mhz: list[int]
    row: list[int]


class _Raise(NamedTuple):
    """A way to make a clock last longer.

    Attributes:
        clocks: the operations to be raised, and to what.
        enough: whether the clock then lasts long enough, or as long as its neighbour's.
        cost_fj: of one GPU per stage and one replica.
    """

    clocks: dict[int, int]
    enough: bool
    cost_fj: int


class _Segment(NamedTuple):
    """Operations first .. last - 1 of a stage, one after the other at one clock."""

    first: int
    last: int
    mhz: int
    lasts_ns: int


class _Replay(NamedTuple):
    """When operations run with some choice of clocks.

    Attributes:
        starts: of each operation, ns.
        ends: when the next operation of its stage starts, be it in the next iteration, ns.
        segments: for each stage its operations by clock.
    """

    starts: list[int]
    ends: list[int]
    segments: list[list[_Segment]]


class _Maker:
    """The choices of clocks for one plan's operations."""

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        profile: Profile,
        clocks: Sequence[Clocks],
        num_gpus: int,
    ) -> None:
        self.pipeline = pipeline
        self.stages = list(pairwise(pipeline.stage_begin.tolist()))
        self._profile = profile
        self._clocks = clocks
        self._tables = option_tables(pipeline, profile)
        self._knobs = rows_by_knobs(pipeline, profile)
        self._powers_uw = stated_powers(plan, pipeline)
        self._num_gpus = num_gpus
        self._latency_ns = ns_from_s(plan.job.switch_latency_s or 0.0)
        self._rows: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self._known: dict[tuple[int, int, int], int] = {}

    def above_waiting_fj(self, priced: Priced) -> int:
        """What one GPU a stage uses above waiting for as long, fJ: see Job.above_waiting_fj."""
        return priced.energy_fj - sum(self._powers_uw) * priced.makespan_ns

    def joules(self, energy_fj: int) -> float:
        """Energy over all GPUs, J, from that of one GPU per stage and one replica."""
        return j_from_fj(energy_fj * self._num_gpus)

    def price(self, choice: _Choice) -> Priced:
        """The exact replay of a choice."""
        options = np.array(choice.row, np.int32)
        if self._latency_ns == 0:
            return price(self.pipeline, self._profile, options, self._powers_uw)
        return price_with_latency(
            self.pipeline, self._profile, options, self._powers_uw, self._latency_ns
        )

    def too_soon(self, choice: _Choice, priced: Priced, min_dwell_s: float | None) -> str | None:
        """The first clock of a choice that is changed within min_dwell_s, in words."""
        from envplan.frontier.switching import clock_that_changes_too_soon

        if min_dwell_s is None:
            return None
        starts, dwell_ns = priced.starts_ns.tolist(), ns_from_s_ceil(min_dwell_s)
        return clock_that_changes_too_soon(
            self.pipeline, choice.mhz, starts, priced.makespan_ns, dwell_ns
        )

    def peak_w(self, choice: _Choice, priced: Priced) -> float:
        """The most that all GPUs draw at a time, W."""
        options = np.array(choice.row, np.int32)
        peak = peak_uw(self.pipeline, self._tables, options, priced.starts_ns, self._powers_uw)
        return w_from_uw(peak * self._num_gpus)

    def planned(self, frequencies: Sequence[int], configs: Sequence[str], where: str) -> _Choice:
        """The choice that a plan or a rung states.

        Raises:
            InputError: a frequency is not in the profile.
        """
        rows = []
        for known, mhz, config, op in zip(
            self._knobs, frequencies, configs, self.pipeline.operations, strict=True
        ):
            row = known.get((mhz, config))
            if row is None:
                raise InputError(
                    f"{where}{mhz} MHz for {op.instruction} {op.microbatch} of stage {op.stage} is "
                    f"not a row of profile {self._profile.name}"
                )
            rows.append(row)
        return _Choice(list(frequencies), rows)

    def snapped(self, planned: _Choice) -> _Choice:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        mhz, rows = [], []
        for op, (asked, row) in enumerate(zip(planned.mhz, planned.row, strict=True)):
            clock = self._fitting([op], planned, asked) if asked else 0
            if clock is None:
                raise self._too_fast(op, asked)
            mhz.append(clock)
            rows.append(self._row_at(op, row, clock) if clock else row)
        return _Choice(mhz, rows)

    def raised(self, planned: _Choice, applied: _Choice) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        counts: Counter[tuple[int, str, int, int, bool]] = Counter()
        for op, table, asked, mhz, row in zip(
            self.pipeline.operations,
            self._tables,
            planned.mhz,
            applied.mhz,
            applied.row,
            strict=True,
        ):
            if mhz != asked:
                known = int(table.frequency_mhz[row]) == mhz
                counts[op.stage, op.instruction, asked, mhz, known] += 1
        return [
            RaisedClock(
                stage=stage,
                instruction=instruction,
                planned_mhz=asked,
                applied_mhz=mhz,
                operations=count,
                profiled=known,
            )
            for (stage, instruction, asked, mhz, known), count in sorted(counts.items())
        ]

    def merged(self, choice: _Choice, min_dwell_s: float) -> tuple[_Choice, Dwell]:
        """The choice with operations raised until clocks last, and what that cost.

        A clock lasts from the start of its first operation to that of the next one with another
        clock, waits included, and through the end of an iteration into the next. Clocks that are
        too short are taken up one by one, each time in the cheapest of four ways: raise them to the
        clock before or after, or raise operations before or after to them, one by one. Clocks only
        rise, so this ends.
        """
        least_ns = ns_from_s_ceil(min_dwell_s)
        before, first = self.price(choice), self._replay(choice)
        current, replay = _Choice(list(choice.mhz), list(choice.row)), first
        while raises := self._raises(current, replay, least_ns):
            for op, mhz in raises.items():
                current.row[op] = self._row_at(op, current.row[op], mhz)
                current.mhz[op] = mhz
            replay = self._replay(current)
        energy_fj = self.price(current).energy_fj - before.energy_fj
        return current, Dwell(
            min_dwell_s=min_dwell_s,
            raised_operations=sum(map(int.__ne__, choice.mhz, current.mhz)),
            extra_energy_j=self.joules(energy_fj),
            changes_before=sum(map(_changes, first.segments)),
            changes_after=sum(map(_changes, replay.segments)),
            changes_too_fast=sum(
                segment.lasts_ns < least_ns
                for stage in replay.segments
                for segment in stage[: _changes(stage)]
            ),
        )

    def _by_clock(self, table: OptionTable, config: str) -> list[tuple[int, int]]:
        """(MHz, row) of a table's options with this config, ascending."""
        key = (id(table), config)
        if key not in self._rows:
            clocks = zip(table.frequency_mhz.tolist(), table.config, strict=True)
            self._rows[key] = sorted(
                (mhz, row) for row, (mhz, label) in enumerate(clocks) if label == config
            )
        return self._rows[key]

    def _row_at(self, op: int, row: int, mhz: int) -> int:
        """The row that stands for an operation once its clock is raised from its row's to mhz.

        That of the highest clock up to mhz: where the profile does not know mhz itself, the
        operation counts as no faster than it is known to be.
        """
        table = self._tables[op]
        key = (id(table), row, mhz)
        if key not in self._known:
            rows = [r for m, r in self._by_clock(table, table.config[row]) if m <= mhz]
            self._known[key] = rows[-1]
        return self._known[key]

    def _keeps_up(self, op: int, row: int, mhz: int) -> bool:
        """Whether an operation is not slower at a higher clock than by its row."""
        time = self._tables[op].time_ns
        return bool(time[self._row_at(op, row, mhz)] <= time[row])

    def _fitting(self, ops: Sequence[int], choice: _Choice, least_mhz: int) -> int | None:
        """The lowest clock of a GPU from least_mhz up at which no operation gets slower."""
        stage = self.pipeline.operations[ops[0]].stage if ops else 0
        for mhz in self._clocks[stage].mhz:
            if mhz >= least_mhz and all(self._keeps_up(op, choice.row[op], mhz) for op in ops):
                return mhz
        return None

    def _too_fast(self, op: int, mhz: int) -> InputError:
        what = self.pipeline.operations[op]
        clocks = self._clocks[what.stage]
        name, highest = clocks.gpu or "the GPU", clocks.mhz[-1]
        reason = (
            f"the highest clock of {name} is {highest} MHz"
            if mhz > highest
            else f"by the profile no clock that {name} has from there up is as fast"
        )
        return InputError(
            f"the plan asks for {mhz} MHz for {what.instruction} {what.microbatch} of stage "
            f"{what.stage}, but {reason}; plan again from a profile of this GPU, or say which GPU "
            "it is with --gpu or --clocks"
        )

    def _replay(self, choice: _Choice) -> _Replay:
        time = [table.time_ns[row] for table, row in zip(self._tables, choice.row, strict=True)]
        starts, makespan_ns = self.pipeline.earliest_starts(np.array(time, np.int64))
        begins: list[int] = starts.tolist()
        segments, ends = [], []
        for first, last in self.stages:
            around = makespan_ns + begins[first]
            ends += [*begins[first + 1 : last], around]
            segments.append(_stage_segments(choice.mhz, begins, around, first, last))
        return _Replay(begins, ends, segments)

    def _raises(self, choice: _Choice, replay: _Replay, least_ns: int) -> dict[int, int]:
        """Clocks to raise next: on each stage the cheapest way for each clock that is too short.

        Ways that overlap wait for the next round. Empty if nothing is too short or can be helped.
        """
        raises: dict[int, int] = {}
        for stage in replay.segments:
            taken = -1
            for k in _short(stage, least_ns):
                ways = self._ways(choice, replay, stage, k, least_ns)
                if not ways:
                    continue
                best = min(ways, key=lambda way: (not way.enough, way.cost_fj))
                if min(best.clocks) > taken:
                    raises.update(best.clocks)
                    taken = max(best.clocks)
        return raises

    def _ways(
        self, choice: _Choice, replay: _Replay, stage: Sequence[_Segment], k: int, least_ns: int
    ) -> list[_Raise]:
        """All ways to make the k-th clock of a stage last longer."""
        ways = []
        segment = stage[k]
        for neighbour in [*stage[max(0, k - 1) : k], *stage[k + 1 : k + 2]]:
            ops = [op for s in (segment, neighbour) for op in range(s.first, s.last)]
            controlled = [op for op in ops if choice.mhz[op]]
            mhz = self._fitting(controlled, choice, max(segment.mhz, neighbour.mhz))
            if mhz is not None:
                ways.append(self._way(choice, dict.fromkeys(controlled, mhz), enough=True))
        end, begin = replay.ends[segment.last - 1], replay.starts[segment.first]
        before = range(segment.first - 1, stage[0].first - 1, -1)
        after = range(segment.last, stage[-1].last)
        ways.append(
            self._grown(choice, segment, before, lambda op: end - replay.starts[op] >= least_ns)
        )
        ways.append(
            self._grown(choice, segment, after, lambda op: replay.ends[op] - begin >= least_ns)
        )
        return [way for way in ways if way.clocks]

    def _grown(
        self, choice: _Choice, segment: _Segment, ops: Iterable[int], enough: Callable[[int], bool]
    ) -> _Raise:
        """Raise one operation after the other to a segment's clock until it lasts long enough."""
        clocks: dict[int, int] = {}
        for op in ops:
            mhz = choice.mhz[op]
            if mhz == segment.mhz:
                return self._way(choice, clocks, enough=True)
            if mhz > segment.mhz or (mhz and not self._keeps_up(op, choice.row[op], segment.mhz)):
                break
            if mhz:
                clocks[op] = segment.mhz
            if enough(op):
                return self._way(choice, clocks, enough=True)
        return self._way(choice, clocks, enough=False)

    def _way(self, choice: _Choice, clocks: dict[int, int], *, enough: bool) -> _Raise:
        """A way and its cost: e - P t of what is raised, after less before."""
        changed = {op: mhz for op, mhz in clocks.items() if mhz != choice.mhz[op]}
        cost_fj = 0
        for op, mhz in changed.items():
            table, old = self._tables[op], choice.row[op]
            new = self._row_at(op, old, mhz)
            energy_fj = int(table.energy_fj[new]) - int(table.energy_fj[old])
            time_ns = int(table.time_ns[new]) - int(table.time_ns[old])
            cost_fj += energy_fj - self._powers_uw[self.pipeline.operations[op].stage] * time_ns
        return _Raise(changed, enough, cost_fj)


def _stage_segments(
    mhz: Sequence[int], starts: Sequence[int], around_ns: int, first: int, last: int
) -> list[_Segment]:
    """A stage's operations by clock; one that sets none belongs to those before it.

    Args:
        around_ns: when the next iteration's first operation starts.
    """
    begins: list[tuple[int, int]] = []
    for op in range(first, last):
        if mhz[op] and (not begins or begins[-1][1] != mhz[op]):
            begins.append((op if begins else first, mhz[op]))
    bounds = [*(op for op, _ in begins), last]
    segments = []
    for (op, clock), end in zip(begins, bounds[1:], strict=True):
        until = starts[end] if end < last else around_ns
        segments.append(_Segment(op, end, clock, until - starts[op]))
    if len(segments) > 1 and segments[0].mhz == segments[-1].mhz:
        lasts_ns = segments[0].lasts_ns + segments[-1].lasts_ns
        segments[0] = segments[0]._replace(lasts_ns=lasts_ns)
        segments[-1] = segments[-1]._replace(lasts_ns=lasts_ns)
    return segments


def _changes(segments: Sequence[_Segment]) -> int:
    """How often the clock changes on a stage from one iteration's start to the next one's."""
    if len(segments) < 2:
        return 0
    return len(segments) - (segments[0].mhz == segments[-1].mhz)


def _short(segments: Sequence[_Segment], least_ns: int) -> list[int]:
    """Which clocks of a stage last too short; none if there is but one."""
    if len(segments) < 2:
        return []
    return [k for k, segment in enumerate(segments) if segment.lasts_ns < least_ns]
