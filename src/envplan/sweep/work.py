"""Who computes a sweep's points, and how: frontier by frontier, on processes of this machine or on
a Ray cluster that is there already.

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
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

from envplan.errors import DoubtWarning, EnvplanError, InputError
from envplan.pipeline import traits
from envplan.plan import Plan
from envplan.planners import PLANNERS, forwards_ahead
from envplan.profile import ByParts, Profile
from envplan.profile.job import parse_extras, pipeline_of_job
from envplan.replay.cores import use_cores
from envplan.request import Request
from envplan.simulation.iteration import simulate
from envplan.solve import Frontier, trace_frontier
from envplan.sweep.config import Point
from envplan.sweep.table import Row

__all__ = ["Done", "Group", "Task", "compute", "failed_row", "run_on_processes", "run_on_ray"]

_PATIENCE_S: Final = 10.0
#: A row, and whether doing the same again would end the same way.
Done = tuple[Row, bool]


class Task(NamedTuple):
    """A point to be computed.

    Attributes:
        place: in the sweep.
        key: what the journal knows it by.
        point: with its microbatches and schedule filled in.
    """

    place: int
    key: str
    point: Point


class Group(NamedTuple):
    """Tasks that share a frontier; those that are done are taken away."""

    profile: Profile
    tasks: deque[Task]

    def lose(self, why: str) -> Iterator[tuple[Task, Done]]:
        """The first of the tasks, if there is one, as failed."""
        if self.tasks:
            task = self.tasks.popleft()
            yield task, (failed_row(task.point, self.profile, why), False)


#: Every task with its outcome, as they come.
Outcomes = Generator[tuple[Task, Done], None, None]


def failed_row(point: Point, profile: Profile | None, error: str) -> Row:
    """The row of a point without a plan."""
    return Row(**_inputs(point, profile), error=error)


def compute(group: Group) -> Iterator[Done]:
    """The outcome of each task, in order, on one core; an error is an outcome, too."""
    use_cores(1)
    warnings.simplefilter("ignore", DoubtWarning)  # of each of many points
    traced: tuple[Frontier, dict[str, Any]] | Exception
    try:
        traced = _traced(group.profile, group.tasks[0].point)
    except Exception as error:  # a group must not take the others with it
        traced = error
    planned = lru_cache(maxsize=1)(_plan)
    for task in group.tasks:
        row = _inputs(task.point, group.profile)
        try:
            if isinstance(traced, Exception):
                raise traced
            frontier, facts = traced
            row |= facts
            begin = time.perf_counter()
            plan = planned(frontier, task.point.model_copy(update={"seed": 0}))
            row |= _found(plan, frontier.profile, task.point)
            row["wall_s"] = time.perf_counter() - begin
            yield Row(**row), True
        except EnvplanError as error:
            yield Row(**row, error=str(error)), True
        except Exception as error:  # nor a point
            yield Row(**row, error=f"{type(error).__name__}: {error}"), False


def _inputs(point: Point, profile: Profile | None) -> dict[str, Any]:
    said = point.model_dump(by_alias=True, exclude_none=True)
    row = {name: said[name] for name in said.keys() & Row.model_fields.keys()}
    row["target"], row["target_value"] = point.target
    row.setdefault("chunks", traits(point.schedule or "").chunks)
    if profile is not None:
        row |= {"source": profile.metadata.source, "stages": profile.num_stages // row["chunks"]}
        of_job = profile.metadata.job.p2p_latency_s
        row.setdefault("p2p_latency_s", max(of_job) if isinstance(of_job, list) else of_job)
    return row


def _traced(profile: Profile, point: Point) -> tuple[Frontier, dict[str, Any]]:
    """The frontier of a group, and what all of its rows say of it."""
    begin = time.perf_counter()

    def ahead(microbatches: int) -> tuple[int, ...]:
        timed = profile.fitted(("backward",), recompute=point.recompute)
        return forwards_ahead(timed, microbatches)

    pipeline = pipeline_of_job(
        profile,
        schedule=point.schedule,
        num_microbatches=point.microbatches,
        chunks=point.chunks,
        p2p_latency=point.p2p_latency,
        extras=parse_extras(point.extra, profile),
        forwards_ahead=ahead,
    )
    parted = profile.has_parts and not point.one_clock
    asked = ByParts.from_options(point.parts_within, point.blocking_power) if parted else None
    needed = {op.instruction for op in pipeline.operations}
    fitted = profile.fitted(needed, recompute=point.recompute, by_parts=asked)
    frontier = trace_frontier(
        pipeline,
        fitted,
        blocking_power=point.blocking_power,
        gpus_per_stage=point.gpus_per_stage or 1,
        replicas=point.replicas or 1,
    )
    return frontier, {
        "assumed": "; ".join(fitted.adjustments.in_words()) or None,
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "trace_s": time.perf_counter() - begin,
    }


def _plan(frontier: Frontier, point: Point) -> Plan:
    options: dict[str, Any] = {
        "target_time": point.target_time,
        "slowdown": None if point.slowdown is None else point.slowdown / 100,
        "min_energy": point.min_energy,
    }
    if point.planner != "frontier":
        if point.min_energy:
            options = {"target_time": frontier.min_energy_time}
        return PLANNERS[point.planner].solve(frontier, Request.from_options(**options))
    options |= point.limit_options()
    if "probability" in options and point.noise:
        options["noise"] = point.noise / 100
    options["switch_latency"] = (point.switch_latency or 0.0) / 1000
    return frontier.plan(**options)


def _found(plan: Plan, profile: Profile, point: Point) -> dict[str, Any]:
    """What came of a point."""
    found = {
        "iteration_time_s": plan.iteration_time,
        "energy_j": plan.energy,
        "average_power_w": plan.average_power,
        "energy_lower_bound_j": plan.energy_lower_bound,
        "gap_percent": 100 * plan.gap,
        "savings_percent": plan.predicted.savings_percent,
        "slowdown_percent": plan.predicted.slowdown_percent,
    }
    if point.noise is not None:
        timeline = simulate(plan, profile, noise=point.noise / 100, seed=point.seed)
        found["replayed_time_s"] = timeline.iteration_time
        found["replayed_energy_j"] = timeline.energy
    return found


def run_on_processes(groups: Sequence[Group], jobs: int) -> Outcomes:
    """Every task with its outcome, as they come.

    Args:
        jobs: processes, at most.

    Raises:
        EnvplanError: processes die before they begin.
    """
    waiting = deque(groups)
    # For each connection its process, and the group that this was given last.
    workers: dict[Any, tuple[BaseProcess, Group | None]] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < min(jobs, len(groups)):
                workers.update(_started())
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                process, group = workers[connection]
                try:
                    done = connection.recv()
                except (EOFError, ConnectionError):
                    _end(connection, process)
                    del workers[connection]
                    yield from _lost(group, process.exitcode or 0)
                    if group is not None and group.tasks:
                        waiting.appendleft(group)
                    continue
                if done is not None:
                    assert group is not None
                    yield group.tasks.popleft(), done
                elif waiting:
                    workers[connection] = process, (group := waiting.popleft())
                    with suppress(ConnectionError):  # it has died, as waiting for it will show
                        connection.send(group)
                else:
                    _end(connection, process)
                    del workers[connection]
    finally:
        for connection, (process, _) in workers.items():
            process.terminate()
            _end(connection, process)


def _started() -> dict[Any, tuple[BaseProcess, None]]:
    """A process that says None when it has nothing to do, and then takes a group. We end it
    ourselves, so it ignores Ctrl-C from its first instruction on."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
    else:
        process.start()
    theirs.close()
    return {ours: (process, None)}


def _end(connection: Connection, process: BaseProcess) -> None:
    """Let a process end: it does so where nobody sends it any more."""
    connection.close()
    process.join()


def _lost(group: Group | None, code: int) -> Iterator[tuple[Task, Done]]:
    if group is None:
        raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    yield from group.lose(f"its process was ended {how}")


def _serve(connection: Connection) -> None:
    """Compute groups until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(None)
            for done in compute(connection.recv()):
                connection.send(done)


def run_on_ray(groups: Sequence[Group], address: str) -> Outcomes:
    """Every task with its outcome, as they come.

    A group is a Ray task on one CPU. envplan must be installed on the nodes; profiles need not be
    there.

    Args:
        address: of the cluster's head, such as 10.0.0.1:6379, or "auto".

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
            socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        words = f"--ray {address}: no Ray cluster can be reached there ({reason})"
        raise InputError(words) from None
    try:
        remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(compute)
        running = {remote.remote(group): group for group in groups}
        while running:
            (stream,), _ = ray.wait(list(running), num_returns=1)
            group = running[stream]
            try:
                done = ray.get(next(stream))
                yield group.tasks.popleft(), done
            except StopIteration:
                del running[stream]
            except ray.exceptions.RayError as error:
                del running[stream]
                yield from group.lose(f"Ray: {str(error).strip()}"[:500])
                if group.tasks:
                    running[remote.remote(group)] = group
    finally:
        ray.shutdown()
