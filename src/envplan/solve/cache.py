"""Work that the requests of one frontier share."""

from __future__ import annotations

from dataclasses import replace
from threading import RLock
from typing import NamedTuple

from envplan.frontier import Relaxation
from envplan.profile import ByParts
from envplan.replay import Replay
from envplan.solve.candidates import Candidates, RoundedCandidates
from envplan.solve.conditions import SearchConditions
from envplan.solve.fewer_changes import FREE_CHANGES
from envplan.solve.late_bound import ClockLimits
from envplan.solve.late_clock_bounds import LateClockBounds
from envplan.solve.local_search import START_LATENCIES_NS, SearchedCandidates
from envplan.solve.rarely_changing import RarelyChangingAtOnce
from envplan.solve.rarely_changing_searched import RarelyChangingSearched
from envplan.solve.solution import KnownChoice


class CachedFrontier(NamedTuple):
    """A frontier with the cache of its plans."""

    frontier: Relaxation
    cache: PlanCache


class PlanCache:
    """Candidates and choices found so far on one frontier.

    Each Frontier has one, and hands it to every search. Rounded candidates do not depend on what
    was asked before, so all copies of a traced frontier share them; the rest is each copy's own.

    Attributes:
        lock: that whoever searches holds, so threads may share a frontier and its copies. They take
            turns; processes search at once.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._rounded: dict[SearchConditions, RoundedCandidates] = {}
        self._rounded_rarely: dict[SearchConditions, RarelyChangingAtOnce] = {}
        self._searched: dict[SearchConditions, SearchedCandidates] = {}
        self._searched_rarely: dict[SearchConditions, RarelyChangingSearched] = {}
        self._known_choices: dict[SearchConditions, list[KnownChoice]] = {}
        self._late_bounds: dict[tuple[ClockLimits, float], LateClockBounds] = {}
        self._by_parts: dict[ByParts, CachedFrontier] = {}

    def for_copy(self) -> PlanCache:
        """The cache of a copy of the frontier, which shares what does not depend on requests."""
        cache = PlanCache()
        cache._rounded, cache._rounded_rarely = self._rounded, self._rounded_rarely
        cache.lock = self.lock
        return cache

    def candidates(self, frontier: Relaxation, conditions: SearchConditions) -> Candidates:
        """The candidates of a frontier under the local part of some conditions."""
        local = conditions.for_candidates()
        if local.is_plain:
            if local.changes == FREE_CHANGES:
                return self._free_rounded(frontier, local)
            return self._rarely_changing_at_once(frontier, local)
        if local.changes == FREE_CHANGES:
            return self._free_searched(frontier, local)
        return self._rarely_changing_searched(frontier, local)

    def _rarely_changing_at_once(
        self, frontier: Relaxation, conditions: SearchConditions
    ) -> RarelyChangingAtOnce:
        known = self._rounded_rarely
        if conditions not in known:
            free = self._free_rounded(frontier, replace(conditions, changes=FREE_CHANGES))
            known[conditions] = RarelyChangingAtOnce(frontier, conditions, free)
        return known[conditions]

    def _rarely_changing_searched(
        self, frontier: Relaxation, conditions: SearchConditions
    ) -> RarelyChangingSearched:
        known = self._searched_rarely
        if conditions not in known:
            at_once = None
            if not conditions.later_may_be_better:
                at_once = self._rarely_changing_at_once(frontier, conditions.without_limits())
            free = self._free_searched(frontier, replace(conditions, changes=FREE_CHANGES))
            known[conditions] = RarelyChangingSearched(frontier, conditions, free, at_once)
        return known[conditions]

    def late_bounds(self, frontier: Relaxation, conditions: SearchConditions) -> LateClockBounds:
        """The lower bounds that know how late clocks come and how long they are held."""
        clocks, effort = conditions.clock_limits, conditions.moves_share
        key = clocks, effort
        if key not in self._late_bounds:
            self._late_bounds[key] = LateClockBounds(frontier, clocks, effort)
        return self._late_bounds[key]

    def known_choices(self, conditions: SearchConditions) -> list[KnownChoice]:
        """Choices that were found under the same conditions before, for any deadline."""
        return self._known_choices.setdefault(conditions, [])

    def add_choice(self, conditions: SearchConditions, replay: Replay) -> None:
        """Let later requests under the same conditions use a choice that was found elsewhere."""
        self.known_choices(conditions).append(KnownChoice.of(replay))

    def frontier_by_parts(self, frontier: Relaxation, by_parts: ByParts) -> CachedFrontier:
        """The frontier of the options that clocks by part leave, traced once, with its cache."""
        if by_parts not in self._by_parts:
            adjustments = frontier.profile.adjustments.model_copy(update={"by_parts": by_parts})
            profile = frontier.profile.with_adjustments(adjustments)
            retraced = frontier.retraced(frontier.pipeline, profile)
            self._by_parts[by_parts] = CachedFrontier(retraced, PlanCache())
        return self._by_parts[by_parts]

    def _free_rounded(
        self, frontier: Relaxation, conditions: SearchConditions
    ) -> RoundedCandidates:
        if conditions not in self._rounded:
            self._rounded[conditions] = RoundedCandidates(frontier, conditions)
        return self._rounded[conditions]

    def _free_searched(
        self, frontier: Relaxation, conditions: SearchConditions
    ) -> SearchedCandidates:
        if conditions not in self._searched:
            later = [
                self._free_searched(frontier, conditions.with_latency(latency_ns))
                for latency_ns in START_LATENCIES_NS
                if 0 < conditions.machine.latency_ns < latency_ns
            ]
            plain = self._free_rounded(frontier, SearchConditions(changes=FREE_CHANGES))
            bounds = self.late_bounds(frontier, conditions)
            self._searched[conditions] = SearchedCandidates(
                frontier,
                conditions,
                plain,
                later,
                bounds,
            )
        return self._searched[conditions]
