"""How far the savings of a plan may be off by the error of the model behind its profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass
class _Deviation:
    """What one standard deviation of a factor does to energies: of the plan and its baseline, J."""

    plan_j: float = 0.0
    baseline_j: float = 0.0


def savings_by_model_error(plan: Plan, profile: Profile) -> SavingsRange | None:
    """The range of a plan's savings; None where the profile's error is not known.

    Energies of an instruction are off by a factor that is the same at all clocks and stages, and by
    one for each clock, the same on all stages. All factors are independent. The first one nearly
    cancels; the savings S = 1 - E / E_0 change by

        dS = (sum over factors of error x (share of E_0 (1 - S) - share of E)) / E_0

    where E is the plan's energy and E_0 that of the baseline at the highest clock.
    """
    between_clocks = profile.metadata.model_error_between_clocks
    baseline_j = plan.predicted.baseline.energy_j
    if between_clocks is None or baseline_j <= 0:
        return None
    share_left = plan.energy / baseline_j  # 1 - S
    variance = 0.0
    for deviation in _deviations(plan, profile, between_clocks):
        change_j = deviation.baseline_j * share_left - deviation.plan_j
        variance += (change_j / baseline_j) ** 2
    percent = plan.predicted.savings_percent
    spread_percent = 100 * math.sqrt(variance)
    return SavingsRange(
        low_percent=percent - spread_percent,
        high_percent=percent + spread_percent,
    )


def _deviations(plan: Plan, profile: Profile, between_clocks: float) -> Iterable[_Deviation]:
    """What each factor does."""
    profile_stages = _profile_stages(plan)
    deviations: defaultdict[_Factor, _Deviation] = defaultdict(_Deviation)

    def deviations_at(option: OptionKey) -> Iterator[tuple[_Deviation, float]]:
        """Those of the two factors of an option, and by what fraction each changes its energy."""
        whole = profile.energy_spreads.get(option, 0.0)
        common = math.sqrt(max(0.0, whole**2 - between_clocks**2))
        yield deviations[_Factor(option.instruction, None)], common
        yield deviations[_Factor(option.instruction, option.frequency_mhz)], between_clocks

    num_gpus = plan.job.num_gpus
    for stage, operations in enumerate(plan.stages):
        for planned in operations:
            operation = _OperationKey(
                stage=stage,
                instruction=planned.instruction,
                microbatch=planned.microbatch,
                chunk=planned.chunk,
            )
            profile_stage = profile_stages[operation]
            at_plan = OptionKey(profile_stage, planned.instruction, planned.frequency_mhz, "")
            for deviation, error in deviations_at(at_plan):
                deviation.plan_j += error * num_gpus * planned.energy_j

            fastest = profile.table(profile_stage, planned.instruction).options()[0]
            fastest_j = j_from_10fj(fastest.energy_10fj)
            at_highest = OptionKey(profile_stage, planned.instruction, fastest.frequency_mhz, "")
            for deviation, error in deviations_at(at_highest):
                deviation.baseline_j += error * num_gpus * fastest_j
    return deviations.values()


class _OperationKey(NamedTuple):
    """An operation of a plan."""

    stage: int
    instruction: str
    microbatch: int
    chunk: int


def _profile_stages(plan: Plan) -> dict[_OperationKey, int]:
    """The stage of the profile that each operation's costs are of."""
    stages = {}
    for operation in plan.job.pipeline().operations:
        key = _OperationKey(
            stage=operation.stage,
            instruction=operation.instruction,
            microbatch=operation.microbatch,
            chunk=operation.chunk,
        )
        stages[key] = operation.profile_stage
    return stages
