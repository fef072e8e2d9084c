"""Which deadlines to search for, given a request, and which plan follows from what was found."""

from __future__ import annotations

from dataclasses import replace

from envplan.costs import TimeAndEnergy
from envplan.errors import NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.plan import Plan, build_plan
from envplan.plan.build import note_straggler
from envplan.plan.target import target_of
from envplan.replay import Replay, Rows
from envplan.request import Request
from envplan.solve.cache import PlanCache
from envplan.solve.chance_constraint import SpeedLadder
from envplan.solve.conditions import SearchConditions
from envplan.solve.deadline_search import DeadlineSearch
from envplan.solve.deadline_solver import (
    COARSE_RESOLUTION,
    FINE_RESOLUTION,
    DeadlineSolver,
    bisect_first_feasible,
)
from envplan.solve.late_bound import RELAXED_BOUND, StatedBound, late_waiting_bound_10fj
from envplan.solve.limit_keeper import run_of
from envplan.solve.solution import NoPlanInTimeError, Solution
from envplan.units import duration_text, j_from_10fj, ns_from_s_floor, s_from_ns


class RequestSolver(DeadlineSolver[Solution]):
    """Solves one request on one frontier.

    Args:
        frontier: of the pipeline, the profile and the GPUs.
        request: what is asked.
        cache: of the frontier.
        progress: called now and then with (steps to go, 0), the former falling.
    """

    def __init__(
        self,
        frontier: Relaxation,
        request: Request,
        cache: PlanCache,
        progress: Progress | None = None,
    ) -> None:
        num_gpus = frontier.num_gpus * frontier.pipeline.num_stages
        super().__init__(frontier, request, num_gpus, progress)
        self.frontier = frontier
        self._conditions = SearchConditions.of(request)
        self._late_bounds = cache.late_bounds(frontier, self._conditions)
        self._search = DeadlineSearch(frontier, request, cache, progress)
        self._keeper = self._search.keeper
        self._candidates = self._search.candidates

    @property
    def num_candidates(self) -> int:
        """How many candidates have been made on this frontier under these conditions."""
        return self._candidates.num_made

    # One deadline.

    def solve_by(self, deadline_ns: int, *, idle_until_deadline: bool = False) -> Solution:
        """The choice of least energy found that ends by a deadline and keeps all limits."""
        return self._search.solve_by(deadline_ns, idle_until_deadline=idle_until_deadline)

    def solve_by_or_none(self, deadline_ns: int) -> Solution | None:
        """The solution by a deadline, which states the deadline; None where there is none."""
        solution = super().solve_by_or_none(deadline_ns)
        if solution is None:
            return None
        return replace(solution, deadline_ns=max(solution.replay.makespan_ns, deadline_ns))

    def time_and_energy(self, answer: Solution) -> TimeAndEnergy:
        """Time and energy of a solution, all GPUs."""
        replay = answer.replay
        energy_10fj = replay.energy_10fj * self.frontier.num_gpus
        return TimeAndEnergy(s_from_ns(replay.makespan_ns), j_from_10fj(energy_10fj))

    # Deadlines to choose.

    def requested_deadline_ns(self) -> int:
        """The deadline that the request means, ns.

        Raises:
            NoAnswerError: it is below T_min; says T_min.
        """
        frontier, deadline = self.frontier, self.request.deadline
        deadline_ns = deadline.resolve_ns(frontier.min_time_ns)
        if deadline_ns is None:  # least energy
            is_plain = self._conditions.is_plain
            return frontier.min_energy_time_ns if is_plain else frontier.slowest_time_ns
        return deadline_ns if deadline.time_s is None else frontier.checked_ns(deadline_ns)

    def least_energy(self) -> Solution:
        """The solution of least energy by the request's deadline, or by its straggler's end."""
        deadline_ns = self.requested_deadline_ns()
        if self.request.deadline.kind == "sync-time":
            is_beyond_t_star = deadline_ns > self.frontier.min_energy_time_ns
            return self.solve_by(deadline_ns, idle_until_deadline=is_beyond_t_star)
        straggler_ns = ns_from_s_floor(self.request.straggler_time_s or 0.0)
        if straggler_ns > deadline_ns:
            solution = self._use_straggler_time(straggler_ns)
            if solution is not None:
                return solution
        return self._least_energy_by(deadline_ns)

    def _use_straggler_time(self, straggler_ns: int) -> Solution | None:
        """The solution that saves most while everybody waits for a straggler; None: there is none.

        Args:
            straggler_ns: when the straggler has finished, later than the request's deadline.
        """
        t_star_ns, straggler_s = self.frontier.min_energy_time_ns, self.request.straggler_time_s
        assert straggler_s is not None
        is_beyond_t_star = straggler_ns > t_star_ns
        try:
            solution = self.solve_by(straggler_ns, idle_until_deadline=is_beyond_t_star)
        except NoAnswerError:
            has_exact_global_limits = set(self._keeper.global_limits) - {self._keeper.probability}
            if is_beyond_t_star and has_exact_global_limits:
                # A plan that uses all of the straggler's time takes more energy than T_star's,
                # perhaps more than a budget.
                return self._latest_between(t_star_ns, straggler_ns)
            return None
        answered = self.request.with_deadline(straggler_s, waits=is_beyond_t_star)
        return replace(solution, answered_request=answered)

    def _latest_between(self, earliest_ns: int, end_ns: int) -> Solution | None:
        """The solution by the latest deadline found that has one.

        Args:
            earliest_ns: the earliest deadline; None comes back where this has no solution.
            end_ns: deadlines are earlier than this.
        """
        # The latest deadline is the least of the negative ones.
        return bisect_first_feasible(
            -end_ns,
            -earliest_ns,
            lambda negative_ns: self.solve_by_or_none(-negative_ns),
            resolution=COARSE_RESOLUTION,
        )

    def _least_energy_by(self, deadline_ns: int) -> Solution:
        """The solution of least energy by a deadline, without stragglers.

        Raises:
            NoAnswerError: none was found.
        """
        t_star_ns = self.frontier.min_energy_time_ns
        if self._conditions.is_plain and deadline_ns > t_star_ns:
            # With limits or late clocks a plan slower than T_star may be the best, or the only one.
            return self._or_one_clock_a_stage(self.solve_by(t_star_ns), deadline_ns)
        try:
            return self.solve_by(deadline_ns)
        except NoPlanInTimeError as error:
            if self.request.deadline.kind != "no-slowdown":
                raise
            # T_min needs clocks to change in no time; the least time found does not.
            return self.solve_by(error.least_ns)
        except NoAnswerError:
            if not self._eases_beyond_t_star() or deadline_ns <= t_star_ns:
                raise
            # Power goes on falling beyond T_star: what keeps the cap soonest uses least there.
            fastest = self.fastest()
            if fastest.replay.makespan_ns > deadline_ns:
                raise
            return replace(fastest, deadline_ns=deadline_ns)

    def _or_one_clock_a_stage(self, solution: Solution, deadline_ns: int) -> Solution:
        """T_star's solution, or one clock a stage that is slower and uses less.

        T_star's may use a little more than the least, for fewer changes of clock.
        """
        known = [one for one in self._candidates.uniform_clocks if one.makespan_ns <= deadline_ns]
        least = min(known, key=lambda one: one.energy_10fj, default=None)
        if least is None or least.energy_10fj >= solution.replay.energy_10fj:
            return solution
        return Solution(self._candidates.replay(least.choice), least.makespan_ns)

    def least_energy_in_time(self) -> Solution:
        """The solution of least energy while a straggler sets the time of the run.

        Raises:
            NoAnswerError: the straggler makes the run too long.
        """
        solution, run = self.least_energy(), run_of(self.request)
        straggler_ns = ns_from_s_floor(self.request.straggler_time_s or 0.0)
        run_ns = max(straggler_ns, solution.replay.makespan_ns) * run.iterations
        if run_ns > run.deadline_ns:
            raise NoAnswerError(
                f"with the straggler {run.iterations} iterations take "
                f"{duration_text(s_from_ns(run_ns))}, longer than the deadline of "
                f"{duration_text(s_from_ns(run.deadline_ns))}"
            )
        return solution

    def fastest(self) -> Solution:
        """The fastest solution found that keeps all limits.

        Up to T_star a later deadline never costs more, so deadlines are bisected to the first whose
        solution is within a budget. A larger budget has no later one. Where each solution takes
        long to prove or to polish, the bisection is not exact.

        Raises:
            NoAnswerError: none keeps them; says by how much.
        """
        frontier = self.frontier
        resolution: int | None = None
        middle_ns = frontier.min_energy_time_ns
        is_plain = self._conditions.for_candidates().is_plain
        if not is_plain:
            middle_ns = max(middle_ns, self._candidates.fastest.makespan_ns)
        if self._keeper.probability is not None or self.request.effort.polish_s:
            resolution = FINE_RESOLUTION if is_plain else COARSE_RESOLUTION
        earliest_ns = min(self._earliest_by_relaxation_ns(), frontier.slowest_time_ns)
        solution = self.earliest_from(earliest_ns, middle_ns, resolution=resolution)
        if solution is not None:
            return self._made_faster(solution)
        safest = self._safest_choice()
        if safest is None and self._eases_beyond_t_star():
            return self.solve_by(frontier.slowest_time_ns, idle_until_deadline=True)
        if safest is None:
            return self.solve_by(frontier.min_energy_time_ns)
        # Options that draw less on average than waiting does take more energy than any others.
        return self._morphed_towards(safest)

    def _eases_beyond_t_star(self) -> bool:
        """Whether a plan slower than T_star may keep a limit that T_star's plan does not."""
        return any(limit.eases_beyond_t_star for limit in self.request.limits)

    def _earliest_by_relaxation_ns(self) -> int:
        """The time that no plan under the limits undercuts, ns."""
        earliest_ns = [limit.earliest_ns(self.frontier) for limit in self.request.limits]
        return max(earliest_ns, default=self.frontier.min_time_ns)

    def _made_faster(self, solution: Solution) -> Solution:
        """A faster solution that a search finds just before one, or that one itself."""
        if self._keeper.probability is not None:
            return solution  # a faster one would have to be proved anew
        for replay in self._candidates.faster_than(solution.replay):
            context = self._keeper.context(replay.makespan_ns)
            if self._keeper.keeps(replay, context, self._keeper.exact_limits):
                return Solution(replay, replay.makespan_ns)
        return solution

    def _safest_choice(self) -> Rows | None:
        """The choice that keeps one of the limits best, whatever it costs; None: none is known."""
        for limit in self.request.limits:
            choice = limit.safest_choice(self.frontier.problem)
            if choice is not None:
                return choice
        return None

    def _morphed_towards(self, safest: Rows) -> Solution:
        """The solution with as few of the safest options as keep all limits.

        Operations get them in the order of the schedule, all others their options of T_max.

        Args:
            safest: the safest option of each operation, int32 (N,).

        Raises:
            NoAnswerError: even all of them do not.
        """
        order, num_operations = self.frontier.problem.pipeline.order, len(safest)
        speeds = SpeedLadder(self.frontier, self._candidates, idle_until_deadline=True)
        slowest = speeds.replay_at(0).rows

        def morph(num_safest: int) -> Solution | None:
            choice = slowest.copy()
            choice[order[:num_safest]] = safest[order[:num_safest]]
            replay = self._candidates.replay(choice)
            return Solution(replay, replay.makespan_ns) if self._keeps_all(replay) else None

        solution = bisect_first_feasible(0, num_operations, morph)
        if solution is None:
            replay = self._candidates.replay(safest)
            context = self._keeper.context(replay.makespan_ns)
            self._keeper.require(replay, context, self.request.limits)
        assert solution is not None
        return self._certified(solution)

    def _certified(self, solution: Solution) -> Solution:
        """A solution with the proof of its probability, where one was asked for.

        Raises:
            NoAnswerError: it cannot be proved; says what could be held.
        """
        probability = self._keeper.probability
        if probability is None:
            return solution
        context = self._keeper.context(solution.deadline_ns)
        robustness = self._keeper.certify(solution.replay, context)
        if robustness is None:
            raise NoAnswerError(probability.explain_violation(solution.replay, context))
        return replace(solution, robustness=robustness)

    def _keeps_all(self, replay: Replay) -> bool:
        """Whether a replay keeps all limits by its own end."""
        context = self._keeper.context(replay.makespan_ns)
        return self._keeper.keeps(replay, context, self.request.limits)

    # Plans.

    def rung_by(self, deadline_ns: int) -> Plan:
        """A plan by a time, one of many: until then everybody waits if it is beyond T_star.

        Raises:
            NoAnswerError: none was found.
        """
        is_beyond_t_star = deadline_ns > self.frontier.min_energy_time_ns
        if self._conditions.is_plain:
            solution = Solution(self._candidates.near(deadline_ns), deadline_ns)
        else:
            solution = self.solve_by(deadline_ns, idle_until_deadline=is_beyond_t_star)
        deadline_s = s_from_ns(deadline_ns)
        answered = self.request.with_deadline(deadline_s, waits=is_beyond_t_star)
        return self._built(solution, answered)

    def plan(self, solution: Solution) -> Plan:
        """A solution as a plan for the request, with its straggler noted."""
        bound = self._bound_on(solution)
        plan = self._built(solution, self.request, bound)
        straggler_s = self.request.straggler_time_s
        if straggler_s is None:
            return plan
        waiting_10fj = 0
        straggler_ns = ns_from_s_floor(straggler_s)
        if bound.kind == "late-clocks" and straggler_ns >= self.frontier.min_time_ns:
            waiting_10fj = late_waiting_bound_10fj(
                self.frontier, straggler_ns, self._late_bounds.clocks
            )
        return note_straggler(plan, self.frontier, solution.replay, straggler_s, waiting_10fj)

    def _bound_on(self, solution: Solution) -> StatedBound:
        """The highest lower bound that is known of the plans by a solution's deadline."""
        if solution.bound_10fj is not None:
            return StatedBound("cp-sat", solution.bound_10fj)
        return self._late_bounds.stated(solution.replay, solution.deadline_ns)

    def _built(
        self, solution: Solution, request: Request, bound: StatedBound = RELAXED_BOUND
    ) -> Plan:
        answered = solution.answered_request or request
        t_min_ns = self.frontier.min_time_ns
        plan = build_plan(
            self.frontier,
            solution.replay,
            target=target_of(answered, solution.deadline_ns, least_ns=t_min_ns),
            request=request,
            bound_10fj=bound.energy_10fj,
            bound=bound.kind,
        )
        stated = {"robustness": solution.robustness, "late_clock_prices": bound.prices}
        predicted = plan.predicted.model_copy(update=stated)
        return plan.model_copy(update={"predicted": predicted})
