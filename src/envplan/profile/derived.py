"""What is derived from a measured profile: tables without noise, recomputation, split backwards.

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
from envplan.profile.options import BACKWARDS, Key, Measured, OptionTable, PartCosts
from envplan.profile.parts import ByParts, compose_options
from envplan.profile.smoothing import smoothed

#: The backward of a linear layer is two matrix products of equal size, one for its input's gradient
#: and one for its weights' (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
DEFAULT_BACKWARD_INPUT_SHARE: Final = 0.5

#: Sums must stay where single rows may lie: 9e3 J in fJ and 1e9 s in ns.
_MAX_FJ: Final = 9 * 10**18
_MAX_NS: Final = 10**18


class Adjustments(Model):
    """What was derived from a profile; nothing by default."""

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
        """A phrase for each thing that was derived."""
        share = 100 * (self.backward_input_share or 0.0)
        known = {
            "noise taken out of its rows (--raw keeps it)": self.smoothed,
            f"assumed: backward_input takes {share:g}% of backward's time and energy": share,
            "backward is the sum of backward_input and backward_weight": self.joined_backward,
            "with recomputation of the forward in the backward": self.recompute,
        }
        of_parts = [] if self.by_parts is None else [self.by_parts.in_words()]
        return [words for words, applies in known.items() if applies] + of_parts


def adjusted_tables(measured: Measured, adjustments: Adjustments) -> dict[Key, OptionTable]:
    """The option tables that adjustments make of what was measured.

    Raises:
        InputError: two operations to be added have no frequency and config in common, or a sum is
            too large for a profile; names the stage.
    """
    adjusted = smoothed(measured) if adjustments.smoothed else dict(measured)
    for stage in sorted({stage for stage, _ in measured}):
        whole, *halves = ((stage, name) for name in BACKWARDS)
        if adjustments.joined_backward and whole not in adjusted and adjusted.keys() >= {*halves}:
            adjusted[whole] = _sum(adjusted, *halves)
        if (share := adjustments.backward_input_share) is not None and whole in adjusted:
            # Both add up to it, but for times of a nanosecond, which cannot be shared.
            total = np.array([adjusted[whole].time_ns, adjusted[whole].energy_fj])
            of_inputs = np.rint(total * share).astype(np.int64)
            for key, (times, energies) in zip(halves, (of_inputs, total - of_inputs), strict=True):
                if key not in adjusted:
                    taken = {"time_ns": np.maximum(1, times), "energy_fj": energies}
                    adjusted[key] = replace(adjusted[whole], **taken)
        if adjustments.recompute:
            again = (stage, "recompute" if (stage, "recompute") in adjusted else "forward")
            for key in (whole, halves[0]):
                if key in adjusted:
                    adjusted[key] = _sum(adjusted, key, again)
    return {
        key: compose_options(*key, parts, adjustments.by_parts) for key, parts in adjusted.items()
    }


def _sum(known: Mapping[Key, PartCosts], first: Key, second: Key) -> PartCosts:
    """One operation and another, at the frequencies and configs that both have.

    Where both have the same parts, each part does both; otherwise all is one part.
    """
    one, other = known[first], known[second]
    if sorted(one.names) != sorted(other.names):
        one, other = one.whole, other.whole
    knobs = tuple(knob for knob in one.settings if knob in other.settings)
    both = f"stage {first[0]}: {first[1]} and {second[1]}"
    if not knobs:
        raise InputError(
            f"{both} have no frequency and config in common, so they cannot be added; profile "
            "them at the same clocks"
        )
    columns = [other.names.index(name) for name in one.names]
    first_rows, second_rows = ([of.settings.index(knob) for knob in knobs] for of in (one, other))
    times, energies = (
        ours[first_rows] + theirs[second_rows][:, columns]
        for ours, theirs in ((one.time_ns, other.time_ns), (one.energy_fj, other.energy_fj))
    )
    used = energies.sum(axis=1, dtype=float)
    # Two that lie within the range of a profile wrap around to below 0 where they leave it.
    if times.sum(axis=1).max() > _MAX_NS or used.max() > _MAX_FJ or energies.min() < 0:
        raise InputError(f"{both} together take more than 1e9 s or 9000 J; check the units")
    return PartCosts(
        one.names, one.follows_clock | other.follows_clock[columns], knobs, times, energies
    )
