"""The computation of a sweep's points, frontier by frontier, on processes or on a Ray cluster.

Both report task by task. A worker that dies costs the task it was at, which then has failed;
another one takes the rest of its group.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple, Self

from envplan.errors import DoubtWarning, EnvplanError, InputError
from envplan.pipeline import traits
from envplan.plan import Plan
from envplan.planners import PLANNERS
from envplan.planners.job import JobSpec
from envplan.profile import Profile
from envplan.replay.cores import use_cores
from envplan.request import Request
from envplan.simulation.iteration import simulate
from envplan.solve import Frontier
from envplan.sweep.config import Point
from envplan.sweep.table import SweepRow

__all__ = [
    "FinishedTask",
    "Group",
    "PointOutcome",
    "Task",
    "compute",
    "failed_row",
    "run_on_processes",
    "run_on_ray",
]

#: How long to wait for the head of a Ray cluster.
_CONNECT_TIMEOUT_S: Final = 10.0
_MAX_RAY_ERROR_LENGTH: Final = 500


class Task(NamedTuple):
    """A point to be computed.

    Attributes:
        position: its index among the points of the sweep.
        key: the key that the journal knows it by.
        point: with its microbatches and schedule filled in.
    """

    position: int
    key: str
    point: Point


class PointOutcome(NamedTuple):
    """The row of a computed point.

    Attributes:
        row: the plan's figures, or an error.
        is_final: whether computing the same again would end the same way.
    """

    row: SweepRow
    is_final: bool


class FinishedTask(NamedTuple):
    """A task and its outcome."""

    task: Task
    row: SweepRow
    is_final: bool


class Group(NamedTuple):
    """Tasks that share a frontier; those that are done are taken away."""

    profile: Profile
    tasks: deque[Task]

    def finish(self, outcome: PointOutcome) -> FinishedTask:
        """Take away the first task, which has this outcome."""
        return FinishedTask(self.tasks.popleft(), outcome.row, outcome.is_final)

    def lose(self, error: str) -> Iterator[FinishedTask]:
        """Take away the first of the tasks, if there is one, as failed."""
        if self.tasks:
            row = failed_row(self.tasks[0].point, self.profile, error)
            yield self.finish(PointOutcome(row, is_final=False))


#: Every task with its outcome, as they come.
Outcomes = Generator[FinishedTask, None, None]


def failed_row(point: Point, profile: Profile | None, error: str) -> SweepRow:
    """The row of a point without a plan."""
    return SweepRow(**_request_cells(point, profile), error=error)


def compute(group: Group) -> Iterator[PointOutcome]:
    """Compute each task of a group, in order, on one core; an error is an outcome, too."""
    use_cores(1)
    warnings.simplefilter("ignore", DoubtWarning)  # of each of many points
    try:
        traced = _TracedGroup.trace(group.profile, group.tasks[0].point)
    except Exception as error:  # a group must not take the others with it
        for task in group.tasks:
            yield _failure(_request_cells(task.point, group.profile), error)
        return
    for task in group.tasks:
        cells = _request_cells(task.point, group.profile) | traced.cells()
        try:
            begin_s = time.perf_counter()
            cells |= traced.answer(task.point)
            cells["wall_s"] = time.perf_counter() - begin_s
            yield PointOutcome(SweepRow(**cells), is_final=True)
        except Exception as error:  # a point must not take the others with it
            yield _failure(cells, error)


def _failure(cells: dict[str, Any], error: Exception) -> PointOutcome:
    """The outcome of an error. Only those that envplan raises come again for sure."""
    if isinstance(error, EnvplanError):
        return PointOutcome(SweepRow(**cells, error=str(error)), is_final=True)
    return PointOutcome(SweepRow(**cells, error=f"{type(error).__name__}: {error}"), is_final=False)


def _request_cells(point: Point, profile: Profile | None) -> dict[str, Any]:
    """The cells of a row that a point has before it is computed.

    Columns of a row are fields of a point, or the aliases under which these are written.
    """
    fields = point.model_dump(by_alias=True, exclude_none=True)
    cells = {name: fields[name] for name in fields.keys() & SweepRow.model_fields.keys()}
    cells["target"], cells["target_value"] = point.target
    cells.setdefault("chunks", traits(point.schedule or "").chunks)
    if profile is not None:
        cells["source"] = profile.metadata.source
        cells["stages"] = profile.num_stages // cells["chunks"]
        latency_s = profile.metadata.job.p2p_latency_s
        # A sidecar may say one latency for each pair of stages.
        max_latency_s = max(latency_s) if isinstance(latency_s, list) else latency_s
        cells.setdefault("p2p_latency_s", max_latency_s)
    return cells


class _TracedGroup:
    """The frontier that the points of a group share.

    Attributes:
        frontier: the frontier.
        trace_s: how long its trace took.
    """

    def __init__(self, frontier: Frontier, trace_s: float) -> None:
        self.frontier = frontier
        self.trace_s = trace_s
        self._last_plan: tuple[Point, Plan] | None = None

    @classmethod
    def trace(cls, profile: Profile, point: Point) -> Self:
        """Trace the frontier of a point's pipeline."""
        begin_s = time.perf_counter()
        frontier = _job_spec(point).trace(profile)
        return cls(frontier, time.perf_counter() - begin_s)

    def cells(self) -> dict[str, Any]:
        """The cells of a row that follow from the frontier."""
        return {
            "assumed": "; ".join(self.frontier.profile.adjustments.in_words()) or None,
            "t_min_s": self.frontier.min_time,
            "t_star_s": self.frontier.min_energy_time,
            "trace_s": self.trace_s,
        }

    def answer(self, point: Point) -> dict[str, Any]:
        """The cells of a row that follow from the plan of a point."""
        plan = self._plan(point)
        cells = {
            "iteration_time_s": plan.iteration_time,
            "energy_j": plan.energy,
            "average_power_w": plan.average_power,
            "energy_lower_bound_j": plan.energy_lower_bound,
            "gap_percent": 100 * plan.gap,
            "savings_percent": plan.predicted.savings_percent,
            "slowdown_percent": plan.predicted.slowdown_percent,
        }
        if point.noise is not None:
            timeline = simulate(
                plan, self.frontier.profile, noise=point.noise / 100, seed=point.seed
            )
            cells["replayed_time_s"] = timeline.iteration_time
            cells["replayed_energy_j"] = timeline.energy
        return cells

    def _plan(self, point: Point) -> Plan:
        """The plan of a point. Points that differ in their seed alone follow each other."""
        without_seed = point.model_copy(update={"seed": 0})
        if self._last_plan is None or self._last_plan[0] != without_seed:
            self._last_plan = without_seed, _make_plan(self.frontier, point)
        return self._last_plan[1]


def _job_spec(point: Point) -> JobSpec:
    """The job of a point."""
    return JobSpec(
        schedule=point.schedule,
        num_microbatches=point.microbatches,
        chunks=point.chunks,
        p2p_latency_s=point.p2p_latency,
        extra=point.extra,
        recompute=point.recompute,
        one_clock=point.one_clock,
        parts_within_percent=point.parts_within,
        blocking_power_w=point.blocking_power,
        gpus_per_stage=point.gpus_per_stage or 1,
        replicas=point.replicas or 1,
    )


def _make_plan(frontier: Frontier, point: Point) -> Plan:
    """The plan that a point asks for. A sweep's file has percent and milliseconds."""
    target: dict[str, Any] = {
        "target_time": point.target_time,
        "slowdown": _fraction(point.slowdown),
        "min_energy": point.min_energy,
    }
    if point.planner != "frontier":
        if point.min_energy:
            target = {"target_time": frontier.min_energy_time}
        return PLANNERS[point.planner].solve(frontier, Request.from_options(**target))
    limits: dict[str, Any] = point.limit_options()
    if "probability" in limits:
        limits["noise"] = _fraction(point.noise)
    return frontier.plan(
        **target,
        **limits,
        switch_latency=(point.switch_latency or 0.0) / 1000,
        ask=point.ask or "ahead",
    )


def _fraction(percent: float | None) -> float | None:
    """The fraction that a percentage means, if there is one."""
    return None if percent is None else percent / 100


@dataclass
class _Worker:
    """A process of this machine that computes groups.

    Attributes:
        connection: tasks go to it, and outcomes come from it.
        group: the group that it was given last.
    """

    process: BaseProcess
    connection: Connection
    group: Group | None = None

    def give(self, group: Group) -> None:
        """Hand it a group to compute."""
        self.group = group
        with suppress(ConnectionError):  # it has died, as waiting for it will show
            self.connection.send(group)

    def end(self) -> None:
        """Let the process end: it does so where nobody sends it any more."""
        self.connection.close()
        self.process.join()

    def lose(self) -> Iterator[FinishedTask]:
        """The task that the process was at when it died, as failed."""
        code = self.process.exitcode or 0
        if self.group is None:
            raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        yield from self.group.lose(f"its process was ended {cause}")


def run_on_processes(groups: Sequence[Group], jobs: int) -> Outcomes:
    """Compute groups on processes of this machine.

    Args:
        groups: what to compute.
        jobs: processes, at most.

    Raises:
        EnvplanError: processes die before they begin.
    """
    waiting = deque(groups)
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < min(jobs, len(groups)):
                worker = _start_worker()
                workers[worker.connection] = worker
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionError):
                    del workers[connection]
                    worker.end()
                    yield from worker.lose()
                    if worker.group is not None and worker.group.tasks:
                        waiting.appendleft(worker.group)
                    continue
                if outcome is not None:
                    assert worker.group is not None
                    yield worker.group.finish(outcome)
                elif waiting:
                    worker.give(waiting.popleft())
                else:
                    del workers[connection]
                    worker.end()
    finally:
        for worker in workers.values():
            worker.process.terminate()
            worker.end()


def _start_worker() -> _Worker:
    """Start a process that says None when it has nothing to do, and then takes a group.

    We end it ourselves, so it ignores Ctrl-C from its first instruction on.
    """
    context = multiprocessing.get_context("spawn")
    our_end, its_end = context.Pipe()
    process = context.Process(target=_serve, args=(its_end,), daemon=True)
    if threading.current_thread() is threading.main_thread():
        usual_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, usual_handler)
    else:
        process.start()
    its_end.close()
    return _Worker(process, our_end)


def _serve(connection: Connection) -> None:
    """Compute groups until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(None)
            for outcome in compute(connection.recv()):
                connection.send(outcome)


def run_on_ray(groups: Sequence[Group], address: str) -> Outcomes:
    """Compute groups on a Ray cluster that is there already.

    A group is a Ray task on one CPU. envplan must be installed on the nodes; profiles need not be
    there.

    Args:
        groups: what to compute.
        address: of the cluster's head, such as 10.0.0.1:6379, or "auto".

    Raises:
        InputError: ray is not installed, or there is no cluster at the address.
    """
    _connect_to_ray(address)
    import ray

    try:
        remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(compute)
        running = {remote.remote(group): group for group in groups}
        while running:
            (stream,), _ = ray.wait(list(running), num_returns=1)
            group = running[stream]
            try:
                outcome = ray.get(next(stream))
                yield group.finish(outcome)
            except StopIteration:
                del running[stream]
            except ray.exceptions.RayError as error:
                del running[stream]
                yield from group.lose(f"Ray: {str(error).strip()}"[:_MAX_RAY_ERROR_LENGTH])
                if group.tasks:
                    running[remote.remote(group)] = group
    finally:
        ray.shutdown()


def _connect_to_ray(address: str) -> None:
    """Connect this process to the Ray cluster at an address.

    Raises:
        InputError: ray is not installed, or there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise InputError("--ray needs ray: pip install 'envplan[ray]'")
    if "://" in address:
        raise InputError(
            f"--ray {address}: Ray clients cannot run sweeps; run it on a node of the cluster with "
            "--ray auto, or give the address of its head, as in 10.0.0.1:6379"
        )
    import ray

    host, colon, port = address.rpartition(":")
    try:
        if colon:  # fail at once where Ray would go on trying for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        words = f"--ray {address}: no Ray cluster can be reached there ({reason})"
        raise InputError(words) from None
