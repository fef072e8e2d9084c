"""The operations of one iteration as a directed acyclic graph, and its exact replay.

Times are whole nanoseconds throughout, so a replayed makespan is exact.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from envplan._io.documents import parse_document, read_json, readable_json
from envplan._io.files import AnyPath, atomic_write
from envplan.errors import InputError, naming, shown, unknown
from envplan.pipeline.dag_file import dag_document, parse_dag
from envplan.pipeline.dependencies import Dag, check_orders, connect
from envplan.pipeline.generate import ScheduleArguments, generate, latencies_ns
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.operations import EXTRAS, LETTERS, Operation
from envplan.pipeline.schedules import SCHEDULES, fitting_ahead
from envplan.pipeline.spec import DAG_SCHEDULE, PipelineSpec, refuse_too_large
from envplan.pipeline.topology import Neighbour, earliest_starts, topological_order
from envplan.units import s_from_ns

#: Arguments of Pipeline by the fields of a job, where they differ.
_ARGUMENTS: Final = {
    "stages": "num_stages",
    "microbatches": "num_microbatches",
    "chunks": "num_chunks",
    "p2p_latency_s": "p2p_latency",
}


class OperationKinds(NamedTuple):
    """A number for all of an operation but its microbatch, and the microbatch, (N,) each.

    Kinds are the same in pipelines of any length.
    """

    kind: NDArray[np.int64]
    microbatch: NDArray[np.int64]


class Pipeline:
    """One training iteration: the operations of every stage in order, and their dependencies.

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
        spec = PipelineSpec.of(
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
        generated = generate(spec)
        self._assemble(generated.dag, generated.arguments)

    def _assemble(self, dag: Dag, arguments: ScheduleArguments) -> None:
        """Set every attribute: the only way in which a pipeline is made.

        The edges of the graph are the DAG's and those along each stage.
        """
        self._dag = dag
        self.schedule = arguments.schedule
        self.p2p_latency_ns = arguments.p2p_latency_ns
        self.forwards_ahead = arguments.forwards_ahead
        self.microbatch_group = arguments.microbatch_group
        self.extras = arguments.extras
        self.in_turn = arguments.in_turn

        operations = self.operations = dag.operations
        stages = [op.stage for op in operations]
        self.num_stages = stages[-1] + 1
        self.num_microbatches = 1 + max(op.microbatch for op in operations)
        self.num_chunks = 1 + max(op.chunk for op in operations)
        self.num_profile_stages = 1 + max(op.profile_stage for op in operations)
        self.stage_begin = _frozen(np.searchsorted(stages, range(self.num_stages + 1)), np.int32)

        along_stages = {(i, i + 1): 0 for i in range(len(stages) - 1) if stages[i] == stages[i + 1]}
        edges = sorted((along_stages | dag.edges).items())
        self._successors: list[list[Neighbour]] = [[] for _ in operations]
        for (source, target), lag_ns in edges:
            self._successors[source].append((target, lag_ns))
        self.succ_begin = _frozen(np.cumsum([0, *map(len, self._successors)]), np.int32)
        self.succ = _frozen([target for (_, target), _ in edges], np.int32)
        self.succ_lag_ns = _frozen([lag_ns for _, lag_ns in edges], np.int64)
        self.order = _frozen(topological_order(self._successors, dag.ids), np.int32)

    @classmethod
    def _from_graph(cls, dag: Dag, arguments: ScheduleArguments) -> Pipeline:
        pipeline = cls.__new__(cls)
        pipeline._assemble(dag, arguments)
        return pipeline

    @classmethod
    def from_dag(cls, document: object) -> Pipeline:
        """A pipeline from a DAG document, as parsed from JSON (see dag_file.py).

        Raises:
            InputError: a field is wrong (says of which operation), or there is a cycle.
        """
        return cls._from_graph(parse_dag(document), ScheduleArguments(schedule=DAG_SCHEDULE))

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
        spec = PipelineSpec.of(
            schedule=DAG_SCHEDULE,
            stages=len(orders) or 1,
            microbatches=1,
            p2p_latency_s=p2p_latency,
        )
        latency_ns = latencies_ns(spec)
        refuse_too_large(sum(map(len, orders)))
        check_orders(orders)
        dag = connect(orders, latency_ns)
        return cls._from_graph(dag, ScheduleArguments(schedule=DAG_SCHEDULE))

    @classmethod
    def from_job(cls, job: object) -> Pipeline:
        """The pipeline that to_job() described; the job may have further fields.

        Raises:
            InputError: a field is missing or wrong.
        """
        spec = parse_document(job, PipelineSpec, kind="job")
        if (spec.schedule == DAG_SCHEDULE) != (spec.dag is not None):
            raise InputError('job: schedule "dag" and the field dag go together; one is missing')
        if spec.dag is None:
            generated = generate(spec)
            return cls._from_graph(generated.dag, generated.arguments)
        pipeline = cls.from_dag(spec.dag)
        expected = pipeline.to_job()
        for field, value in spec.model_dump(exclude_unset=True, exclude={"dag"}).items():
            if value is not None and value != expected.get(field):
                meant = shown(expected.get(field))
                raise InputError(f"job: {field} is {shown(value)}, but its DAG means {meant}")
        return pipeline

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
        name = schedule.known_as
        instructions = {op.instruction for order in schedule.orders for op in order}
        if name is None or instructions - LETTERS.keys():
            return cls.from_orders(schedule.orders, p2p_latency=p2p_latency)
        return cls(
            name,
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

    @property
    def p2p_latency(self) -> float | list[float]:
        """Seconds of a transfer; a list where each pair of neighbouring stages has its own."""
        if isinstance(self.p2p_latency_ns, int):
            return s_from_ns(self.p2p_latency_ns)
        return [s_from_ns(latency) for latency in self.p2p_latency_ns]

    def to_job(self) -> dict[str, Any]:
        """The fields of plan.json's job that describe the pipeline, in JSON types.

        Fields that say nothing are left out; a custom DAG is there as a whole.
        """
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

    def to_dag(self) -> dict[str, JsonValue]:
        """The operations and their dependencies as a DAG document (see dag_file.py)."""
        return dag_document(self._dag)

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
        starts = earliest_starts(self.order.tolist(), self._successors, time_ns.tolist(), lags=lags)
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
        # Backwards in time, an operation starts when its successors have begun.
        reversed_order = self.order[::-1].tolist()
        return deadline_ns - earliest_starts(reversed_order, self.predecessors, time_ns.tolist())

    def __repr__(self) -> str:
        usual = {"chunks": 1, "p2p_latency_s": 0.0}
        arguments = [repr(self.schedule)]
        for field, value in self.to_job().items():
            if field not in ("schedule", "dag") and value != usual.get(field):
                arguments.append(f"{_ARGUMENTS.get(field, field)}={value!r}")
        return f"Pipeline({', '.join(arguments)})"

    @cached_property
    def kinds(self) -> OperationKinds:
        """The kind and the microbatch of each operation."""
        instructions = sorted({op.instruction for op in self.operations})
        names = dict.fromkeys([*LETTERS, *EXTRAS, *instructions])
        number = {name: k for k, name in enumerate(names)}
        per_chunk = len(number)
        per_stage = per_chunk * self.num_chunks
        kinds = [
            number[op.instruction] + per_chunk * op.chunk + per_stage * op.stage
            for op in self.operations
        ]
        microbatches = [op.microbatch for op in self.operations]
        return OperationKinds(np.array(kinds, np.int64), np.array(microbatches, np.int64))

    @cached_property
    def predecessors(self) -> list[list[Neighbour]]:
        """The operations that each operation waits for, (N), in order."""
        predecessors: list[list[Neighbour]] = [[] for _ in self.operations]
        for source, edges in enumerate(self._successors):
            for target, lag_ns in edges:
                predecessors[target].append((source, lag_ns))
        return predecessors


def _frozen(values: Any, dtype: type[Any]) -> NDArray[Any]:
    """An array that cannot be changed."""
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array
