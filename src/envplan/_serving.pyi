"""Types of the compiled replay; see csrc/serving/replay.hpp for what it does."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

def time_bin_ends() -> npt.NDArray[np.float64]: ...

class Service:
    def __init__(
        self,
        arrival: npt.NDArray[np.float64],
        input: npt.NDArray[np.int32],  # noqa: A002 - as the extension has it
        output: npt.NDArray[np.int32],
        known: npt.NDArray[np.uint8],
        taken: npt.NDArray[np.uint8],
        tables: Iterable[Any],
        sizes: Iterable[Any],
        slos: Iterable[tuple[float, float]],
        usual_output: Iterable[float],
        expected: npt.NDArray[np.int32] | None = None,
        max_context: float = 1e300,
    ) -> None: ...
    def counts(self, begin_s: float, end_s: float) -> list[int]: ...
    def need(
        self, begin_s: float, end_s: float, classes: int, size: int, late: float
    ) -> tuple[float, float, float, float]: ...

class Replay:
    def __init__(
        self,
        service: Service,
        clock_delay_s: float,
        clock_hold_s: float,
        clock_margin: float,
        pack_share: float,
        squash_s: float,
        slot_s: float,
        end_s: float,
        scheduler: str = "edf",
        transfer_s: float = 0.0,
        kv_bytes_per_token: float = 0.0,
    ) -> None: ...
    def start(self, pool: int, size: int, clock: int, managed: bool, ready_at: float) -> int: ...
    def retire(self, instance: int) -> None: ...
    def move(self, instance: int, pool: int, clock: int, managed: bool) -> None: ...
    def route(self, klass: int, pool: int, helpers: Iterable[int]) -> None: ...
    def set_pack(self, pool: int, pack: bool) -> None: ...
    def hand_over(self, pool: int, decode_pool: int) -> None: ...
    def advance(self, until: float) -> None: ...
    def finish(self) -> None: ...
    def instances(self) -> list[tuple[int, int, int, int, bool, int]]: ...
    def gpus(self) -> dict[int, int]: ...
    def times(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def apart(self) -> tuple[int, list[int], int, int, float]: ...
    def results(
        self,
    ) -> tuple[
        npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64], int, int, int
    ]: ...
