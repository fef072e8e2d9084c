"""The interface through which training code and hooks tell of the operations that they run."""

from __future__ import annotations

import logging

__all__ = ["OperationObserver"]

_logger = logging.getLogger("envplan.runtime")


class OperationObserver:
    """Is told of operations as they run: a Shim, a Profiler or a Recorder.

    All methods are called in the training thread.

    Attributes:
        rank: global rank.
        part_names: names of the modules that it wants to be told of; "*" stands for text without a
            dot.
    """

    rank = 0
    part_names: frozenset[str] = frozenset()
    #: What does not happen where operations are missed.
    _consequence = "nothing is done"
    _missed_reason = ""

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

    def iteration_begins(self) -> None:
        """A training iteration begins, whose first operation comes soon."""

    def step(self) -> None:
        """An iteration is over."""

    def full_speed(self) -> None:
        """Something else runs until the next operation begins, such as an evaluation."""

    def missed(self, reason: str) -> None:
        """Operations run that it cannot be told of.

        Args:
            reason: with what to do, for the log; said once, on rank 0.
        """
        if not self._missed_reason:
            self._missed_reason = reason
            self._warn_on_rank_0(f"{self._consequence}: {reason}")

    def _warn_on_rank_0(self, message: str) -> None:
        """Log what is the same on all ranks."""
        if self.rank == 0:
            _logger.warning("rank 0: %s", message)
