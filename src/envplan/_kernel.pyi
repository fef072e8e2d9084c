"""Types of the compiled core; see csrc/_kernel.pyx for what each does."""

from collections.abc import Callable
from contextvars import ContextVar
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

INFINITE: int
STOP: ContextVar[Event | None]

class Optimum(NamedTuple):
    times_ns: NDArray[np.int64]
    flow_10uw: NDArray[np.int64]

class Breakpoints(NamedTuple):
    times_ns: NDArray[np.int64]
    slopes_10uw: NDArray[np.int64]
    costs_10fj: list[int]

class ParametricFlow:
    num_nodes: int
    num_arcs: int
    def __init__(
        self,
        num_nodes: int,
        tail: NDArray[np.int32],
        head: NDArray[np.int32],
        curve: NDArray[np.int32],
        curve_begin: NDArray[np.int32],
        duration: NDArray[np.int64],
        slope: NDArray[np.int64],
        source: int,
        sink: int,
    ) -> None: ...
    @property
    def min_time(self) -> int: ...
    @property
    def max_time(self) -> int: ...
    @property
    def time(self) -> int: ...
    @property
    def cost(self) -> int: ...
    def solve_at_flow(
        self,
        flow: NDArray[np.int64],
        times: NDArray[np.int64] | None,
        total: int,
        *,
        is_rough: bool = False,
    ) -> None: ...
    def solve_at_time(
        self, flow: NDArray[np.int64], times: NDArray[np.int64], time: int
    ) -> None: ...
    def optimum(self) -> Optimum: ...
    def trace(self, from_flow: int = -1) -> FrontierTrace: ...

class FrontierTrace:
    def __init__(self, start: ParametricFlow, from_flow: int) -> None: ...
    @property
    def min_time(self) -> int: ...
    @property
    def max_time(self) -> int: ...
    @property
    def start_time(self) -> int: ...
    @property
    def end_time(self) -> int: ...
    def extend(
        self, until: int = 0, progress: Callable[[int, int], None] | None = None
    ) -> None: ...
    def watch(self, arcs: NDArray[np.int32], later: NDArray[np.int32]) -> None: ...
    def watch_nothing(self) -> None: ...
    def periods(self) -> NDArray[np.int64]: ...
    def breakpoints(self) -> Breakpoints: ...
    def optimum_at(self, time: int) -> Optimum: ...

class Rounding:
    def __init__(
        self,
        pred_begin: NDArray[np.int32],
        pred: NDArray[np.int32],
        pred_lag: NDArray[np.int64],
        table: NDArray[np.int32],
        option_begin: NDArray[np.int32],
        time: NDArray[np.int64],
        cost: NDArray[np.int64],
        finish: NDArray[np.int64],
        deadline: int,
    ) -> None: ...
    def round(self) -> NDArray[np.int32]: ...
    def improve(self, choice: NDArray[np.int32], moves: int, heat: float, seed: int) -> bool: ...

class Problem:
    num_operations: int
    num_stages: int
    def __init__(
        self,
        order: NDArray[np.int32],
        stage_begin: NDArray[np.int32],
        succ_begin: NDArray[np.int32],
        succ: NDArray[np.int32],
        succ_lag: NDArray[np.int64],
        table: NDArray[np.int32],
        table_begin: NDArray[np.int32],
        time: NDArray[np.int64],
        energy: NDArray[np.int64],
        clock: NDArray[np.int32],
        leaves: NDArray[np.int32],
        nearest: NDArray[np.int32],
        waiting: NDArray[np.int64],
        slice_begin: NDArray[np.int32] | None = None,
        slice_time: NDArray[np.int64] | None = None,
        slice_power: NDArray[np.int64] | None = None,
    ) -> None: ...
    def replay(
        self,
        rows: NDArray[np.int32],
        latency: int,
        asks_ahead: bool,
        factors: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int, int]: ...
    def parts(
        self,
        rows: NDArray[np.int32],
        latency: int,
        asks_ahead: bool,
        factors: NDArray[np.float64] | None = None,
    ) -> tuple[
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.int64],
    ]: ...
    def power_steps(
        self,
        rows: NDArray[np.int32],
        latency: int,
        asks_ahead: bool,
        factors: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def requests(
        self,
        rows: NDArray[np.int32],
        latency: int,
        asks_ahead: bool,
        factors: NDArray[np.float64] | None = None,
    ) -> NDArray[np.int64]: ...
    def cheapest_stage_path(
        self,
        stage: int,
        latency: int,
        asks_ahead: bool,
        min_dwell: int,
        change: float,
        time_price: NDArray[np.float64],
        wait_price: NDArray[np.float64],
    ) -> tuple[float, float, int, NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]: ...
    def makespans(
        self,
        rows: NDArray[np.int32],
        latency: int,
        asks_ahead: bool,
        factors: NDArray[np.float64],
    ) -> NDArray[np.int64]: ...

class Search:
    def __init__(
        self,
        problem: Problem,
        latency: int,
        asks_ahead: bool,
        deadline: int,
        min_dwell: int,
        peak: int,
        waits: bool,
        price: int,
        change_price: int = 0,
        allowance: int = -1,
    ) -> None: ...
    def score(self, rows: NDArray[np.int32]) -> tuple[int, int, int, int, int, int, int]: ...
    def improve(
        self,
        rows: NDArray[np.int32],
        moves: int,
        heat: float,
        seed: int,
        strict_allowance: bool = False,
    ) -> NDArray[np.int32]: ...
    def constant(self, passes: int) -> NDArray[np.int32]: ...

def compose(
    option_end: NDArray[np.int32],
    time: NDArray[np.int64],
    energy: NDArray[np.int64],
    asks: NDArray[np.uint8],
    latency: int,
    min_dwell: int,
    waiting: int,
    slack: int,
    max_choices: int,
) -> NDArray[np.int32]: ...
