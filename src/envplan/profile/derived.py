"""Tables derived from a measured profile: without noise, with recomputation, with split backwards.

Planning never changes a profile's file. What it needs beyond the file is derived here, said in the
output, recorded in plan.json, and derived again by whoever checks the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.profile.composition import ByParts, compose_options
from envplan.profile.instructions import BACKWARD_HALVES
from envplan.profile.options import OptionTable
from envplan.profile.part_costs import CostsByOperation, OperationKey, PartCosts
from envplan.profile.smoothing import without_noise
from envplan.units import ENERGY_UNITS_PER_J, MAX_OPERATION_J

#: The backward of a linear layer is two matrix products of equal size, one for its input's gradient
#: and one for its weights' (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
DEFAULT_BACKWARD_INPUT_SHARE: Final = 0.5

#: Sums must stay where single rows may lie.
_MAX_10FJ: Final = MAX_OPERATION_J * ENERGY_UNITS_PER_J
_MAX_NS: Final = 10**18


class Adjustments(Model):
    """Adjustments that were made to a profile; none by default."""

    recompute: bool = Field(
        False,
        description="activations are recomputed: time and energy of a stage's forward (or of its "
        "recompute rows, where it has some) were added to its backward, to backward_input where "
        "that is split",
    )
    backward_input_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="backward was split, this share of its time and energy into backward_input "
        "and the rest into backward_weight",
    )
    joined_backward: bool = Field(
        False, description="backward is the sum of backward_input and backward_weight"
    )
    smoothed: bool = Field(False, description="the noise was taken out of the measured rows")
    by_parts: ByParts | None = Field(
        None,
        description="operations that the file splits into parts run these at clocks of their own; "
        "absent: every operation has one clock",
    )

    def __bool__(self) -> bool:
        """Whether anything was derived."""
        return self != Adjustments()

    @property
    def makes_operations(self) -> bool:
        """Whether rows were made of rows of other operations."""
        return bool(self.model_copy(update={"smoothed": False}))

    def in_words(self) -> list[str]:
        """A phrase for each adjustment."""
        phrases = []
        if self.smoothed:
            phrases.append("noise taken out of its rows (--raw keeps it)")
        if self.backward_input_share is not None:
            share = 100 * self.backward_input_share
            phrases.append(
                f"assumed: backward_input takes {share:g}% of backward's time and energy"
            )
        if self.joined_backward:
            phrases.append("backward is the sum of backward_input and backward_weight")
        if self.recompute:
            phrases.append("with recomputation of the forward in the backward")
        if self.by_parts is not None:
            phrases.append(self.by_parts.in_words())
        return phrases


def adjusted_tables(
    measured_costs: CostsByOperation, adjustments: Adjustments
) -> dict[OperationKey, OptionTable]:
    """The option tables that adjustments make of what was measured.

    Raises:
        InputError: two operations to be added have no frequency and config in common, or a sum is
            too large for a profile; names the stage.
    """
    costs = dict(measured_costs)
    if adjustments.smoothed:
        costs = without_noise(measured_costs)
    for stage in sorted({stage for stage, _ in measured_costs}):
        _adjust_stage(costs, stage, adjustments)
    return {
        operation: compose_options(*operation, parts, adjustments.by_parts)
        for operation, parts in costs.items()
    }


def _adjust_stage(
    costs: dict[OperationKey, PartCosts], stage: int, adjustments: Adjustments
) -> None:
    """Add to the costs what adjustments make of those of one stage."""
    forward, backward = OperationKey(stage, "forward"), OperationKey(stage, "backward")
    halves = [OperationKey(stage, name) for name in BACKWARD_HALVES]
    if adjustments.joined_backward and backward not in costs and costs.keys() >= {*halves}:
        costs[backward] = _sum(costs, halves[0], halves[1])
    if adjustments.backward_input_share is not None and backward in costs:
        split = _split(costs[backward], adjustments.backward_input_share)
        for half, half_costs in zip(halves, split, strict=True):
            costs.setdefault(half, half_costs)
    if adjustments.recompute:
        recomputation = OperationKey(stage, "recompute")
        if recomputation not in costs:
            recomputation = forward
        for operation in (backward, halves[0]):
            if operation in costs:
                costs[operation] = _sum(costs, operation, recomputation)


def _split(backward: PartCosts, input_share: float) -> tuple[PartCosts, PartCosts]:
    """The halves of a backward.

    Both add up to it, but for times of a nanosecond, which cannot be shared.

    Args:
        backward: the whole.
        input_share: the part of its time and energy that the gradient of the input takes.
    """
    input_ns = np.rint(backward.time_ns * input_share).astype(np.int64)
    input_10fj = np.rint(backward.energy_10fj * input_share).astype(np.int64)
    return (
        replace(backward, time_ns=np.maximum(1, input_ns), energy_10fj=input_10fj),
        replace(
            backward,
            time_ns=np.maximum(1, backward.time_ns - input_ns),
            energy_10fj=backward.energy_10fj - input_10fj,
        ),
    )


def _sum(
    costs: Mapping[OperationKey, PartCosts], operation: OperationKey, added: OperationKey
) -> PartCosts:
    """The sum of two operations of a stage, at the settings that both have.

    Where both have the same parts, each part does both; otherwise all is one part.

    Raises:
        InputError: they have no setting in common, or the sum is too large for a profile.
    """
    both = f"stage {operation.stage}: {operation.instruction} and {added.instruction}"
    left, right = costs[operation], costs[added]
    if sorted(left.names) != sorted(right.names):
        left, right = left.whole, right.whole
    settings = tuple(setting for setting in left.settings if setting in right.settings)
    if not settings:
        raise InputError(
            f"{both} have no frequency and config in common, so they cannot be added; profile "
            "them at the same clocks"
        )
    parts = [right.names.index(name) for name in left.names]
    left_rows = [left.settings.index(setting) for setting in settings]
    right_rows = [right.settings.index(setting) for setting in settings]
    times_ns = left.time_ns[left_rows] + right.time_ns[right_rows][:, parts]
    energies_10fj = left.energy_10fj[left_rows] + right.energy_10fj[right_rows][:, parts]
    is_too_long = times_ns.sum(axis=1).max() > _MAX_NS
    highest_10fj = energies_10fj.sum(axis=1, dtype=float).max()
    # Two that lie within the range of a profile wrap around to below 0 where they leave it.
    if is_too_long or highest_10fj > _MAX_10FJ or energies_10fj.min() < 0:
        raise InputError(
            f"{both} together take more than 1e9 s or {MAX_OPERATION_J} J; check the units"
        )
    follows_clock = left.follows_clock | right.follows_clock[parts]
    return PartCosts(left.names, follows_clock, settings, times_ns, energies_10fj)
