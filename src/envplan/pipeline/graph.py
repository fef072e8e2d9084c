"""The operations of one iteration as a directed acyclic graph, and its exact replay.

Times are whole nanoseconds throughout, so a replayed makespan is exact.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from operator import add
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envplan._io.documents import parse_document, read_json, readable_json
from envplan._io.files import AnyPath, atomic_write
from envplan.errors import InputError, naming, shown, unknown
from envplan.pipeline import dag_file
from envplan.pipeline.dependencies import Dag, check_orders, connect
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.schedules import (
    EXTRAS,
    LETTERS,
    SCHEDULES,
    Operation,
    fitting_ahead,
    traits,
    with_extras,
)
from envplan.pipeline.spec import DAG_SCHEDULE, PipelineSpec
from envplan.units import MAX_INTEGER, ns_from_s, s_from_ns

#: The schedule that runs some forwards earlier than 1F1B.
ENVPIPE = "envpipe"
#: Arguments of one schedule alone.
_GOES_WITH: Final = {"forwards_ahead": ENVPIPE, "microbatch_group": "interleaved"}
_NUMBERS: Final = ("stages", "microbatches", "chunks")
_MOST_NAMED: Final = 8
_Edges = Sequence[tuple[int, int]]  # (next operation, lag in ns)


class Pipeline:
    """One training iteration: which operations run on which stage, in which order, after what.

    Args:
        schedule: a name in SCHEDULES: `1f1b`, `gpipe`, `interleaved`, `envpipe`, `looped-bfs`,
            `interleaved-zb`, `zb-h1`, `zb-v` or `dualpipe-v`.
        num_stages: pipeline stages (ranks), at least 1.
        num_microbatches: microbatches per iteration, at least 1.
        num_chunks: model chunks per stage. `interleaved`, `looped-bfs` and `interleaved-zb` run
            any number, `zb-v` and `dualpipe-v` two, the others one. Default: 2 for those two, 1
            for all others.
        p2p_latency: seconds between an operation's end and the start of one on another stage
            that needs its output; or a list of them, one for each pair of neighbouring stages,
            where some are joined by a slower network than others.
        forwards_ahead: for `envpipe` only: how many forwards more than in 1F1B each stage runs
            before its first backward, (num_stages). None on the last stage, never more on a stage
            than on the one before unless that one has no microbatches left. Default: none at all;
            envplan.planners.forwards_ahead works them out from a profile.
        microbatch_group: for `interleaved` only: how many microbatches go through a chunk before
            the next one, Megatron's microbatch_group_size_per_vp_stage. Default: as many as there
            are stages, where that divides the microbatches.
        extras: further operations and which model stages have them, such as {"load": [0],
            "all_reduce": [0, 1], "optimizer": [0, 1]}; see EXTRAS.
        in_turn: each s of it says that stages s and s + 1 take turns, as over a network whose
            transfers hold the sender: a gradient reaches stage s only when stage s + 1 has done
            its next backward, too. One chunk per stage only. Default: none.

    Raises:
        InputError: an argument is out of range, the schedule has no such shape, or a schedule of
            the caller's own deadlocks or misses an operation.

    Attributes:
        num_profile_stages: how many stages a profile must have: num_stages * num_chunks, or what
            a custom DAG uses.
        p2p_latency_ns: the latency in whole ns, or a tuple where each pair of neighbours has its
            own; 0 for a custom DAG, whose edges have their own.
        forwards_ahead, microbatch_group, extras, in_turn: the arguments, stages ascending; empty
            where there are none, as for a custom DAG.
        operations: all operations, (N), grouped by stage, in execution order within a stage.
        stage_begin: int32, (num_stages + 1); stage s runs
            operations[stage_begin[s]:stage_begin[s + 1]].
        succ_begin: int32, (N + 1); the edges of operation i are succ_begin[i]:succ_begin[i + 1].
        succ: int32, (E); the operation at the end of each edge.
        succ_lag_ns: int64, (E); operation succ[k] starts no earlier than this after its
            predecessor's finish.
        order: int32, (N); a topological order of the operations.
    """

    p2p_latency_ns: int | tuple[int, ...] = 0
    forwards_ahead: tuple[int, ...] = ()
    microbatch_group: int | None = None
    extras: Mapping[str, tuple[int, ...]] = {}
    in_turn: tuple[int, ...] = ()

    def __init__(
        self,
        schedule: str = "1f1b",
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        *,
        num_chunks: int | None = None,
        p2p_latency: float | Sequence[float] = 0.0,
        forwards_ahead: Sequence[int] | None = None,
        microbatch_group: int | None = None,
        extras: Mapping[str, Sequence[int]] | None = None,
        in_turn: Sequence[int] = (),
    ) -> None:
        if not isinstance(schedule, str) or schedule not in {DAG_SCHEDULE, *SCHEDULES}:
            raise InputError(unknown("schedule", str(schedule), SCHEDULES))
        job = PipelineSpec.of(
            schedule=schedule,
            stages=num_stages,
            microbatches=num_microbatches,
            chunks=num_chunks,
            p2p_latency_s=p2p_latency,
            forwards_ahead=forwards_ahead,
            microbatch_group=microbatch_group,
            extras=extras,
            in_turn=in_turn,
        )
        self._generate(job)

    @property
    def p2p_latency(self) -> float | list[float]:
        """Seconds of a transfer; a list where each pair of neighbouring stages has its own."""
        if isinstance(self.p2p_latency_ns, int):
            return s_from_ns(self.p2p_latency_ns)
        return [s_from_ns(latency) for latency in self.p2p_latency_ns]

    @classmethod
    def from_dag(cls, document: object) -> Pipeline:
        """A pipeline from a DAG document, as parsed from JSON (see dag_file.py).

        Raises:
            InputError: a field is wrong (says of which operation), or there is a cycle.
        """
        return cls._from_dag(dag_file.parse_dag(document))

    @classmethod
    def from_dag_file(cls, path: str | os.PathLike[str]) -> Pipeline:
        """A pipeline from a DAG file (see dag_file.py).

        Raises:
            InputError: the file cannot be read or is not JSON (says line and column), or as for
                from_dag.
        """
        with naming(path):
            return cls.from_dag(read_json(path))

    @classmethod
    def from_orders(
        cls, orders: Sequence[Sequence[Operation]], *, p2p_latency: float = 0.0
    ) -> Pipeline:
        """A custom DAG from the order in which each rank runs its operations.

        Forwards wait for the model stage before, backwards (whole, or of the input) for the one
        after; everything else waits for its turn on its rank alone. Model stages are numbered by
        profile_stage and may lie on the ranks in any way, neighbours on one rank included.

        Args:
            orders: for each rank, its operations in execution order; their `stage` is the rank.
            p2p_latency: seconds between an operation's end and the start of one on another rank
                that needs its output.

        Raises:
            InputError: the orders deadlock or miss an operation (says which; see check_orders),
                or p2p_latency is out of range.
        """
        shape = {"schedule": DAG_SCHEDULE, "stages": len(orders) or 1, "microbatches": 1}
        latency_ns = _latency_ns(PipelineSpec.of(**shape, p2p_latency_s=p2p_latency))
        _refuse_too_large(sum(map(len, orders)))
        check_orders(orders)
        return cls._from_dag(connect(orders, latency_ns))

    @classmethod
    def from_job(cls, job: object) -> Pipeline:
        """The pipeline that to_job() described; the job may have further fields.

        Raises:
            InputError: a field is missing or wrong.
        """
        read = parse_document(job, PipelineSpec, kind="job")
        if (read.schedule == DAG_SCHEDULE) != (read.dag is not None):
            raise InputError('job: schedule "dag" and the field dag go together; one is missing')
        if read.dag is None:
            self = cls.__new__(cls)
            self._generate(read)
            return self
        self = cls.from_dag(read.dag)
        meant = self.to_job()
        for field, value in read.model_dump(exclude_unset=True, exclude={"dag"}).items():
            if value is not None and value != meant.get(field):
                own = shown(meant.get(field))
                raise InputError(f"job: {field} is {shown(value)}, but its DAG means {own}")
        return self

    @classmethod
    def from_imported(cls, schedule: ImportedSchedule, *, p2p_latency: float = 0.0) -> Pipeline:
        """A schedule from elsewhere, with the data dependencies that generated schedules have.

        It is the generated schedule of its order, if there is one, else a custom DAG.

        Args:
            schedule: what a reader of envplan.pipeline.imports has read.
            p2p_latency: seconds that a transfer between ranks takes.

        Raises:
            InputError: an operation is missing, or the ranks would wait for each other for ever.
        """
        known = schedule.known_as
        others = {op.instruction for order in schedule.orders for op in order} - LETTERS.keys()
        if known is None or others:
            return cls.from_orders(schedule.orders, p2p_latency=p2p_latency)
        return cls(
            known,
            len(schedule.orders),
            schedule.num_microbatches,
            num_chunks=schedule.num_chunks,
            p2p_latency=p2p_latency,
            microbatch_group=schedule.microbatch_group,
        )

    def with_microbatches(self, num_microbatches: int) -> Pipeline:
        """The same pipeline with another number of microbatches.

        Forwards ahead stay as they are, as far as that many microbatches allow.

        Raises:
            InputError: the schedule has no such shape, or this is a custom DAG.
        """
        if self.schedule == DAG_SCHEDULE:
            raise InputError("a custom DAG has its own microbatches; they cannot be changed")
        job = self.to_job() | {"microbatches": num_microbatches}
        if self.forwards_ahead:
            job["forwards_ahead"] = fitting_ahead(self.forwards_ahead, num_microbatches)
        return Pipeline.from_job(job)

    def to_job(self) -> dict[str, Any]:
        """What plan.json keeps of the pipeline, in JSON types; a custom DAG is there as a whole."""
        job = {
            "schedule": self.schedule,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "chunks": self.num_chunks,
            "p2p_latency_s": self.p2p_latency,
            "forwards_ahead": list(self.forwards_ahead),
            "microbatch_group": self.microbatch_group,
            "extras": {name: list(stages) for name, stages in self.extras.items()},
            "in_turn": list(self.in_turn),
            "dag": self.to_dag() if self.schedule == DAG_SCHEDULE else None,
        }
        return {name: value for name, value in job.items() if value or name == "p2p_latency_s"}

    def to_dag(self) -> dict[str, Any]:
        """The operations and what they wait for as a DAG document (see dag_file.py)."""
        waits: list[list[Any]] = [[] for _ in self.operations]
        for (before, then), lag in self._dag.after.items():
            name = self._dag.ids[before]
            waits[then].append({"id": name, "latency": s_from_ns(lag)} if lag else name)
        entries = [
            {"id": name, **asdict(operation), "after": after}
            for name, operation, after in zip(self._dag.ids, self.operations, waits, strict=True)
        ]
        return {"schema": dag_file.DAG_SCHEMA, "operations": entries}

    def save_dag(self, path: AnyPath) -> None:
        """Write the DAG file of the pipeline, an operation a line.

        Raises:
            InputError: it cannot be written there.
        """
        atomic_write(path, readable_json(self.to_dag()) + "\n")

    def earliest_starts(
        self, time_ns: NDArray[np.int64], *, lags: bool = True
    ) -> tuple[NDArray[np.int64], int]:
        """Replay: every operation starts as soon as its predecessors let it.

        Args:
            time_ns: how long each operation takes, (N).
            lags: whether transfers take their time; else none.

        Returns:
            The start of each operation, (N), from 0; and the makespan. Both in ns.

        Raises:
            InputError: the iteration would outlast 2**62 ns, 146 years.
        """
        starts = _starts(self.order, self._successors, time_ns.tolist(), lags=lags)
        return starts, int(np.max(starts + time_ns))

    def latest_finishes(self, time_ns: NDArray[np.int64], deadline_ns: int) -> NDArray[np.int64]:
        """How late each operation may finish so that all are finished by the deadline.

        Args:
            time_ns: how long each operation takes, (N).
            deadline_ns: when the last operation must be finished.

        Returns:
            The latest finishes in ns, (N); some operations would have to start before 0 if the
            deadline is shorter than the makespan.

        Raises:
            InputError: the iteration would outlast 2**62 ns, 146 years.
        """
        return deadline_ns - _starts(self.order[::-1], self.predecessors, time_ns.tolist())

    def __repr__(self) -> str:
        usual = {"chunks": 1, "p2p_latency_s": 0.0}
        schedule, *given = (
            f"{'num_' * (name in _NUMBERS)}{name.removesuffix('_s')}={value!r}"
            for name, value in self.to_job().items()
            if value != usual.get(name) and name != "dag"
        )
        return f"Pipeline({', '.join([schedule.removeprefix('schedule='), *given])})"

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """Of each operation a number for all but its microbatch, the same in pipelines of any
        length, and its microbatch, (2, N)."""
        others = sorted({op.instruction for op in self.operations})
        number = {name: k for k, name in enumerate(dict.fromkeys([*LETTERS, *EXTRAS, *others]))}
        chunk, stage = len(number), len(number) * self.num_chunks
        kinds = [number[o.instruction] + chunk * o.chunk + stage * o.stage for o in self.operations]
        return np.array([kinds, [op.microbatch for op in self.operations]], np.int64)

    @cached_property
    def predecessors(self) -> list[list[tuple[int, int]]]:
        """What each operation waits for, (N): (operation, lag in ns), operations ascending."""
        before: list[list[tuple[int, int]]] = [[] for _ in self.operations]
        for i, after in enumerate(self._successors):
            for j, lag in after:
                before[j].append((i, lag))
        return before

    @classmethod
    def _from_dag(cls, dag: Dag) -> Pipeline:
        self = cls.__new__(cls)
        self.schedule = DAG_SCHEDULE
        self._build(dag)
        return self

    def _generate(self, job: PipelineSpec) -> None:
        """Be the schedule that a job names.

        Raises:
            InputError: as for the constructor.
        """
        name, stages, microbatches = job.schedule, job.stages, job.microbatches
        if name == DAG_SCHEDULE:
            raise InputError('schedule "dag" is that of a DAG file: use Pipeline.from_dag_file')
        if name not in SCHEDULES:
            raise InputError(unknown("schedule", name, SCHEDULES))
        known = traits(name)
        chunks = job.chunks or known.chunks
        if chunks != known.chunks and not known.any_chunks:
            runs = "one model chunk" if known.chunks == 1 else "two model chunks"
            raise InputError(
                f"schedule {name} runs {runs} per stage, not {chunks}; "
                "schedules interleaved, looped-bfs and interleaved-zb run several"
            )
        _refuse_too_large(known.passes * stages * chunks * microbatches)
        options = job.model_dump(include={*_GOES_WITH}, exclude_none=True)
        for option in options:
            if name != _GOES_WITH[option]:
                raise InputError(f"{option} goes with schedule {_GOES_WITH[option]}, not {name}")
        if name == ENVPIPE:
            ahead = job.forwards_ahead or [0] * stages
            if len(ahead) != stages:
                raise InputError(f"forwards_ahead must be a list of {stages} numbers, one a stage")
            for stage, most in enumerate(fitting_ahead(ahead, microbatches)):
                if ahead[stage] > most:
                    raise InputError(
                        f"forwards_ahead[{stage}] must be at most {most}, not {ahead[stage]}: "
                        "what the microbatches and the stage before allow"
                    )
            self.forwards_ahead = options["forwards_ahead"] = tuple(ahead)
        extras = job.extras or {}
        for extra, having in extras.items():
            if extra not in EXTRAS:
                known_ones = ", ".join(EXTRAS)
                raise InputError(f"{shown(extra)} is no extra operation; known: {known_ones}")
            if not having or max(having) >= stages * chunks:
                last = stages * chunks - 1
                raise InputError(
                    f"extras: {extra} must list the stages that have it, of 0 to {last}"
                )
        self.schedule = name
        self.p2p_latency_ns = _latency_ns(job)
        self.microbatch_group = job.microbatch_group
        self.extras = {one: tuple(sorted({*extras[one]})) for one in EXTRAS if one in extras}
        self.in_turn = tuple(sorted({*(job.in_turn or ())}))
        if self.in_turn and (chunks > 1 or self.in_turn[-1] > stages - 2):
            raise InputError(
                "in_turn goes with one chunk per stage, and names stages that have a next one"
            )
        orders = SCHEDULES[name](stages, microbatches, chunks, **options)
        check_orders(orders, microbatches)
        listed = with_extras(orders, self.extras)
        self._build(connect(listed, self.p2p_latency_ns, self.in_turn))

    def _build(self, dag: Dag) -> None:
        """Add the edges along each stage to the DAG's and freeze everything into arrays."""

        def frozen(values: Any, dtype: type[Any] = np.int32) -> NDArray[Any]:
            array = np.array(values, dtype)
            array.flags.writeable = False
            return array

        operations, stages = dag.operations, [op.stage for op in dag.operations]
        along = {(i, i + 1): 0 for i in range(len(stages) - 1) if stages[i] == stages[i + 1]}
        edges = sorted((along | dag.after).items())
        self._successors: list[list[tuple[int, int]]] = [[] for _ in operations]
        for (i, j), lag in edges:
            self._successors[i].append((j, lag))
        self.num_stages = stages[-1] + 1
        self.num_microbatches = 1 + max(op.microbatch for op in operations)
        self.num_chunks = 1 + max(op.chunk for op in operations)
        self.num_profile_stages = 1 + max(op.profile_stage for op in operations)
        self._dag, self.operations = dag, operations
        self.stage_begin = frozen(np.searchsorted(stages, range(self.num_stages + 1)))
        self.succ_begin = frozen(np.cumsum([0, *map(len, self._successors)]))
        self.succ = frozen([j for (_, j), _ in edges])
        self.succ_lag_ns = frozen([lag for _, lag in edges], np.int64)
        self.order = frozen(_topological_order(self._successors, dag.ids))


def _latency_ns(job: PipelineSpec) -> int | tuple[int, ...]:
    """The latency in whole ns, or that of each pair of neighbouring stages."""
    latency_s = job.p2p_latency_s
    if not isinstance(latency_s, list):
        return ns_from_s(latency_s)
    if len(latency_s) == job.stages - 1 > 0:
        return tuple(map(ns_from_s, latency_s))
    raise InputError(
        f"p2p_latency_s must be one number, or a list of {job.stages - 1}, one for each pair of "
        "neighbouring stages"
    )


def _starts(
    order: NDArray[np.int32], edges: Sequence[_Edges], time: list[int], *, lags: bool = True
) -> NDArray[np.int64]:
    """The earliest start of each operation in ns, walking through them in topological order."""
    start = [0] * len(time)
    for i in order.tolist():
        finish = start[i] + time[i]
        for j, lag in edges[i]:
            ready = finish + lag if lags else finish
            if ready > start[j]:
                start[j] = ready
    if max(map(add, start, time)) > MAX_INTEGER:
        raise InputError("operation times and latencies add up to more than 146 years")
    return np.array(start, np.int64)


def _topological_order(after: Sequence[_Edges], ids: Sequence[str]) -> list[int]:
    """First come, first served.

    Raises:
        InputError: there is a cycle.
    """
    waiting = [0] * len(after)
    for edges in after:
        for j, _ in edges:
            waiting[j] += 1
    order = [i for i, count in enumerate(waiting) if count == 0]
    for i in order:
        for j, _ in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                order.append(j)
    if len(order) == len(after):
        return order
    # Each that is left waits for another of them.
    waits = {j: i for i, edges in enumerate(after) if waiting[i] for j, _ in edges if waiting[j]}
    seen, at = dict[int, None](), next(iter(waits))
    while at not in seen:
        seen[at] = None
        at = waits[at]
    circle = [shown(ids[i]) for i in [*list(seen)[list(seen).index(at) :], at]]
    named = circle[::-1]
    if len(named) - 1 > _MOST_NAMED:
        named[_MOST_NAMED:-1] = [f"({len(named) - 1 - _MOST_NAMED} more)"]
    raise InputError(
        f"operations deadlock, waiting for each other: {' -> '.join(named)} "
        "(those of one stage run in the order listed)"
    )


def _refuse_too_large(count: int) -> None:
    if count > dag_file.MAX_OPERATIONS:
        raise InputError(
            f"stages x chunks x microbatches make {shown(count)} operations; "
            f"at most {dag_file.MAX_OPERATIONS} are possible"
        )
