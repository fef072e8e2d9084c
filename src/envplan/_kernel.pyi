"""Types of the compiled core; see csrc/_kernel.pyx for what each does."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

INFINITE: int
UNLIMITED: int

class Trace:
    num_nodes: int
    num_arcs: int
    min_time: int
    max_time: int
    def __init__(
        self,
        num_nodes: int,
        tail: NDArray[np.int32],
        head: NDArray[np.int32],
        curve: NDArray[np.int32],
        curve_begin: NDArray[np.int32],
        duration: NDArray[np.int64],
        limit: NDArray[np.int64],
        source: int,
        sink: int,
    ) -> None: ...
    def start(self, guess: NDArray[np.int64], flow: int, rough: bool) -> None: ...
    def state(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def run(
        self,
        from_flow: int = -1,
        progress: Callable[[int, int], None] | None = None,
        until: int = 0,
    ) -> None: ...
    def breakpoints(self) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]: ...
    def state_at(self, time: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

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

class Switching:
    def __init__(
        self,
        pred_begin: NDArray[np.int32],
        pred: NDArray[np.int32],
        pred_lag: NDArray[np.int64],
        stage: NDArray[np.int32],
        table: NDArray[np.int32],
        option_begin: NDArray[np.int32],
        time: NDArray[np.int64],
        energy: NDArray[np.float64],
        clock: NDArray[np.int32],
        nearest: NDArray[np.int32],
        blocking_power: NDArray[np.float64],
        latency: int,
        dwell: int,
        deadline: int,
        late_price: float,
    ) -> None: ...
    def replay(self, choice: NDArray[np.int32]) -> tuple[int, float, int]: ...
    def constant(self, by_table: bool) -> NDArray[np.int32]: ...
    def improve(self, choice: NDArray[np.int32], moves: int, heat: float, seed: int) -> bool: ...

def max_flow(
    num_nodes: int,
    tail: NDArray[np.int32],
    head: NDArray[np.int32],
    lower: NDArray[np.int64],
    upper: NDArray[np.int64],
    source: int,
    sink: int,
) -> tuple[str, int, NDArray[np.int64], NDArray[np.uint8]]: ...
