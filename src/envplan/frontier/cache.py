"""The cache of frontiers that were traced in this process."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Final, Generic, TypeVar

Frontier = TypeVar("Frontier")


class TraceCache(Generic[Frontier]):
    """Frontiers by what was traced, of which the least recently used are dropped.

    The one put in last is kept, however large it is. Threads may share it.

    Args:
        max_operations: that all pipelines in it may have together.
    """

    def __init__(self, max_operations: int) -> None:
        self._max_operations: Final = max_operations
        self._entries: dict[Hashable, tuple[Frontier, int]] = {}  # the least recently used first
        self._lock: Final = Lock()

    def get(self, key: Hashable) -> Frontier | None:
        """The frontier of a key, which is now the most recently used; None where there is none."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._entries[key] = entry
            return entry[0]

    def put(self, key: Hashable, frontier: Frontier, num_operations: int) -> None:
        """Keep a frontier, of a pipeline of so many operations."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = frontier, num_operations
            while len(self._entries) > 1 and self._total_operations > self._max_operations:
                least_recently_used = next(iter(self._entries))
                del self._entries[least_recently_used]

    def clear(self) -> None:
        """Drop all of them."""
        with self._lock:
            self._entries.clear()

    @property
    def _total_operations(self) -> int:
        return sum(num_operations for _, num_operations in self._entries.values())
