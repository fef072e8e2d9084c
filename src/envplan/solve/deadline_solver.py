"""Requests answered by solving for single deadlines, of one pipeline or of several together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from envplan.costs import TimeAndEnergy
from envplan.costs.pricing import price_run
from envplan.errors import NoAnswerError
from envplan.frontier import Progress
from envplan.request import Request
from envplan.solve.relaxed_cost import EnergyCurve, relaxed_cost_minima
from envplan.units import ns_from_s, ns_from_s_floor

#: A bisection that is not exact ends where one part in so many of its span is left.
FINE_RESOLUTION: Final = 1000
#: The same for solutions that take long.
COARSE_RESOLUTION: Final = 64

Answer = TypeVar("Answer")


class Curve(EnergyCurve, Protocol):
    """A relaxed frontier, of one pipeline or of several together."""

    @property
    def slowest_time_ns(self) -> int:
        """T_max."""


class DeadlineSolver(ABC, Generic[Answer]):
    """Answers a request by solving for single deadlines; subclasses solve for one deadline.

    Args:
        curve: the relaxed frontier.
        request: what is asked.
        num_gpus: of all stages and replicas.
        progress: called now and then with (steps to go, 0), the former falling.
    """

    def __init__(
        self, curve: Curve, request: Request, num_gpus: int, progress: Progress | None = None
    ) -> None:
        self.curve = curve
        self.request = request
        self._num_gpus = num_gpus
        self._progress = progress

    @abstractmethod
    def solve_by(self, deadline_ns: int, *, idle_until_deadline: bool = False) -> Answer:
        """The answer of least energy found that ends by a deadline and keeps all limits.

        Args:
            deadline_ns: not below T_min, ns.
            idle_until_deadline: everybody waits until then, so what is used until then counts.

        Raises:
            NoAnswerError: none was found; says why.
        """

    @abstractmethod
    def time_and_energy(self, answer: Answer) -> TimeAndEnergy:
        """Time and energy of an answer, all GPUs."""

    def solve_by_or_none(self, deadline_ns: int) -> Answer | None:
        """The answer by a deadline; None where there is none.

        Beyond T_star everybody waits until then.
        """
        idle = deadline_ns > self.curve.min_energy_time_ns
        try:
            return self.solve_by(deadline_ns, idle_until_deadline=idle)
        except NoAnswerError:
            return None

    def fastest(self) -> Answer:
        """The fastest answer found that keeps all limits.

        Raises:
            NoAnswerError: there is none.
        """
        curve = self.curve
        earliest = self.earliest_from(
            curve.min_time_ns, curve.min_energy_time_ns, resolution=FINE_RESOLUTION
        )
        return self.solve_by(curve.slowest_time_ns) if earliest is None else earliest

    def earliest_from(
        self, first_ns: int, middle_ns: int, *, resolution: int | None = None
    ) -> Answer | None:
        """The answer of the earliest deadline found from a first one on.

        Args:
            first_ns: the first deadline.
            middle_ns: deadlines up to here are looked at first, then those up to T_max.
            resolution: as for bisect_first_feasible, of each span.
        """
        spans = (first_ns - 1, middle_ns), (middle_ns, self.curve.slowest_time_ns)
        for above_ns, up_to_ns in spans:
            answer = bisect_first_feasible(
                above_ns,
                up_to_ns,
                self.solve_by_or_none,
                resolution=resolution,
                progress=self._progress,
            )
            if answer is not None:
                return answer
        return None

    def cheapest(self) -> Answer:
        """The answer whose run costs least of those that meet the run's deadline.

        Raises:
            NoAnswerError: there is none.
        """
        run = self.request.run
        assert run is not None
        assert run.iterations is not None
        answers: list[Answer] = []
        costs: list[float] = []
        refusal: NoAnswerError | None = None

        def add(answer: Answer) -> None:
            run_cost = price_run(self.time_and_energy(answer), run, self._num_gpus)
            answers.append(answer)
            costs.append(run_cost.amount(run.minimized))

        for minimum in relaxed_cost_minima(self.curve, run, self._num_gpus):
            if costs and minimum.cost >= min(costs):
                break
            try:
                add(self.solve_by(minimum.time_ns))
            except NoAnswerError as error:
                refusal = refusal or error
        if refusal is not None:
            # Between two of these times, what keeps the limits soonest may be cheapest.
            with suppress(NoAnswerError):
                fastest = self.fastest()
                latest_ns = ns_from_s_floor(run.deadline_s or 0.0) // run.iterations
                if ns_from_s(self.time_and_energy(fastest).time_s) <= latest_ns:
                    add(fastest)
            if not answers:
                raise refusal
        return answers[costs.index(min(costs))]


def bisect_first_feasible(
    above: int,
    up_to: int,
    solve: Callable[[int], Answer | None],
    *,
    resolution: int | None = None,
    progress: Progress | None = None,
) -> Answer | None:
    """The answer of the least number found that has one.

    Args:
        above: numbers greater than this.
        up_to: and not greater than this; None comes back if this has no answer.
        solve: the answer of a number, None where it has none.
        resolution: the search ends where one part in so many of the span is left; None: at the
            least number, if all after the first that has an answer have one.
        progress: called with (bisections to go, 0).
    """
    if up_to <= above:
        return None
    first = above + 1
    answer = solve(first)
    if answer is not None:
        return answer
    best = solve(up_to)
    if best is None:
        return None
    infeasible, feasible = first, up_to
    max_gap = 1 if resolution is None else max(1, (feasible - infeasible) // resolution)
    while feasible - infeasible > max_gap:
        if progress is not None:
            progress(((feasible - infeasible) // max_gap).bit_length(), 0)
        middle = (infeasible + feasible) // 2
        answer = solve(middle)
        if answer is None:
            infeasible = middle
        else:
            best, feasible = answer, middle
    return best
