"""The choice of least energy for one deadline that keeps all limits of a request."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from envplan.errors import NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.replay import Replay
from envplan.request import Request
from envplan.request.limits import LimitContext
from envplan.solve.cache import PlanCache
from envplan.solve.chance_constraint import SpeedLadder, solve_with_probability
from envplan.solve.conditions import SearchConditions
from envplan.solve.limit_keeper import LimitKeeper
from envplan.solve.relief import Relief
from envplan.solve.solution import KnownChoice, NoPlanInTimeError, Solution
from envplan.units import j_from_10fj, s_from_ns

_logger = logging.getLogger(__name__)


class DeadlineSearch:
    """Searches for choices by single deadlines, under the conditions of one request.

    A limit that moves can mend is kept by every candidate; the others are conditions on the whole
    plan.

    Args:
        frontier: of the pipeline.
        request: whose limits, machine and effort count; not its deadline.
        cache: of the frontier.
        progress: called now and then with (steps to go, 0).

    Attributes:
        keeper: of the request's limits.
        candidates: under the local ones of them.
    """

    def __init__(
        self,
        frontier: Relaxation,
        request: Request,
        cache: PlanCache,
        progress: Progress | None = None,
    ) -> None:
        conditions = SearchConditions.of(request)
        self._frontier = frontier
        self._polish_s = request.effort.polish_s
        self._progress = progress
        self.keeper = LimitKeeper(frontier, request)
        self.candidates = cache.candidates(frontier, conditions)
        self._known_choices = cache.known_choices(conditions)
        self._relief = Relief(frontier, self.candidates, self.keeper)
        self._knows_relief = False

    def solve_by(self, deadline_ns: int, *, idle_until_deadline: bool) -> Solution:
        """The choice of least energy found that ends by a deadline and keeps all limits.

        Besides what the search finds, the choices of one clock a stage and those found before are
        looked at. Under limits on the whole plan the answer is remembered, for later deadlines.

        Args:
            deadline_ns: not below T_min, ns.
            idle_until_deadline: everybody waits until then, so what is used until then counts.

        Raises:
            NoAnswerError: none was found; says by how much the best breaks a limit.
        """
        context = self.keeper.context(deadline_ns)
        solution, refusal = None, None
        try:
            solution = self._search(context, idle_until_deadline=idle_until_deadline)
            self.keeper.require(solution.replay, context, self.keeper.exact_limits)
        except NoAnswerError as error:
            solution, refusal = None, error
        solution = self._best_known(solution, context, idle_until_deadline=idle_until_deadline)
        deadline_s = s_from_ns(deadline_ns)
        if solution is None:
            assert refusal is not None
            _logger.info("deadline %.9f s: %s", deadline_s, refusal)
            solution = self._relieved(refusal, context, idle_until_deadline=idle_until_deadline)
        _logger.info(
            "deadline %.9f s: %.9f s and %.10g J a GPU of each stage",
            deadline_s,
            s_from_ns(solution.replay.makespan_ns),
            j_from_10fj(solution.replay.energy_10fj),
        )
        if self.keeper.global_limits:
            self._known_choices.append(KnownChoice.of(solution.replay))
        return solution

    def _search(self, context: LimitContext, *, idle_until_deadline: bool) -> Solution:
        """The best choice that the search finds; limits on the whole plan may be broken.

        Raises:
            NoAnswerError: it finds none in time, or none that holds a probability.
        """
        keeper, candidates, deadline_ns = self.keeper, self.candidates, context.deadline_ns
        if keeper.probability is not None:
            ladder = SpeedLadder(
                self._frontier, candidates, idle_until_deadline=idle_until_deadline
            )
            return solve_with_probability(
                keeper.probability, keeper, ladder, context, self._progress
            )

        def keeps_global_limits(replay: Replay) -> bool:
            return keeper.keeps(replay, context, keeper.global_limits)

        replay = candidates.best_by(
            deadline_ns,
            idle_until_deadline=idle_until_deadline,
            is_preferred=keeps_global_limits,
        )
        if not self._polish_s:
            return Solution(replay, deadline_ns)
        polished = candidates.polished(
            replay, deadline_ns, idle_until_deadline=idle_until_deadline, seconds=self._polish_s
        )
        return Solution(polished.replay, deadline_ns, bound_10fj=polished.bound_10fj)

    def _relieved(
        self, refusal: NoAnswerError, context: LimitContext, *, idle_until_deadline: bool
    ) -> Solution:
        """The best choice that keeps all limits because operations that break one were changed.

        Args:
            refusal: why there is no other.

        Raises:
            NoAnswerError: there is none; says by how much the closest breaks a limit.
        """
        if isinstance(refusal, NoPlanInTimeError) or self.keeper.relieving is None:
            raise refusal
        if not self._knows_relief:
            self._known_choices += self._relief.choices_that_keep_all()
            self._knows_relief = True
        solution = self._best_known(None, context, idle_until_deadline=idle_until_deadline)
        if solution is not None:
            return solution
        closest = self._relief.closest_by(context.deadline_ns)
        if closest is not None:
            self.keeper.require(closest, context, self.keeper.exact_limits)
        raise refusal

    def _best_known(
        self, solution: Solution | None, context: LimitContext, *, idle_until_deadline: bool
    ) -> Solution | None:
        """A solution, or the choice of less cost that is known already and keeps all limits.

        A bound that was proved for the deadline holds for any choice.
        """
        keeper, deadline_ns = self.keeper, context.deadline_ns
        waiting_10uw = self._frontier.total_power_10uw if idle_until_deadline else 0
        change_price_10fj = self.candidates.change_price_10fj
        least_10fj = math.inf
        if solution is not None:
            least_10fj = self.candidates.cost_10fj(
                solution.replay, idle_until_deadline=idle_until_deadline
            )
        for known_choice in (*self.candidates.uniform_clocks, *self._known_choices):
            cost_10fj = known_choice.energy_10fj - waiting_10uw * known_choice.makespan_ns
            cost_10fj += change_price_10fj * known_choice.num_changes
            if known_choice.makespan_ns > deadline_ns or cost_10fj >= least_10fj:
                continue
            replay = self.candidates.replay(known_choice.choice)
            if not keeper.keeps(replay, context, keeper.exact_limits):
                continue
            robustness = keeper.certify(replay, context)
            if keeper.probability is not None and robustness is None:
                continue
            if solution is None:
                solution = Solution(replay, deadline_ns)
            solution = replace(solution, replay=replay, robustness=robustness)
            least_10fj = cost_10fj
        return solution
