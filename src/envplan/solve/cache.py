"""Work that the requests of one frontier share."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from envplan.frontier import Relaxation
from envplan.profile import ByParts
from envplan.replay import Replay
from envplan.solve.candidates import Candidates, RoundedCandidates
from envplan.solve.conditions import SearchConditions
from envplan.solve.fewer_changes import FREE_CHANGES
from envplan.solve.local_search import START_LATENCIES_NS, SearchedCandidates
from envplan.solve.rarely_changing import RarelyChangingCandidates
from envplan.solve.solution import KnownChoice


class CachedFrontier(NamedTuple):
    """A frontier with the cache of its plans."""

    frontier: Relaxation
    cache: PlanCache


class PlanCache:
    """Candidates and choices found so far on one frontier.

    Each Frontier has one, and hands it to every search. Rounded candidates do not depend on what
    was asked before, so all copies of a traced frontier share them; the rest is each copy's own.
    """

    def __init__(self) -> None:
        self._rounded: dict[SearchConditions, RoundedCandidates] = {}
        self._rounded_rarely: dict[SearchConditions, RarelyChangingCandidates] = {}
        self._searched: dict[SearchConditions, SearchedCandidates] = {}
        self._searched_rarely: dict[SearchConditions, RarelyChangingCandidates] = {}
        self._known_choices: dict[SearchConditions, list[KnownChoice]] = {}
        self._by_parts: dict[ByParts, CachedFrontier] = {}

    def for_copy(self) -> PlanCache:
        """The cache of a copy of the frontier, which shares what does not depend on requests."""
        cache = PlanCache()
        cache._rounded, cache._rounded_rarely = self._rounded, self._rounded_rarely
        return cache

    def candidates(self, frontier: Relaxation, conditions: SearchConditions) -> Candidates:
        """The candidates of a frontier under the local part of some conditions."""
        local = conditions.for_candidates()
        free_conditions = replace(local, changes=FREE_CHANGES)
        free: RoundedCandidates | SearchedCandidates
        if local.is_plain:
            free, rarely_changing = (
                self._free_rounded(frontier, free_conditions),
                self._rounded_rarely,
            )
        else:
            free, rarely_changing = (
                self._free_searched(frontier, free_conditions),
                self._searched_rarely,
            )
        if local.changes == FREE_CHANGES:
            return free
        if local not in rarely_changing:
            rarely_changing[local] = RarelyChangingCandidates(frontier, local, free)
        return rarely_changing[local]

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
            self._searched[conditions] = SearchedCandidates(frontier, conditions, plain, later)
        return self._searched[conditions]
