"""What a limit is: a condition that a plan keeps besides its deadline.

A limit is one file in this folder and one line in `__init__.py` that names it. The search asks it
by how much a replay breaks it, what makes single moves pay for breaking it, and from which time on
the relaxation leaves room for it; `envplan check` asks it for the sentence that it proves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from envplan._model import Model
from envplan.errors import InputError
from envplan.units import uw_from_w

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.noise import NoisyRun
    from envplan.plan import Plan
    from envplan.profile import Profile
    from envplan.replay import Replay


@dataclass(frozen=True)
class Setting:
    """What a limit needs to know besides a replay.

    Attributes:
        num_gpus: GPUs that each operation of the replay stands for.
        deadline_ns: by when an iteration must be over, ns.
        profile: what the replay's rows are of.
        run: the run that has to be over in time instead of an iteration, where there is one.
    """

    num_gpus: int
    deadline_ns: int
    profile: Profile
    run: NoisyRun | None = None


class Limit(Model):
    """A condition on the replay of a plan; the base of all limits.

    Attributes:
        kind: what files call it.
        is_local: single moves can mend it: the search pays for breaking it move by move. A limit
            that is not is a condition on the whole plan, which the search over the time keeps.
    """

    kind: str

    @property
    def is_local(self) -> bool:
        return bool(self.prices(1))

    def prices(self, num_gpus: int) -> dict[str, int]:
        """What `envplan.replay.Search` takes to make moves pay for breaking it; empty: nothing."""
        del num_gpus
        return {}

    def excess(self, replay: Replay, setting: Setting) -> int:
        """By how much a replay breaks it, in whole units of its own; 0 where it keeps it."""
        raise NotImplementedError

    def earliest_ns(self, frontier: Relaxation) -> int:
        """A time that no plan that keeps it undercuts, ns, by the relaxation."""
        return frontier.min_time_ns

    def broken(self, replay: Replay, setting: Setting) -> str:
        """How a replay breaks it, in words."""
        raise NotImplementedError

    def prove(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """The sentence that `envplan check` states of a plan that keeps it.

        Raises:
            InputError: it does not.
        """
        if self.excess(replay, setting):
            raise InputError(f"replayed, {self.broken(replay, setting)}")
        return self.kept(plan, replay, setting)

    def kept(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """That sentence."""
        raise NotImplementedError


class PowerCap(Limit):
    """A limit on the power of all GPUs together, at every moment or on average."""

    power_w: Annotated[float, Field(ge=0, le=1e12)]

    def earliest_ns(self, frontier: Relaxation) -> int:
        """As Limit.earliest_ns: what keeps to a cap at every moment does so on average."""
        cap_uw = uw_from_w(self.power_w) // frontier.num_gpus
        # The relaxed power falls with time, up to T_max.
        return frontier.earliest_ns(lambda at, fj: fj <= cap_uw * at, frontier.slowest_time_ns)
