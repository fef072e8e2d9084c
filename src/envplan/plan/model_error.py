"""How far the savings of a plan may be off by the error of the model behind its profile."""

from __future__ import annotations

import math
from collections import defaultdict
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
        error: its standard deviation.
    """

    instruction: str
    frequency_mhz: int | None
    error: float


class _Share(NamedTuple):
    """Energy of the rows that are off together: of the plan and of its baseline, J."""

    plan_j: float = 0.0
    baseline_j: float = 0.0

    def with_more(self, more: _Share) -> _Share:
        """Both together."""
        return _Share(self.plan_j + more.plan_j, self.baseline_j + more.baseline_j)


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
    by_factor = _shares_by_factor(plan, profile, between_clocks)
    energy_j, baseline_j = plan.energy, plan.predicted.baseline.energy_j
    variance = 0.0
    for factor, share in by_factor.items():
        change_j = share.baseline_j * energy_j / baseline_j - share.plan_j
        variance += (factor.error * change_j / baseline_j) ** 2
    percent, deviation = plan.predicted.savings_percent, 100 * math.sqrt(variance)
    return SavingsRange(percent - deviation, percent + deviation)


def _shares_by_factor(plan: Plan, profile: Profile, between_clocks: float) -> dict[_Factor, _Share]:
    """The energies that each factor changes."""
    profile_stages = {
        (op.stage, op.instruction, op.microbatch, op.chunk): op.profile_stage
        for op in plan.job.pipeline().operations
    }
    shares: defaultdict[_Factor, _Share] = defaultdict(_Share)
    for stage, operations in enumerate(plan.stages):
        for planned in operations:
            instruction, microbatch = planned.instruction, planned.microbatch
            profile_stage = profile_stages[stage, instruction, microbatch, planned.chunk]
            fastest = profile.table(profile_stage, instruction).options()[0]
            plan_share = _Share(plan_j=planned.energy_j * plan.job.num_gpus)
            baseline_share = _Share(baseline_j=j_from_10fj(fastest.energy_10fj) * plan.job.num_gpus)
            for mhz, share in (
                (planned.frequency_mhz, plan_share),
                (fastest.frequency_mhz, baseline_share),
            ):
                whole = profile.energy_spreads.get(OptionKey(profile_stage, instruction, mhz, ""))
                common = math.sqrt(max(0.0, (whole or 0.0) ** 2 - between_clocks**2))
                # Errors of an instruction differ little between stages and clocks.
                for factor in (
                    _Factor(instruction, None, round(common, 2)),
                    _Factor(instruction, mhz, between_clocks),
                ):
                    shares[factor] = shares[factor].with_more(share)
    return dict(shares)
