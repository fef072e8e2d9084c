"""Operations that consist of parts, such as a forward of attention and matrix products.

Parts only make options. Each part has rows of its own; the options of the operation are those that
its parts make together, each with a time, an energy and a config that says which part runs at which
clock (see options.py). What comes after this module knows no parts. The composition itself is in
csrc/parts.hpp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated, Final, NamedTuple, Self

import numpy as np
from pydantic import Field

from envplan import _kernel
from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.profile.options import (
    IntArray,
    Knob,
    OptionTable,
    PartCosts,
    PowerSegments,
    knob_in_words,
)
from envplan.units import MAX_INTEGER, ns_from_s, uw_from_w

#: How much more energy an option left out may save where nobody says, as a fraction.
WITHIN: Final = 2e-3

_MOST_CHOICES: Final = 10_000_000


class PartRun(NamedTuple):
    """What a part does at one clock, MHz, in so many ns and fJ."""

    part: str
    frequency_mhz: int
    time_ns: int
    energy_fj: int


class ByParts(Model):
    """How operations are made of their parts."""

    within: Annotated[float, Field(ge=0, le=1)] = Field(
        WITHIN,
        description="an option may be left out where another is no slower and uses, above what "
        "waiting as long would, at most this fraction of the operation's least energy more; 0 "
        "leaves nothing out",
    )
    blocking_power_w: Annotated[float, Field(ge=0, le=1e5)] | None = Field(
        None, description="W of a GPU that waits; absent: the most that the profile says, else 70"
    )
    switch_latency_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0,
        description="from a request until the clock changes: clocks of parts are asked for so much "
        "ahead, and no sooner after each other",
    )
    min_hold_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0, description="least time between two requests for parts of an operation"
    )

    @classmethod
    def from_options(cls, within_percent: float | None, blocking_power_w: float | None) -> Self:
        """As commands ask for it; None: the usual, and the power that the profile says.

        Raises:
            InputError: a number is out of range.
        """
        within = WITHIN if within_percent is None else within_percent / 100
        return cls.of(within=within, blocking_power_w=blocking_power_w)

    def in_words(self) -> str:
        """Such as "clocks by part, options within 0.05% of energy, switch latency 0.005 s"."""
        words = ["clocks by part"]
        words += [f"options within {100 * self.within:g}% of energy"] if self.within else []
        words += [f"switch latency {self.switch_latency_s:g} s"] if self.switch_latency_s else []
        words += [f"clocks held {self.min_hold_s:g} s"] if self.min_hold_s else []
        return ", ".join(words)


def scaled(
    parts: PartCosts,
    whole: Mapping[Knob, tuple[int, int]],
    noise: Mapping[Knob, tuple[float, float]],
    where: str,
) -> PartCosts:
    """Parts that add up to what was measured of their operation, each keeping its share.

    Args:
        whole: ns and fJ of the operation itself, by clock and config.
        noise: likewise, how much less the parts may take and use, fractions.
        where: what to call the operation in errors.

    Raises:
        InputError: clocks differ, or the parts add up to less by more than the noise.
    """
    rows = {knob: k for k, knob in enumerate(parts.settings)}
    if not parts.follows_clock.any():
        rows = dict.fromkeys(whole, 0)
    if lacking := sorted(whole.keys() ^ rows.keys(), reverse=True):
        who, other = "the operation itself", "its parts"
        if lacking[0] in whole:
            who, other = other, who
        raise InputError(
            f"{where}: at {knob_in_words(*lacking[0])} there are rows for {other} and none for "
            f"{who}"
        )
    knobs = tuple(sorted(rows))
    columns = []
    for k, (what, unit, sign) in enumerate((("take", 1e9, "s"), ("use", 1e15, "J"))):
        # Products outgrow 64 bits.
        own = (parts.time_ns, parts.energy_fj)[k][[rows[knob] for knob in knobs]].astype(object)
        sums, measured = own.sum(axis=1), np.array([whole[knob][k] for knob in knobs], object)
        for knob, total, given in [*zip(knobs, sums / unit, measured / unit, strict=True)][::-1]:
            if total < given * (1 - noise[knob][k]):
                raise InputError(
                    f"{where} at {knob_in_words(*knob)}: its parts {what} {total:.6g} {sign} "
                    f"together, {given - total:.6g} {sign} ({100 * (1 - total / given):.1f}%) less "
                    "than was measured of it; some part is missing, or leave out the rows of the "
                    "operation itself"
                )
        ends = measured[:, None] * own.cumsum(axis=1) // np.maximum(1, sums)[:, None]
        columns.append(np.diff(ends, axis=1, prepend=0).astype(np.int64))
    asks = np.full(len(parts.names), any(mhz for mhz, _ in knobs))
    return PartCosts(parts.names, asks, knobs, np.maximum(1, columns[0]), columns[1])


def compose_options(
    stage: int, instruction: str, parts: PartCosts, how: ByParts | None
) -> OptionTable:
    """An operation's options: all parts at one clock, and where it has some, clocks by part.

    Args:
        how: None: only those of one clock.

    Raises:
        InputError: there are more options than can be kept; asks for a larger `within`.
    """
    count, each = parts.time_ns.shape
    knob: IntArray = np.repeat(np.arange(count), each).reshape(count, each)
    if how is None or parts.follows_clock.sum() < 2:
        return OptionTable.of(stage, instruction, parts, knob)
    where, waiting_uw = f"stage {stage} {instruction}", uw_from_w(how.blocking_power_w or 0.0)
    most_fj = float(parts.energy_fj.max(axis=0).sum(dtype=float))
    if max(most_fj, waiting_uw * int(parts.time_ns.max(axis=0).sum())) > MAX_INTEGER:
        raise InputError(
            f"{where}: its parts, or waiting as long as they take, cost too much for exact 64-bit "
            "arithmetic; check that times are in seconds and energies in joules"
        )
    ends = np.flatnonzero(np.diff(parts.mhz, append=-1)) + 1
    first = count * np.arange(each)
    latency_ns = ns_from_s(how.switch_latency_s)
    try:
        found = _kernel.compose(
            (first[:, None] + ends).astype(np.int32),
            parts.time_ns.T.ravel(),
            parts.energy_fj.T.ravel(),
            parts.follows_clock.astype(np.uint8),
            latency_ns,
            ns_from_s(how.min_hold_s),
            waiting_uw,
            int(how.within * int(parts.energy_fj.min(axis=0).sum())),
            _MOST_CHOICES,
        )
    except OverflowError as error:
        raise InputError(
            f"{where}: {error}; allow more than {100 * how.within:g}% of energy with "
            "--parts-within, or profile at fewer clocks"
        ) from None
    more = found - first
    asking = more[:, parts.follows_clock]
    more = more[(asking != asking[:, :1]).any(axis=1)]
    return OptionTable.of(stage, instruction, parts, np.concatenate([knob, more]), latency_ns)


def part_runs(table: OptionTable, option: int, latency_ns: int) -> list[PartRun]:
    """What each part of an operation does under clocks by part, at one clock each, in order.

    As csrc/replay.hpp has it: a request counts so long after it was made, and what is then left of
    a part is carried over in proportion.

    Args:
        option: one with clocks by part.
        latency_ns: from a request until the clock changes, ns.
    """
    parts, changes = table.parts, table.clock_requests(option)
    rows = {knob: k for k, knob in enumerate(parts.settings)}
    mhz = asked = changes[0].frequency_mhz
    config = changes[0].config
    coming: deque[tuple[int, int]] = deque()
    found: list[PartRun] = []
    now = 0
    for p, (name, planned) in enumerate(zip(parts.names, table.knob[option].tolist(), strict=True)):
        for change in changes:
            if change.part == name:
                config = change.config
                if change.frequency_mhz != asked:
                    asked = change.frequency_mhz
                    coming.append((now + change.delay_ns + latency_ns, asked))
        left = whole = 1
        while left:
            while coming and coming[0][0] <= now:
                mhz = coming.popleft()[1]
            row = rows.get((mhz, config), planned)
            time, energy = int(parts.time_ns[row, p]), int(parts.energy_fj[row, p])
            left, whole = -(-left * time // whole), time
            spent = min(left, coming[0][0] - now) if coming else left
            used = (2 * energy * spent + time) // (2 * time)
            found.append(PartRun(name, mhz, spent, used))
            now, left = now + spent, left - spent
    return found


def retimed(table: OptionTable, configs: Container[str], latency_ns: int) -> OptionTable:
    """Options with clocks by part as they are where clocks come at another latency.

    Args:
        configs: which of them to keep; those of one clock all stay.
    """
    kept = []
    for k, changes in enumerate(table.changes_clock.tolist()):
        draws = table.segments.of_option(k)
        if changes:
            if table.config[k] not in configs:
                continue
            draws = [piece[2:] for piece in part_runs(table, k, latency_ns)]
        total = [sum(each) for each in zip(*draws, strict=True)]
        kept.append((*total, -int(table.frequency_mhz[k]), k, draws))
    *_, rows, slices = map(list, zip(*sorted(kept), strict=True))
    begin = np.cumsum([0, *map(len, slices)])
    drawn = np.array(list(chain(*slices)), np.int64).T
    return replace(table, knob=table.knob[rows], segments=PowerSegments(begin, *drawn))
