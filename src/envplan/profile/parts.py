"""Operations that consist of parts, such as a forward of attention and matrix products.

Parts only make options. Each part has rows of its own; the options of the operation are those that
its parts make together, each with a time, an energy and a label that says which part runs at which
clock, as any other config does:

    @attention=1410 @mlp=990

means: ask for 1410 MHz as `attention` starts and for 990 MHz as `mlp` starts. What comes after this
module knows no parts. The composition itself is in csrc/parts.hpp.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import numpy as np
from pydantic import Field

from envplan import _kernel
from envplan._model import Model
from envplan.errors import InputError
from envplan.profile.options import OptionTable, Part, option_table
from envplan.units import MAX_INTEGER, ns_from_s, uw_from_w

__all__ = [
    "WITHIN",
    "ByParts",
    "Change",
    "Knob",
    "Piece",
    "by_parts",
    "changes_of",
    "one_clock",
    "pieces",
    "retimed",
]

#: How much more energy an option left out may save where nobody says, as a fraction.
WITHIN: Final = 5e-3

_MOST_CHOICES: Final = 10_000_000
_MOST_FJ: Final = MAX_INTEGER
#: What is a name of a part.
NAME: Final = re.compile(r"[^\s@=/,\"]+")
_TOKEN: Final = re.compile(rf"@({NAME.pattern})=(\d+)(?:/(.*))?")

Knob = tuple[int, str]  # MHz, config


class Piece(NamedTuple):
    """What a part does at one clock, MHz, in so many ns and fJ."""

    part: str
    frequency_mhz: int
    time_ns: int
    energy_fj: int


class Change(NamedTuple):
    """From which part on which clock is asked for, and its config."""

    part: str
    frequency_mhz: int
    config: str


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
        description="from a request until the clock changes; shorter parts ask for nothing",
    )
    min_hold_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0, description="least time between two requests within an operation"
    )

    def in_words(self) -> str:
        """Such as "clocks by part, options within 0.05% of energy, switch latency 0.005 s"."""
        words = ["clocks by part"]
        words += [f"options within {100 * self.within:g}% of energy"] if self.within else []
        words += [f"switch latency {self.switch_latency_s:g} s"] if self.switch_latency_s else []
        words += [f"clocks held {self.min_hold_s:g} s"] if self.min_hold_s else []
        return ", ".join(words)


@lru_cache(maxsize=65536)
def changes_of(config: str) -> tuple[Change, ...]:
    """The clocks within an operation that a config stands for; none where it is a plain label.

    Raises:
        InputError: it begins as such, but does not go on so.
    """
    if not config.startswith("@"):
        return ()
    found = [_TOKEN.fullmatch(token) for token in config.split(" ")]
    if not all(found):
        raise InputError(f"{config!r} does not say clocks by part, as in @attention=1410 @mlp=990")
    return tuple(Change(one[1], int(one[2]), one[3] or "") for one in found if one)


def label(changes: Sequence[Change]) -> str:
    """The config that stands for clocks by part."""
    return " ".join(
        f"@{part}={mhz}" + (f"/{config}" if config else "") for part, mhz, config in changes
    )


def one_clock(stage: int, instruction: str, parts: Sequence[Part]) -> OptionTable:
    """The operation with all its parts at one clock and config; parts at 0 MHz take any.

    Raises:
        InputError: a part has no row at a clock that another one has, or all together use more
            than 4600 J.
    """
    knobs = {part.name: {(m, c): (t, e) for m, c, t, e in part.table.rows()} for part in parts}
    clocked = {name: rows for name, rows in knobs.items() if any(mhz for mhz, _ in rows)}
    everywhere = dict.fromkeys(knob for rows in clocked.values() for knob in rows)
    for name, rows in clocked.items():
        for mhz, config in everywhere:
            if (mhz, config) not in rows:
                other = next(n for n, r in clocked.items() if (mhz, config) in r)
                raise InputError(
                    f"stage {stage} {instruction}: part {name} has no row at {_at(mhz, config)}, "
                    f"which part {other} has; every part needs the same clocks, or one row at 0 MHz"
                )
    constant = [min(rows.values()) for name, rows in knobs.items() if name not in clocked]
    options = []
    for mhz, config in everywhere or [(0, "")]:
        each = [*constant, *(rows[mhz, config] for rows in clocked.values())]
        options.append((sum(t for t, _ in each), sum(e for _, e in each), -mhz, config))
    if max(energy for _, energy, *_ in options) > _MOST_FJ:
        raise InputError(f"stage {stage} {instruction}: its parts use more than 4600 J together")
    return option_table(stage, instruction, options)


def scaled(
    whole: OptionTable, parts: Sequence[Part], noise: Mapping[Knob, tuple[float, float]]
) -> tuple[Part, ...]:
    """Parts that add up to what was measured of their operation, each keeping its share.

    Args:
        whole: rows of the operation itself.
        noise: by clock and config, how much less the parts may take and use, fractions.

    Raises:
        InputError: clocks differ, or the parts add up to less by more than the noise.
    """
    stage, name = whole.stage, whole.instruction
    together = {(m, c): (t, e) for m, c, t, e in one_clock(stage, name, parts).rows()}
    if constant := {(0, "")} == together.keys():
        together = dict.fromkeys(((m, c) for m, c, *_ in whole.rows()), together[0, ""])
    own = {(mhz, config): (time, energy) for mhz, config, time, energy in whole.rows()}
    if lacking := sorted(own.keys() ^ together.keys(), reverse=True):
        who, other = "the operation itself", "its parts"
        if lacking[0] in own:
            who, other = other, who
        raise InputError(
            f"stage {stage} {name}: at {_at(*lacking[0])} there are rows for {other} and none for "
            f"{who}"
        )
    for knob, measured in own.items():
        for k, (what, unit) in enumerate((("take", 1e9), ("use", 1e15))):
            total, given = together[knob][k] / unit, measured[k] / unit
            if total < given * (1 - noise[knob][k]):
                sign = "s" if k == 0 else "J"
                raise InputError(
                    f"stage {stage} {name} at {_at(*knob)}: its parts {what} {total:.6g} {sign} "
                    f"together, {given - total:.6g} {sign} ({100 * (1 - total / given):.1f}%) less "
                    "than was measured of it; some part is missing, or leave out the rows of the "
                    "operation itself"
                )
    if constant:
        return tuple(parts)
    options: dict[str, list[tuple[int, int, int, str]]] = {part.name: [] for part in parts}
    rows = {part.name: {(m, c): (t, e) for m, c, t, e in part.table.rows()} for part in parts}
    for knob, goal in own.items():
        upto, before, sums = [0, 0], [0, 0], together[knob]
        for part in options:
            own_row = rows[part].get(knob) or next(iter(rows[part].values()))
            share = []
            for k in (0, 1):
                upto[k] += own_row[k]
                now = goal[k] * upto[k] // max(1, sums[k])
                share.append(now - before[k])
                before[k] = now
            options[part].append((max(1, share[0]), share[1], -knob[0], knob[1]))
    return tuple(Part(n, option_table(stage, name, some)) for n, some in options.items())


def by_parts(whole: OptionTable, parts: Sequence[Part], how: ByParts) -> OptionTable:
    """The operation's options with clocks by part, beside those of one clock.

    Args:
        whole: the options of one clock.
        parts: in order of execution.

    Raises:
        InputError: there are more options than can be kept; asks for a larger `within`.
    """
    clocks = sorted({mhz for part in parts for mhz in part.table.frequency_mhz.tolist() if mhz})
    if not clocks or len(parts) < 2:
        return whole
    numbers: dict[str, int] = {}
    ends, rows = np.empty((len(parts), len(clocks)), np.int32), list[tuple[int, str, int, int]]()
    for p, part in enumerate(parts):
        by_clock: dict[int, list[tuple[int, str, int, int]]] = {}
        for row in part.table.rows():
            by_clock.setdefault(row[0], []).append(row)
        for c, mhz in enumerate(clocks):
            rows += by_clock[0] if 0 in by_clock else by_clock[mhz]
            ends[p, c] = len(rows)
    configs = np.array([numbers.setdefault(row[1], len(numbers)) for row in rows], np.int32)
    least_fj = sum(int(part.table.energy_fj.min()) for part in parts)
    waiting_uw = uw_from_w(how.blocking_power_w or 0.0)
    if waiting_uw * sum(int(part.table.time_ns[-1]) for part in parts) > MAX_INTEGER:
        raise InputError(
            f"stage {whole.stage} {whole.instruction}: waiting as long as its parts take costs too "
            "much for exact 64-bit arithmetic; check that times are in seconds"
        )
    try:
        times, energies, options = _kernel.compose(
            ends,
            np.array([row[2] for row in rows], np.int64),
            np.array([row[3] for row in rows], np.int64),
            configs,
            np.array([part.table.frequency_mhz.any() for part in parts], np.uint8),
            ns_from_s(how.switch_latency_s),
            ns_from_s(how.min_hold_s),
            waiting_uw,
            int(how.within * least_fj),
            _MOST_CHOICES,
        )
    except OverflowError as error:
        raise InputError(
            f"stage {whole.stage} {whole.instruction}: {error}; allow more than "
            f"{100 * how.within:g}% of energy with --parts-within, or profile at fewer clocks"
        ) from None
    chosen = options[:, [bool(part.table.frequency_mhz.any()) for part in parts]]
    names = np.repeat([part.name for part in parts], np.diff(ends[:, -1], prepend=0)).tolist()
    tokens = np.array(
        [label([Change(name, *row[:2])]) for name, row in zip(names, rows, strict=True)], object
    )
    knob = np.array([row[0] for row in rows]) + 2**20 * configs.astype(np.int64)
    asks = np.diff(knob[chosen], axis=1, prepend=-1) != 0
    found = [(time, energy, -mhz, config) for mhz, config, time, energy in whole.rows()]
    for k in np.flatnonzero(asks.sum(axis=1) > 1).tolist():
        mhz = rows[chosen[k, 0]][0]
        changes = " ".join(tokens[chosen[k, asks[k]]])
        found.append((int(times[k]), int(energies[k]), -mhz, changes))
    return replace(option_table(whole.stage, whole.instruction, found), parts=tuple(parts))


def pieces(table: OptionTable, config: str, latency_ns: int) -> list[Piece]:
    """What each part of an operation does under clocks by part, at one clock each, in order.

    As csrc/replay.hpp has it: a request counts so long after it was made, and what is then left of
    a part is carried over in proportion.

    Args:
        config: of an option with clocks by part.
        latency_ns: from a request until the clock changes, ns.
    """
    asked = {change.part: change[1:] for change in changes_of(config)}
    in_force, *_ = asked.values()
    coming: deque[tuple[int, Knob]] = deque()
    found: list[Piece] = []
    now = 0
    for part in table.parts:
        rows = {(mhz, label): (time, energy) for mhz, label, time, energy in part.table.rows()}
        constant = rows.get(in_force, next(iter(rows.values())))
        if part.name in asked and found:
            coming.append((now + latency_ns, asked[part.name]))
        left = whole = 0
        while True:
            while coming and coming[0][0] <= now:
                in_force = coming.popleft()[1]
            time, energy = rows.get(in_force, constant)
            left = -(-left * time // whole) if whole else time
            whole = time
            spent = min(left, coming[0][0] - now) if coming else left
            used = (2 * energy * spent + time) // (2 * time)
            found.append(Piece(part.name, in_force[0], spent, used))
            now, left = now + spent, left - spent
            if not left:
                break
    return found


def retimed(table: OptionTable, configs: Container[str], latency_ns: int) -> OptionTable:
    """Options with clocks by part as they are where clocks come at another latency.

    Args:
        configs: which of them to keep; those of one clock all stay.
    """
    options = []
    for mhz, config, time, energy in table.rows():
        if changes_of(config):
            if config not in configs:
                continue
            each = pieces(table, config, latency_ns)
            time = sum(piece.time_ns for piece in each)
            energy = sum(piece.energy_fj for piece in each)
        options.append((time, energy, -mhz, config))
    return replace(option_table(table.stage, table.instruction, options), parts=table.parts)


def noise_of(stds: Sequence[float | None], values: Sequence[float], usual: float) -> float:
    """Three standard deviations of a sum against its first term, as a fraction of that.

    Args:
        stds: of the measured whole, then of each part; `usual` times its value where not known.
    """
    known = (usual * value if std is None else std for std, value in zip(stds, values, strict=True))
    return 3 * math.sqrt(sum(std * std for std in known)) / values[0] if values[0] else 0.0


def _at(mhz: int, config: str) -> str:
    return f"{mhz} MHz" + (f" config {config}" if config else "")
