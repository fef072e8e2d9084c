"""How far the savings of a plan may be off by the error of the model behind its profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from envplan.plan.model import Plan
from envplan.profile import Profile
from envplan.profile.reading import OptionKey
from envplan.units import j_from_10fj

__all__ = ["SavingsRange", "savings_by_model_error"]


class SavingsRange(NamedTuple):
    """Savings a standard deviation below and above those stated, percent."""

    low_percent: float
    high_percent: float


class _Factor(NamedTuple):
    """A factor by which energies of an instruction are off together.

    Attributes:
        instruction: on all stages.
        frequency_mhz: at this clock; None: at all clocks.
    """

    instruction: str
    frequency_mhz: int | None


class _Deviation(NamedTuple):
    """What one standard deviation of a factor does to energies: of the plan and its baseline, J."""

    plan_j: float = 0.0
    baseline_j: float = 0.0

    def with_more(self, error: float, plan_j: float, baseline_j: float) -> _Deviation:
        """With the energies of further operations, which it changes by that fraction."""
        return _Deviation(self.plan_j + error * plan_j, self.baseline_j + error * baseline_j)


def savings_by_model_error(plan: Plan, profile: Profile) -> SavingsRange | None:
    """The range of a plan's savings; None where the profile's error is not known.

    Energies of an instruction are off by a factor that is the same at all clocks and stages, and by
    one for each clock, the same on all stages. All factors are independent. The first one nearly
    cancels; the savings S = 1 - E / E_0 change by

        dS = (sum over factors of error x (share of E_0 (1 - S) - share of E)) / E_0

    where E is the plan's energy and E_0 that of the baseline at the highest clock.
    """
    between_clocks = profile.metadata.model_error_between_clocks
    if between_clocks is None or plan.predicted.baseline.energy_j <= 0:
        return None
    energy_j, baseline_j = plan.energy, plan.predicted.baseline.energy_j
    variance = 0.0
    for deviation in _deviations(plan, profile, between_clocks):
        change_j = deviation.baseline_j * energy_j / baseline_j - deviation.plan_j
        variance += (change_j / baseline_j) ** 2
    percent, spread = plan.predicted.savings_percent, 100 * math.sqrt(variance)
    return SavingsRange(percent - spread, percent + spread)


def _deviations(plan: Plan, profile: Profile, between_clocks: float) -> Iterable[_Deviation]:
    """What each factor does."""
    profile_stages = {
        (op.stage, op.instruction, op.microbatch, op.chunk): op.profile_stage
        for op in plan.job.pipeline().operations
    }
    deviations: defaultdict[_Factor, _Deviation] = defaultdict(_Deviation)

    def add(stage: int, instruction: str, mhz: int, plan_j: float, baseline_j: float) -> None:
        whole = profile.energy_spreads.get(OptionKey(stage, instruction, mhz, ""), 0.0)
        common = math.sqrt(max(0.0, whole**2 - between_clocks**2))
        of_all, of_clock = _Factor(instruction, None), _Factor(instruction, mhz)
        deviations[of_all] = deviations[of_all].with_more(common, plan_j, baseline_j)
        deviations[of_clock] = deviations[of_clock].with_more(between_clocks, plan_j, baseline_j)

    num_gpus = plan.job.num_gpus
    for stage, operations in enumerate(plan.stages):
        for planned in operations:
            instruction, microbatch = planned.instruction, planned.microbatch
            profile_stage = profile_stages[stage, instruction, microbatch, planned.chunk]
            fastest = profile.table(profile_stage, instruction).options()[0]
            fastest_j = j_from_10fj(fastest.energy_10fj)
            add(profile_stage, instruction, planned.frequency_mhz, num_gpus * planned.energy_j, 0.0)
            add(profile_stage, instruction, fastest.frequency_mhz, 0.0, num_gpus * fastest_j)
    return deviations.values()
