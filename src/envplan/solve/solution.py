"""Results of the searches: choices with their replays, and the error of finding none in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from envplan.errors import NoAnswerError
from envplan.replay import Replay, Rows
from envplan.request import Request
from envplan.request.limits import Robustness
from envplan.units import s_from_ns


class NoPlanInTimeError(NoAnswerError):
    """No plan was found that ends by a deadline and keeps the local limits.

    Attributes:
        least_ns: the least time that was found, ns.
    """

    def __init__(self, deadline_ns: int, least_ns: int, why: str) -> None:
        self.least_ns = least_ns
        super().__init__(
            f"no plan was found that finishes in {s_from_ns(deadline_ns):.9f} s {why}; the least "
            f"time found is {s_from_ns(least_ns):.9f} s"
        )


class KnownChoice(NamedTuple):
    """A choice that is tried wherever it is in time, and what its replay takes."""

    choice: Rows
    makespan_ns: int
    energy_10fj: int
    num_changes: int

    @classmethod
    def of(cls, replay: Replay) -> KnownChoice:
        """A replay's choice, without the arrays of the replay."""
        return cls(replay.rows, replay.makespan_ns, replay.energy_10fj, replay.num_changes)


@dataclass(frozen=True)
class Polished:
    """A choice after some seconds of further search.

    Attributes:
        replay: of the best choice.
        bound_10fj: a lower bound on energy, one GPU a stage, 10 fJ, where CP-SAT proved more than
            the relaxation does; else None.
    """

    replay: Replay
    bound_10fj: int | None = None


@dataclass(frozen=True)
class Solution:
    """A choice that answers a request.

    Attributes:
        replay: of the choice.
        deadline_ns: that it was made for, ns; plan.json states it.
        answered_request: what it answers, where that is not the request but using a straggler's
            time.
        robustness: how sure it is, where that was asked for.
        bound_10fj: a lower bound that CP-SAT proved, one GPU a stage, 10 fJ.
    """

    replay: Replay
    deadline_ns: int
    answered_request: Request | None = None
    robustness: Robustness | None = None
    bound_10fj: int | None = None
