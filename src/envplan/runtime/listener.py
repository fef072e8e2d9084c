"""Who is told what a training process does, and by which moments it goes."""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

from envplan.errors import InputError

__all__ = ["Listener", "Marker", "Moment", "environment_number", "seconds"]

_logger = logging.getLogger("envplan.runtime")


class Listener:
    """What is told of operations as they come: a Shim, a Profiler or a Recorder.

    Attributes:
        rank: global rank.
        part_names: names of the modules that it wants to be told of; "*" stands for text without a
            dot.
    """

    rank = 0
    part_names: frozenset[str] = frozenset()
    _undone = "nothing is done"
    _missed = ""

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins."""

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""

    def part(self, name: str, *, backward: bool) -> None:
        """A part of the operation that runs begins.

        Args:
            name: such as a module's.
            backward: whether its backward begins; what a backward recomputes does not count.
        """

    def step(self) -> None:
        """An iteration is over."""

    def full_speed(self) -> None:
        """Something else runs until the next operation begins, such as an evaluation."""

    def missed(self, why: str) -> None:
        """Operations run that it cannot be told of.

        Args:
            why: and what to do, for the log; said once, on rank 0.
        """
        if not self._missed:
            self._missed = why
            self._say(f"{self._undone}: {why}")

    def _say(self, line: str) -> None:
        """Log what is the same on all ranks."""
        if self.rank == 0:
            _logger.warning("rank 0: %s", line)


class Marker(Protocol):
    """A moment in the order of a device's work; torch.cuda.Event(enable_timing=True) is one."""

    def record(self) -> None:
        """Put it behind the work queued so far."""

    def synchronize(self) -> None:
        """Wait until that work is done."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later moment."""


#: A moment: perf_counter_ns, or a marker in the device's queue.
Moment = int | Marker


def seconds(begin: Moment, end: Moment) -> float:
    """Time between two moments of the same kind, s; waits for them to have come."""
    if isinstance(begin, int):
        assert isinstance(end, int)
        return (end - begin) / 1e9
    assert not isinstance(end, int)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def environment_number(variable: str, given: int | None) -> int:
    """A number given, or else that of an environment variable.

    Raises:
        InputError: neither is there.
    """
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise InputError(
            f"${variable} is not set; start training with torchrun, which sets it, or give "
            f"{variable.lower()}="
        )
    return int(text)
