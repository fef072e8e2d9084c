"""Conditions of a search: what decides, besides the frontier, which candidates there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from envplan.replay import Machine
from envplan.request import Request
from envplan.request.limits import Limit

_CLOCKS_AT_ONCE: Final = Machine()


@dataclass(frozen=True)
class SearchConditions:
    """Conditions under which candidates are made and compared.

    Attributes:
        machine: how clocks follow requests.
        limits: that plans keep besides their deadlines.
        moves_share: of the usual moves of the searches.
    """

    machine: Machine = _CLOCKS_AT_ONCE
    limits: tuple[Limit, ...] = ()
    moves_share: float = 1.0

    @classmethod
    def of(cls, request: Request) -> Self:
        """The conditions that a request sets."""
        return cls(request.machine, tuple(request.limits), request.effort.moves)

    @property
    def local_limits(self) -> tuple[Limit, ...]:
        """Limits that single moves can mend: every candidate keeps them."""
        return tuple(limit for limit in self.limits if limit.is_repairable_by_moves)

    @property
    def global_limits(self) -> tuple[Limit, ...]:
        """Limits that are conditions on the whole plan."""
        return tuple(limit for limit in self.limits if not limit.is_repairable_by_moves)

    @property
    def is_plain(self) -> bool:
        """Whether clocks follow at once and nothing but the time is limited."""
        return self.machine.latency_ns == 0 and not self.limits

    def for_candidates(self) -> Self:
        """The conditions that single candidates keep: the same without global limits."""
        return replace(self, limits=self.local_limits)

    def with_latency(self, latency_ns: int) -> Self:
        """The same with clocks that follow later or sooner."""
        return replace(self, machine=replace(self.machine, latency_ns=latency_ns))
