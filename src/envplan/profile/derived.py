"""What is derived from a measured profile: tables without noise, recomputation, split backwards.

Planning never changes a profile's file. What it needs beyond the file is derived here, said in the
output, recorded in plan.json, and derived again by whoever checks the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from envplan._model import Model
from envplan.errors import InputError
from envplan.profile.options import OptionTable, Part, option_table
from envplan.profile.parts import ByParts, by_parts, one_clock
from envplan.profile.smoothing import smoothed_tables

#: The backward of a linear layer is two matrix products of equal size, one for its input's gradient
#: and one for its weights' (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
DEFAULT_BACKWARD_INPUT_SHARE: Final = 0.5

Tables = Mapping[tuple[int, str], OptionTable]
_Tables = dict[tuple[int, str], OptionTable]
_Parts = dict[tuple[int, str], tuple[Part, ...]]

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
        description="operations that the file splits into parts, unless they recompute, run these "
        "at clocks of their own; absent: every operation has one clock",
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


def adjusted_tables(
    tables: Tables, adjustments: Adjustments, parts: Mapping[tuple[int, str], tuple[Part, ...]]
) -> dict[tuple[int, str], OptionTable]:
    """The option tables that adjustments make of those of a profile.

    Args:
        tables: by (stage, instruction); they stay as they are.
        parts: of those that have some.

    Raises:
        InputError: two tables to be added have no frequency and config in common, or a sum is
            too large for a profile; names the stage.
    """
    adjusted = smoothed_tables(tables) if adjustments.smoothed else dict(tables)
    parts = dict(parts)
    for stage in sorted({stage for stage, _ in tables}):
        if adjustments.joined_backward:
            _join_backward(adjusted, parts, stage)
        if adjustments.backward_input_share is not None:
            _split_backward(adjusted, parts, stage, adjustments.backward_input_share)
        if adjustments.recompute:
            _add_recomputation(adjusted, parts, stage)
    for key, some in parts.items():
        adjusted[key] = by_parts(adjusted[key], some, adjustments.by_parts)
    return adjusted


def _join_backward(tables: _Tables, parts: _Parts, stage: int) -> None:
    key = stage, "backward"
    one, other = (stage, "backward_input"), (stage, "backward_weight")
    if key in tables or one not in tables or other not in tables:
        return
    tables[key] = _sum(tables[one], tables[other], "backward")
    # A whole backward goes through the modules once, both halves in each.
    halves = parts.get(one, ()), parts.get(other, ())
    names = [[(p.name, p.table.frequency_mhz.any()) for p in half] for half in halves]
    if halves[0] and names[0] == names[1]:
        parts[key] = tuple(
            Part(a.name, _sum(a.table, b.table, "backward")) for a, b in zip(*halves, strict=True)
        )
        tables[key] = one_clock(*key, parts[key])


def _split_backward(tables: _Tables, parts: _Parts, stage: int, input_share: float) -> None:
    whole = tables.get((stage, "backward"))
    if whole is None:
        return

    def half(table: OptionTable, instruction: str) -> OptionTable:
        """Halves add up to the whole, but for times of a nanosecond, which cannot be shared."""

        def share(total: int) -> int:
            of_input = round(total * input_share)
            return of_input if instruction == "backward_input" else total - of_input

        rows = [
            (max(1, share(time)), share(energy), -mhz, config)
            for mhz, config, time, energy in table.rows()
        ]
        return option_table(stage, instruction, rows)

    for instruction in ("backward_input", "backward_weight"):
        key = stage, instruction
        if key not in tables:
            tables[key] = half(whole, instruction)
            if some := parts.get((stage, "backward")):
                parts[key] = tuple(Part(p.name, half(p.table, instruction)) for p in some)
                tables[key] = one_clock(*key, parts[key])


def _add_recomputation(tables: _Tables, parts: _Parts, stage: int) -> None:
    extra = tables.get((stage, "recompute")) or tables[stage, "forward"]
    for instruction in ("backward", "backward_input"):
        backward = tables.get((stage, instruction))
        if backward is not None:
            tables[stage, instruction] = _sum(backward, extra, instruction)
            # Nothing says between which parts what is recomputed.
            parts.pop((stage, instruction), None)


def _sum(one: OptionTable, other: OptionTable, instruction: str) -> OptionTable:
    """Both tables one after the other, at the frequencies and configs that both have."""
    second = other.by_knob()
    rows = [
        (time + second[mhz, config][0], energy + second[mhz, config][1], -mhz, config)
        for mhz, config, time, energy in one.rows()
        if (mhz, config) in second
    ]
    both = f"stage {one.stage}: {one.instruction} and {other.instruction}"
    if not rows:
        raise InputError(
            f"{both} have no frequency and config in common, so {instruction} cannot be made of "
            "both; profile them at the same clocks"
        )
    if max(row[0] for row in rows) > _MAX_NS or max(row[1] for row in rows) > _MAX_FJ:
        raise InputError(f"{both} together take more than 1e9 s or 9000 J; check the units")
    return option_table(one.stage, instruction, rows)
