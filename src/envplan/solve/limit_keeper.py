"""The limits of one request: whether replays keep them, and why there is no plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from envplan.errors import NoAnswerError
from envplan.frontier import Relaxation
from envplan.replay import Replay
from envplan.replay.noise import NoisyRun
from envplan.request import Request
from envplan.request.limits import HoldsWithProbability, Limit, LimitContext, Robustness
from envplan.solve.conditions import SearchConditions
from envplan.units import ns_from_s_floor

#: Attempts to prove that a choice holds a probability.
MAX_PROOFS: Final = 4


class LimitKeeper:
    """Judges replays by the limits of a request.

    Attributes:
        probability: the limit on the probability that the deadline is held; None: times are exact.
        exact_limits: all other limits.
        local_limits: those of all that every candidate keeps.
        global_limits: those of all that are conditions on the whole plan.
        relieving: the first that knows which operations to change where it is broken; None: none.
    """

    def __init__(self, frontier: Relaxation, request: Request) -> None:
        self._frontier = frontier
        self._request = request
        conditions = SearchConditions.of(request)
        self.probability = request.limit(HoldsWithProbability)
        self.exact_limits = [limit for limit in request.limits if limit is not self.probability]
        self.local_limits = conditions.local_limits
        self.global_limits = conditions.global_limits
        relieving = (limit for limit in self.exact_limits if limit.can_relieve)
        self.relieving = next(relieving, None)

    def context(self, deadline_ns: int) -> LimitContext:
        """The context in which limits judge a replay by a deadline."""
        is_run_limited = self._request.objective == "cost"
        return LimitContext(
            self._frontier.num_gpus,
            deadline_ns,
            self._frontier.profile,
            run=run_of(self._request) if is_run_limited else None,
            sync_ns=self._request.sync_ns,
        )

    def keeps(self, replay: Replay, context: LimitContext, limits: Iterable[Limit]) -> bool:
        """Whether a replay keeps some limits."""
        return _first_violated(replay, context, limits) is None

    def first_violated(self, replay: Replay, context: LimitContext) -> Limit | None:
        """The first limit, of all but the probability, that a replay breaks; None: it keeps all."""
        return _first_violated(replay, context, self.exact_limits)

    def require(self, replay: Replay, context: LimitContext, limits: Iterable[Limit]) -> None:
        """Refuse a replay that breaks one of some limits.

        Raises:
            NoAnswerError: it breaks one; says by how much.
        """
        violated = _first_violated(replay, context, limits)
        if violated is not None:
            raise NoAnswerError(violated.explain_refusal(replay, context, self._frontier))

    def certify(self, replay: Replay, context: LimitContext) -> Robustness | None:
        """The proof that a replay's choice is in time as surely as asked; None if there is none.

        It takes some thousand replays with noise.
        """
        limit = self.probability
        if limit is None or limit.violation(replay, context):
            return None
        for attempt in range(MAX_PROOFS):
            robustness = limit.certify(replay, context, attempt=attempt)
            if robustness is not None:
                return robustness
        return None


def _first_violated(replay: Replay, context: LimitContext, limits: Iterable[Limit]) -> Limit | None:
    """The first of some limits that a replay breaks; None: it keeps them."""
    for limit in limits:
        if limit.violation(replay, context):
            return limit
    return None


def run_of(request: Request) -> NoisyRun:
    """The number of iterations of a request's run, and when they are to be over."""
    run = request.run
    assert run is not None
    assert run.iterations is not None
    return NoisyRun(run.iterations, ns_from_s_floor(run.deadline_s or 0.0))
