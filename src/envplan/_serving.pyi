"""Types of the compiled replay; see csrc/serving.hpp for what it does."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def instances_needed(
    arrival: NDArray[np.float64],
    work: NDArray[np.float64],
    level: NDArray[np.uint8],
    slack: Sequence[float],
    duration_s: float,
    late: float,
) -> float: ...

class Replay:
    def __init__(
        self,
        arrival: NDArray[np.float64],
        input: NDArray[np.int32],  # noqa: A002 - as the extension has it
        output: NDArray[np.int32],
        known: NDArray[np.uint8],
        taken: NDArray[np.uint8],
        tables: Iterable[Any],
        sizes: Iterable[Any],
        slos: Iterable[tuple[float, float]],
        clock_delay_s: float,
        clock_hold_s: float,
        clock_margin: float,
        pack_share: float,
        slot_s: float,
        end_s: float,
    ) -> None: ...
    def start(self, pool: int, size: int, clock: int, managed: bool, ready_at: float) -> int: ...
    def retire(self, instance: int) -> None: ...
    def move(self, instance: int, pool: int, clock: int, managed: bool) -> None: ...
    def route(
        self, klass: int, shares: Iterable[tuple[int, float]], helpers: Sequence[int]
    ) -> None: ...
    def set_pack(self, pool: int, pack: bool) -> None: ...
    def advance(self, until: float) -> None: ...
    def finish(self) -> None: ...
    def instances(self) -> list[tuple[int, int, int, int, bool, int]]: ...
    def gpus(self) -> dict[int, int]: ...
    def results(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], int, int]: ...
