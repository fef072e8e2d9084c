"""The shim: inside a training process, it asks for the planned clock before every operation.

    with envplan.runtime.Shim("run.freqplan.json") as shim:
        for batch in batches:
            for instruction, microbatch in my_schedule:
                shim.begin(instruction, microbatch)
                ...
                shim.end(instruction, microbatch)
            shim.step()

Clocks are set by another process, the guard, so the training thread writes a few bytes into a
socket at most, and only when the clock changes. Nothing that goes wrong with clocks or with the
order of operations stops training: it is logged, and the GPU runs at its highest clock instead. An
operation is logged with its clock once the guard has said that it was set, and else with 0 MHz.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from envplan.devices import DEFAULT_BACKEND, Counted, DeviceError
from envplan.devices.guard import Guard
from envplan.enforce.freqplan import FrequencyPlan, RankPlan
from envplan.profile import ClockRequest, parse_clock_requests
from envplan.runtime.joules import Joules
from envplan.runtime.listener import Clocks, Listener, Marker, Moment, environment_number, seconds
from envplan.runtime.runlog import RUN_SCHEMA, RunLog
from envplan.runtime.stragglers import before_reduction

_LOG_LIMIT: Final = 64 * 2**20
_LOGGED_ERRORS: Final = 1000
#: Steps in a row that did not follow the plan's order, after which the plan is not tried again; or
#: that had no operation at all, after which that is said.
_PATIENCE: Final = 3

_Key = tuple[str, int, int]
_logger = logging.getLogger("envplan.runtime")


class _Rung(NamedTuple):
    """One of the plans that a rank may follow, in execution order, and one operation beyond.

    Clock 0: leave it as it is; config "": there is none; parts: what each asks for as it starts.
    """

    iteration_s: float
    clocks: tuple[int, ...]
    configs: tuple[str, ...]
    parts: tuple[dict[str, list[ClockRequest]], ...]


class _Step(NamedTuple):
    """A step that was followed to its end, which is logged once it is known which clocks were set.

    Attributes:
        number: which, from 0.
        rung: the plan that it followed.
        spans: when each operation began and ended, and the request that it ran at.
        host_ns: when the first of them was begun and when the step was over, perf_counter_ns.
        requests: from how many on to how many there were.
    """

    number: int
    rung: _Rung
    spans: list[tuple[Moment, Moment, int]]
    host_ns: tuple[int, int]
    requests: range


class Shim(Listener, AbstractContextManager["Shim"]):
    """Follows a frequency plan on one rank. Not for use by several threads at once.

    Args:
        plan: a frequency plan, or the path of one.
        rank: global rank; default: $RANK, as torchrun sets it.
        world_size: number of ranks of the job; default: $WORLD_SIZE, else the plan's.
        device: this rank's GPU; default: what the plan says, or the only one that
            CUDA_VISIBLE_DEVICES leaves.
        counted: by whom, if `device` is given.
        backend: where clocks are set, "nvml" or "modelled"; options of it may follow by keyword.
        log: file that the run log is appended to (see runlog); default: beside the plan, with
            .jsonl for .freqplan.json. None: no log.
        log_limit: bytes that this rank logs before it goes on in a file of its own, of which
            there are two at most, each as long.
        every_request: see Guard.start.
        on_step: is called for each step that followed the plan, in a thread of its own, with its
            line of the run log: see docs/runtime.md.
        marker: makes moments in the order of a device's work, for frameworks that queue it:
            `lambda: torch.cuda.Event(enable_timing=True, blocking=True)`. Clocks are then asked for
            when the GPU gets there, by a thread that waits for it (and would spin without
            blocking=True). Default: begin and end are called when the work begins and ends.

    Attributes:
        planned_time: iteration time of the plan itself, without stragglers, s.
        has_ladder: whether there is another plan for when there are stragglers.
        last_iteration: of the last step that was measured, what its plan says and what it took
            until other pipelines could hold it up, s.

    Raises:
        InputError: the plan cannot be read, is of another schema version, for another number of
            ranks or another GPU model, or the rank is not in it.
    """

    _undone = "the plan is not followed"

    def __init__(
        self,
        plan: FrequencyPlan | str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: int | None = None,
        counted: Counted = Counted.BY_DRIVER,
        backend: str = DEFAULT_BACKEND,
        log: str | os.PathLike[str] | None = "",
        log_limit: int = _LOG_LIMIT,
        every_request: bool = False,
        on_step: Callable[[dict[str, Any]], None] | None = None,
        marker: Callable[[], Marker] | None = None,
        **options: Any,
    ) -> None:
        path = None if isinstance(plan, FrequencyPlan) else Path(plan)
        self.plan = plan if isinstance(plan, FrequencyPlan) else FrequencyPlan.load(plan)
        self.rank = environment_number("RANK", rank)
        if world_size is not None or "WORLD_SIZE" in os.environ:
            self.plan.check_world(environment_number("WORLD_SIZE", world_size))
        mine = self.plan.rank_plan(self.rank)
        self.stage = mine.stage
        self.steps = self.mismatches = self.clock_errors = 0
        self.last_iteration: tuple[float, float] | None = None

        # One key more, that nothing equals: an operation too many is then a mismatch like any.
        self._keys: list[_Key | None] = [*(operation[:3] for operation in mine.operations), None]
        self._end = len(mine.operations)
        self._is_backward = [key[0].startswith("backward") for key in self._keys if key]
        self._alone = before_reduction([key for key in self._keys if key is not None])
        self._on_step = on_step
        self._config = ""
        self._rungs = _rungs(self.plan, mine)
        # Its ladder included.
        self.part_names = frozenset(
            p for rung in self._rungs for parts in rung.parts for p in parts
        )
        self._rung = self._next_rung = self._rungs[0]
        self.planned_time = self._rung.iteration_s
        self.has_ladder = len(self._rungs) > 1
        self._begun: Moment | None = None
        self._spans: list[tuple[Moment, Moment, int]] = []
        self._at = self._began_ns = self._requests = self._lost_in_a_row = self._silent = 0
        self._unlogged: deque[_Step] = deque()
        self._lost = self._closed = False
        self._first_error = ""
        self._max_clock = mine.clocks_mhz[-1] if mine.clocks_mhz else 0
        guard = refusal = None
        if device is None:
            device, counted = mine.device, Counted.BY_PLAN
        try:
            guard = Guard.start(
                backend,
                device,
                counted=counted,
                every_request=every_request,
                meter=True,
                check=lambda gpu: self.plan.check_gpu(gpu.name, gpu.supported_clocks, self.stage),
                **options,
            )
            self._max_clock = guard.info.max_clock
        except DeviceError as error:
            refusal = str(error)
        self._clocks = Clocks(guard, marker)
        energies = self.plan.stage_energies
        self._joules = Joules(energies[self.stage] if energies else None)
        if log == "":
            name = "" if path is None else path.name.removesuffix(".json")
            log = path and path.with_name(f"{name.removesuffix('.freqplan')}.jsonl")
        self._log = RunLog(log, rank=self.rank, limit=log_limit)
        self._log.event(
            "start",
            schema=RUN_SCHEMA,
            plan_sha256=self.plan.plan_sha256,
            world_size=self.plan.world_size,
            clocks=refusal is None,
        )
        if refusal is not None:
            _logger.warning("rank %d: clocks are left alone: %s", self.rank, refusal)
            self._log.event("clock_error", step=0, message=refusal)

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins: ask for its clock, if that is another than now."""
        at = self._at
        if self._keys[at] != (instruction, microbatch, chunk):
            self._stray("begin", (instruction, microbatch, chunk))
            return
        if not at:
            self._began_ns = perf_counter_ns()
        self._begun = begun = self._clocks.mark()
        if parts := self._rung.parts[at]:
            self._config = next(iter(parts.values()))[0].config
        clock = self._rung.clocks[at]
        if clock != self._clocks.asked and clock:
            self._clocks.ask(clock, begun)

    @property
    def config(self) -> str:
        """The config planned for the operation or part that runs, or else for the next operation.

        "" where the plan has none, where the step is over, and for as long as the order of
        operations is not the plan's: run what is always right.
        """
        return self._config if self._rung.parts[self._at] else self._rung.configs[self._at]

    def part(self, name: str, *, backward: bool) -> None:
        """As Listener.part: ask for the clocks that are due then or soon after."""
        at = self._at
        changes = self._rung.parts[at].get(name)
        if changes is None or self._begun is None or backward != self._is_backward[at]:
            return
        for change in changes:
            self._config = change.config
            if change.frequency_mhz != self._clocks.asked:
                self._clocks.ask(change.frequency_mhz, self._clocks.mark(), change.delay_ns)

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""
        at = self._at
        if self._begun is None or self._keys[at] != (instruction, microbatch, chunk):
            self._stray("end", (instruction, microbatch, chunk))
            return
        self._spans.append((self._begun, self._clocks.mark(), self._clocks.requests))
        self._begun = None
        self._at = at + 1

    def step(self) -> None:
        """An iteration is over; the next one follows the plan that stragglers leave time for."""
        if 0 < self._at < self._end or self._begun is not None:
            self._stray("step", None)
        done, before = None, self._requests
        self._requests = self._clocks.requests
        if self._lost:
            self._silent = 0
            self._lost_in_a_row += 1
        elif self._spans:
            self._silent = self._lost_in_a_row = 0
            host_ns, requests = (self._began_ns, perf_counter_ns()), range(before, self._requests)
            done = _Step(self.steps, self._rung, self._spans, host_ns, requests)
        else:
            self._silent += 1
            if self._silent == _PATIENCE and not self._missed:
                self._say(self._silence())
        self._clocks.then(partial(self._hear, done))
        self.steps += 1
        self._spans = []
        self._rung = self._next_rung
        self._lost = self._lost_in_a_row >= _PATIENCE
        self._at = self._end if self._lost else 0

    def full_speed(self) -> None:
        """As Listener.full_speed: ask for the highest clock."""
        if self._clocks.asked != self._max_clock:
            self._clocks.ask(self._max_clock, self._clocks.mark())

    def set_straggler_time(self, seconds: float | None) -> None:
        """From the next step on, follow the slowest plan of the ladder that is still in time.

        Every rank must be told the same at the same step; may be called from any thread.

        Args:
            seconds: when a straggler will end an iteration, s; None: there is none any more.
        """
        rungs = self._rungs
        limit = seconds if seconds is not None and seconds > 0 else 0.0  # not a number: no time
        place = bisect_right(rungs, limit, key=lambda rung: rung.iteration_s)
        self._next_rung = rungs[max(0, place - 1)]

    def close(self) -> None:
        """Give the clock back, finish the log and say in one line what went wrong, if anything."""
        if self._closed:
            return
        self._closed = True
        self._clocks.close()
        self._hear(None)
        nothing = self._silent == self.steps and not self._spans and not self._lost
        if self._missed or nothing or self._silent >= _PATIENCE:
            self._say(self._silence())
        if self.clock_errors:
            _logger.warning(
                "rank %d: %d clock error%s in %d steps, the first: %s",
                *(self.rank, self.clock_errors, "s" if self.clock_errors > 1 else ""),
                *(self.steps, self._first_error),
            )
        if summary := self._joules.summary(self.planned_time):
            self._say(summary)
        self._log.close(
            steps=self.steps,
            mismatches=self.mismatches,
            clock_errors=self.clock_errors,
            **self._joules.facts,
        )

    def _hear(self, done: _Step | None) -> None:
        """Take note of what the guard reports, and log the steps that it has decided."""
        if done is not None:
            self._unlogged.append(done)
        guard = self._clocks.guard
        if guard is not None:
            for problem in guard.problems():
                self.clock_errors += 1
                self._first_error = self._first_error or problem
                if self.clock_errors <= _LOGGED_ERRORS:
                    self._log.event("clock_error", step=self.steps, message=problem)
            for reading in guard.readings:
                self._joules.read(*reading)
            guard.readings.clear()
        while self._unlogged:
            last = self._unlogged[0].requests.stop
            if guard and not guard.silent and not guard.failing and guard.done < last:
                break  # soon
            self._log_step(self._unlogged.popleft())
            if guard is not None:
                for request in [request for request in guard.lags if request < last]:
                    del guard.lags[request]

    def _silence(self) -> str:
        if self._missed:
            return f"the plan was not followed: {self._missed}"
        where = f"in {self._silent} steps" if self._silent else "at all"
        return (
            f"no operation was seen {where}, so the plan is not followed; enter follow around the "
            "loop that trains, before the framework's functions are taken"
        )

    def _stray(self, where: str, got: _Key | None) -> None:
        """The order is not the plan's: run at the highest clock until the next step."""
        if self._lost:
            return
        expected = self._keys[self._at]
        self._lost = True
        self._at = self._end
        self._begun = None
        self.full_speed()
        self.mismatches += 1
        if self.mismatches > 1:
            return
        _logger.warning(
            "rank %d, step %d: the plan has %s next, but %s came; at the highest clock until the "
            "order is the plan's again",
            *(self.rank, self.steps, _shown(expected)),
            f"{where} of {_shown(got)}" if got else "the step's end",
        )
        self._log.event("mismatch", step=self.steps, where=where, expected=expected, got=got)

    def _log_step(self, step: _Step) -> None:
        """Log a step; an operation whose clock was not set has 0 MHz."""
        guard = self._clocks.guard
        lags = {} if guard is None or guard.lost else guard.lags
        planned = step.rung.clocks[: self._end]
        clocks = [
            mhz if request in lags else 0
            for mhz, (*_, request) in zip(planned, step.spans, strict=True)
        ]
        if step.rung is self._rungs[0]:
            self._joules.step(*step.host_ns)
        asked, in_force = (sum(mhz > 0 for mhz in each) for each in (planned, clocks))
        rung = step.rung if in_force == asked else self._rungs[0]
        facts = {
            "asked": asked,
            "in_force": in_force,
            "lag_s": max((lags.get(n + 1, 0) for n in step.requests), default=0) / 1e9,
            "mismatches": self.mismatches,
            **self._joules.facts,
        }
        self._log.later(partial(self._line, step, clocks, rung.iteration_s, facts))

    def _line(
        self, step: _Step, clocks: list[int], planned_s: float, facts: dict[str, Any]
    ) -> dict[str, Any]:
        """A step's line of the log, made in the log's thread: it waits for the device."""
        groups: dict[tuple[str, int, int, str], list[float]] = {}
        for key, mhz, config, (begin, end, _) in zip(
            self._keys, clocks, step.rung.configs, step.spans, strict=False
        ):
            assert key is not None
            groups.setdefault((key[0], key[2], mhz, config), []).append(seconds(begin, end))
        begun = step.spans[0][0]
        line = {
            "event": "step",
            "rank": self.rank,
            "stage": self.stage,
            "step": step.number,
            "planned_s": planned_s,
            "iteration_s": seconds(begun, step.spans[-1][1]),
            **facts,
            "operations": [
                [
                    *(name, chunk, mhz, len(times), sum(times) / len(times), min(times)),
                    *([config] if config else []),
                ]
                for (name, chunk, mhz, config), times in groups.items()
            ],
        }
        self.last_iteration = planned_s, seconds(begun, step.spans[self._alone - 1][1])
        if self._on_step is not None:
            try:
                self._on_step(line)
            except Exception:  # it is not ours, and must not end training or its log
                _logger.exception("on_step is not called again")
                self._on_step = None
        return line


def _rungs(plan: FrequencyPlan, mine: RankPlan) -> list[_Rung]:
    """The plan and its ladder, by ascending iteration time, for one rank."""
    stage = mine.stage
    found = [(plan.iteration_time_s, mine.frequencies, mine.configs)]
    for slower in plan.ladder or []:
        clocks, configs = slower.frequencies_mhz[stage], slower.configs_of(stage)
        found.append((slower.iteration_time_s, clocks, configs))
    rungs = []
    for time_s, clocks, configs in found:
        named = (*(configs or [""] * len(clocks)), "")
        rungs.append(_Rung(time_s, (*clocks, 0), named, tuple(map(_parts, named))))
    return rungs


@lru_cache(maxsize=65536)
def _parts(config: str) -> dict[str, list[ClockRequest]]:
    """What is asked for as each part begins, or so long after that."""
    found: dict[str, list[ClockRequest]] = {}
    for change in parse_clock_requests(config):
        found.setdefault(change.part, []).append(change)
    return found


def _shown(key: _Key | None) -> str:
    if key is None:
        return "nothing"
    instruction, microbatch, chunk = key
    return f"{instruction} {microbatch}" + (f" of chunk {chunk}" if chunk else "")
