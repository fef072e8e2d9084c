"""Conditions of a search: what decides, besides the frontier, which candidates there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from envplan.replay import Machine
from envplan.request import Request
from envplan.request.limits import Limit, MinDwell
from envplan.solve.fewer_changes import FREE_CHANGES, ChangeWeight
from envplan.solve.late_bound import ClockLimits

_CLOCKS_AT_ONCE: Final = Machine()
_FEWEST_CHANGES: Final = ChangeWeight()


@dataclass(frozen=True)
class SearchConditions:
    """Conditions under which candidates are made and compared.

    Attributes:
        machine: how clocks follow requests.
        limits: that plans keep besides their deadlines.
        moves_share: of the usual moves of the searches.
        changes: how changes of clock weigh against energy.
    """

    machine: Machine = _CLOCKS_AT_ONCE
    limits: tuple[Limit, ...] = ()
    moves_share: float = 1.0
    changes: ChangeWeight = _FEWEST_CHANGES

    @classmethod
    def of(cls, request: Request) -> Self:
        """The conditions that a request sets."""
        changes = ChangeWeight(request.changes, request.change_cost_j, request.change_stall_s)
        limits = tuple(request.limits)
        if changes.is_fewest and not all(limit.is_repairable_by_moves for limit in limits):
            # Many deadlines are tried for limits on the whole plan, which would all take longer.
            changes = FREE_CHANGES
        return cls(request.machine, limits, request.effort.moves, changes)

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

    @property
    def clock_limits(self) -> ClockLimits:
        """How late clocks come and how long they are held."""
        dwells_ns = [limit.dwell_ns for limit in self.limits if isinstance(limit, MinDwell)]
        return ClockLimits(self.machine, max(dwells_ns, default=0))

    @property
    def later_may_be_better(self) -> bool:
        """Whether later clocks may well save more: where operations ask for them as they start."""
        return self.machine.latency_ns > 0 and not self.machine.asks_ahead

    def without_limits(self) -> Self:
        """The same with clocks that follow at once, and nothing limited but the time."""
        return replace(self, machine=_CLOCKS_AT_ONCE, limits=())

    def with_latency(self, latency_ns: int) -> Self:
        """The same with clocks that follow later or sooner."""
        return replace(self, machine=replace(self.machine, latency_ns=latency_ns))
