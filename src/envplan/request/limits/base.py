"""What a limit is: a condition that a plan keeps besides its deadline; and the plain ones.

A limit is one class in this folder and one line in `__init__.py` that names it. The search asks it
by how much a replay breaks it, what makes single moves pay for breaking it, and from which time on
the relaxation leaves room for it; `envplan check` asks it for the sentence that it proves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.units import (
    fj_from_j,
    j_from_fj,
    ns_from_s_ceil,
    s_from_ns,
    uw_from_w,
    w_from_uw,
)

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.profile import Profile
    from envplan.replay import Replay
    from envplan.replay.noise import NoisyRun
    from envplan.request.limits.robustness import Robustness


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


@dataclass(frozen=True)
class StatedResults:
    """What a plan's file states of its own results, for limits to prove.

    Attributes:
        energy_j: of an iteration over all GPUs.
        average_power_w: over all GPUs.
        robustness: how sure the deadline is held; None where times are exact.
        run: the run whose costs are stated with a deadline of its own, where there is one.
    """

    energy_j: float
    average_power_w: float
    robustness: Robustness | None = None
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

    def prove(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        """The sentence that `envplan check` states of a plan that keeps it.

        Raises:
            InputError: it does not.
        """
        if self.excess(replay, setting):
            raise InputError(f"replayed, {self.broken(replay, setting)}")
        return self.kept(stated, replay, setting)

    def kept(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        """That sentence."""
        raise NotImplementedError


class MinHold(Limit):
    """Least time between two requests of a stage for another clock.

    From the last request of an iteration to the first of the next, too: iterations follow each
    other. `excess` is in ns that clocks are held too short, all added up.
    """

    kind: Literal["min-hold"] = "min-hold"
    time_s: Annotated[float, Field(gt=0, le=3600)]

    @property
    def hold_ns(self) -> int:
        """ns."""
        return ns_from_s_ceil(self.time_s)

    def prices(self, num_gpus: int) -> dict[str, int]:
        return {"hold_ns": self.hold_ns}

    def excess(self, replay: Replay, setting: Setting) -> int:
        return sum(self.hold_ns - held for *_, held in replay.short_holds(self.hold_ns))

    def broken(self, replay: Replay, setting: Setting) -> str:
        stage, at, held = next(replay.short_holds(self.hold_ns))
        return (
            f"stage {stage} asks for a clock at {s_from_ns(at)!r} s and for another one "
            f"{s_from_ns(held)!r} s later, within the least time of {self.time_s!r} s"
        )

    def kept(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        return f"no stage asks for another clock within {self.time_s!r} s"


class EnergyBudget(Limit):
    """The most energy that an iteration uses over all GPUs; `excess` is in fJ of all GPUs."""

    kind: Literal["energy-budget"] = "energy-budget"
    energy_j: Annotated[float, Field(ge=0, le=1e15)]

    def excess(self, replay: Replay, setting: Setting) -> int:
        return max(0, replay.energy_fj * setting.num_gpus - fj_from_j(self.energy_j))

    def earliest_ns(self, frontier: Relaxation) -> int:
        budget_fj = fj_from_j(self.energy_j) // frontier.num_gpus
        # Beyond T_star energy rises again.
        return frontier.earliest_ns(lambda _, fj: fj <= budget_fj, frontier.min_energy_time_ns)

    def broken(self, replay: Replay, setting: Setting) -> str:
        used = j_from_fj(replay.energy_fj * setting.num_gpus)
        at_s = s_from_ns(replay.makespan_ns)
        return f"{used:.10g} J at {at_s:.9f} s are not within the budget of {self.energy_j:.10g} J"

    def kept(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        return f"energy_j {stated.energy_j!r} <= {self.energy_j!r}"


class PowerCap(Limit):
    """A limit on the power of all GPUs together, at every moment or on average."""

    power_w: Annotated[float, Field(ge=0, le=1e12)]

    def earliest_ns(self, frontier: Relaxation) -> int:
        # What keeps to a cap at every moment does so on average; that falls up to T_max.
        cap_uw = uw_from_w(self.power_w) // frontier.num_gpus
        return frontier.earliest_ns(lambda at, fj: fj <= cap_uw * at, frontier.slowest_time_ns)


class PeakPower(PowerCap):
    """The most that all GPUs draw together at any moment of the replay; `excess` is in uW of one
    GPU a stage together."""

    kind: Literal["peak-power"] = "peak-power"

    def cap_uw(self, num_gpus: int) -> int:
        """The cap on one GPU a stage together, uW."""
        return uw_from_w(self.power_w) // num_gpus

    def prices(self, num_gpus: int) -> dict[str, int]:
        return {"peak_uw": self.cap_uw(num_gpus)}

    def excess(self, replay: Replay, setting: Setting) -> int:
        return max(0, replay.peak_uw - self.cap_uw(setting.num_gpus))

    def broken(self, replay: Replay, setting: Setting) -> str:
        return (
            f"the GPUs draw {w_from_uw(replay.peak_uw * setting.num_gpus)!r} W at the peak, more "
            f"than the {self.power_w!r} W allowed"
        )

    def kept(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        peak_w = w_from_uw(replay.peak_uw * setting.num_gpus)
        return f"{peak_w!r} W at the peak of the replay <= {self.power_w!r} W"


class AveragePower(PowerCap):
    """The most that all GPUs draw together on average over an iteration; `excess` is in fJ above
    what the cap allows in the time of the iteration, all GPUs."""

    kind: Literal["average-power"] = "average-power"

    def excess(self, replay: Replay, setting: Setting) -> int:
        allowed_fj = uw_from_w(self.power_w) * replay.makespan_ns
        return max(0, replay.energy_fj * setting.num_gpus - allowed_fj)

    def broken(self, replay: Replay, setting: Setting) -> str:
        watts = replay.energy_fj * setting.num_gpus / (replay.makespan_ns * 10**6)
        return f"{watts:.10g} W on average is above {self.power_w:.10g} W"

    def prove(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        # What is stated in floats may be off by what they round.
        if self.excess(replay, setting) > fj_from_j(stated.energy_j) // 10**9:
            raise InputError(f"predicted.average_power_w: {self.broken(replay, setting)}")
        return f"average_power_w {stated.average_power_w!r} <= {self.power_w!r}"
