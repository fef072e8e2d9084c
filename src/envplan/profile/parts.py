"""Operations that consist of parts, such as a forward of attention and matrix products.

Parts only make options. Each part has rows of its own; the options of the operation are those that
its parts make together, each with a time, an energy and a label that says which part runs at which
clock, as any other config does:

    @attention=1410 @mlp=990

means: ask for 1410 MHz as `attention` starts and for 990 MHz as `mlp` starts. Clocks that come late
are asked for ahead, so `@attention=990+2000000ns` means: 2 ms after `attention` starts. What comes
after this module knows no parts. The composition itself is in csrc/parts.hpp.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Annotated, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan import _kernel
from envplan._model import Model
from envplan.errors import InputError
from envplan.profile.options import IntArray, OptionTable, Part, Slices, frozen, option_table
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
WITHIN: Final = 2e-3

_MOST_CHOICES: Final = 10_000_000
_MOST_FJ: Final = MAX_INTEGER
#: What is a name of a part.
NAME: Final = re.compile(r"[^\s@=/,\"]+")
_TOKEN: Final = re.compile(rf"@({NAME.pattern})=(\d+)(?:\+(\d+)ns)?(?:/(.*))?")

Knob = tuple[int, str]  # MHz, config


class Piece(NamedTuple):
    """What a part does at one clock, MHz, in so many ns and fJ."""

    part: str
    frequency_mhz: int
    time_ns: int
    energy_fj: int


class Change(NamedTuple):
    """Which clock is asked for as a part begins, or so long after that; its config from then on."""

    part: str
    frequency_mhz: int
    config: str
    delay_ns: int = 0


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
    found = [_TOKEN.fullmatch(token) for token in re.split(" (?=@)", config)]
    if not all(found):
        raise InputError(f"{config!r} does not say clocks by part, as in @attention=1410 @mlp=990")
    return tuple(Change(m[1], int(m[2]), m[4] or "", int(m[3] or 0)) for m in found if m)


def label(changes: Sequence[Change]) -> str:
    """The config that stands for clocks by part."""
    return " ".join(
        f"@{part}={mhz}" + (f"+{wait}ns" if wait else "") + (f"/{config}" if config else "")
        for part, mhz, config, wait in changes
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


def by_parts(whole: OptionTable, parts: Sequence[Part], how: ByParts | None) -> OptionTable:
    """The operation's options with clocks by part, beside those of one clock.

    Args:
        whole: the options of one clock.
        parts: in order of execution.
        how: None: only those of one clock.

    Raises:
        InputError: there are more options than can be kept; asks for a larger `within`.
    """
    rows = _PartRows(parts)
    chosen = np.array([rows.at(mhz, config) for mhz, config, *_ in whole.rows()], np.int32)
    count, latency_ns = len(whole), 0
    mhz = left = whole.frequency_mhz
    times, energies = whole.time_ns, whole.energy_fj
    follows = np.flatnonzero(rows.asks)
    if how is not None and len(follows) and len(parts) > 1:
        latency_ns = ns_from_s(how.switch_latency_s)
        more_times, more_energies, more_chosen = _composed(whole, rows, how)
        knobs = rows.knob[more_chosen[:, follows]]
        changing = (knobs != knobs[:, :1]).any(axis=1)
        more_chosen = more_chosen[changing]
        times = np.concatenate([times, more_times[changing]])
        energies = np.concatenate([energies, more_energies[changing]])
        mhz, left = (
            np.concatenate([mhz, rows.mhz[more_chosen[:, end]]]) for end in follows[[0, -1]]
        )
        chosen = np.concatenate([chosen, more_chosen])
    changes = np.arange(len(times)) >= count
    known = [*whole.config, *[None] * (len(times) - count)]
    options = _Options(mhz, left, times, energies, changes, chosen, known)
    return _table(whole.stage, whole.instruction, rows, options, latency_ns)


class _Options(NamedTuple):
    """Columns of an option table: see OptionTable; and the row that each part takes, int32
    (options, parts), and the configs as far as they are known."""

    mhz: IntArray
    left_mhz: IntArray
    time_ns: IntArray
    energy_fj: IntArray
    changes_clock: NDArray[np.bool_]
    chosen: NDArray[np.int32]
    config: list[str | None]


def _table(
    stage: int, instruction: str, rows: _PartRows, options: _Options, latency_ns: int
) -> OptionTable:
    """Options in any order as a table."""
    order = np.lexsort((-options.mhz, options.energy_fj, options.time_ns))
    chosen, changes = options.chosen[order], options.changes_clock[order]
    known = [options.config[k] for k in order.tolist()]
    first = int(rows.asks.argmax())
    configs = zip(changes.tolist(), rows.configs[chosen[:, first]], known, strict=True)
    return OptionTable(
        stage=stage,
        instruction=instruction,
        frequency_mhz=frozen(options.mhz[order]),
        config=_Configs(rows, chosen, latency_ns, known),
        time_ns=frozen(options.time_ns[order]),
        energy_fj=frozen(options.energy_fj[order]),
        left_mhz=frozen(options.left_mhz[order]),
        changes_clock=changes,
        first_config=tuple(own if ch else config or "" for ch, own, config in configs),
        slices=Slices.of(rows.time_ns[chosen], rows.energy_fj[chosen]),
        parts=rows.parts,
    )


def _composed(
    whole: OptionTable, rows: _PartRows, how: ByParts
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Times (ns), energies (fJ) and rows of each part of all options worth having."""
    least_fj = sum(int(part.table.energy_fj.min()) for part in rows.parts)
    waiting_uw = uw_from_w(how.blocking_power_w or 0.0)
    if waiting_uw * sum(int(part.table.time_ns[-1]) for part in rows.parts) > MAX_INTEGER:
        raise InputError(
            f"stage {whole.stage} {whole.instruction}: waiting as long as its parts take costs too "
            "much for exact 64-bit arithmetic; check that times are in seconds"
        )
    try:
        return _kernel.compose(
            rows.ends,
            rows.time_ns,
            rows.energy_fj,
            rows.asks,
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


class _PartRows:
    """The rows of all parts, by part and clock; a constant part has its own at every clock.

    Attributes:
        parts: in order of execution.
        asks: which of them follow the clock, uint8 (parts,).
        ends: where those of a part at a clock end, int32 (parts, clocks).
        mhz, time_ns, energy_fj: int64 (rows,); configs: likewise, strings.
        knob: a number for each (MHz, config), int64 (rows,).
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.asks = np.array([part.table.frequency_mhz.any() for part in parts], np.uint8)
        clocks = sorted({mhz for part in parts for mhz in part.table.frequency_mhz.tolist() if mhz})
        rows: list[tuple[int, str, int, int]] = []
        self.ends = np.empty((len(parts), max(1, len(clocks))), np.int32)
        self._at: list[dict[Knob, int]] = []
        for p, part in enumerate(parts):
            by_clock: dict[int, list[tuple[int, str, int, int]]] = {}
            for row in part.table.rows():
                by_clock.setdefault(row[0], []).append(row)
            own = {}
            for c, mhz in enumerate(clocks or [0]):
                for row in by_clock[0] if 0 in by_clock else by_clock[mhz]:
                    own[row[:2]] = len(rows)
                    rows.append(row)
                self.ends[p, c] = len(rows)
            self._at.append(own)
        self.mhz, self.time_ns, self.energy_fj = (
            np.array([row[k] for row in rows], np.int64) for k in (0, 2, 3)
        )
        self.configs = np.array([row[1] for row in rows], object)
        numbers: dict[Knob, int] = {}
        self.knob = np.array([numbers.setdefault(row[:2], len(numbers)) for row in rows])

    def at(self, mhz: int, config: str) -> list[int]:
        """The row of each part at a clock and config; the least one of a constant part."""
        return [own.get((mhz, config), next(iter(own.values()))) for own in self._at]

    def as_fast(self, parts: Sequence[int], mhz: int, planned: Sequence[int]) -> list[int] | None:
        """Rows of some parts that stand for a clock, those of the highest one up to it; None where
        one is slower than the row planned for it, (parts,)."""
        found = []
        for part in parts:
            config = self.configs[planned[part]]
            known = (knob for knob in self._at[part] if knob[0] <= mhz and knob[1] == config)
            found.append(self._at[part][max(known)])
            if self.time_ns[found[-1]] > self.time_ns[planned[part]]:
                return None
        return found

    def changes(
        self, chosen: Sequence[int], latency_ns: int, clocks: Sequence[int] | None = None
    ) -> list[Change]:
        """What parts ask for when, so that each begins with its clock.

        Args:
            chosen: the row of each part, (parts,).
            clocks: of each part, MHz, (parts,); None: those of the rows.
        """
        found: list[Change] = []
        starts: list[int] = []
        now = mhz = 0
        config = ""
        for part, row, asks, clock in zip(
            self.parts, chosen, self.asks.tolist(), clocks or self.mhz[chosen].tolist(), strict=True
        ):
            starts.append(now)
            before, (mhz, config) = (mhz, config), (clock, self.configs[row])
            if not asks:
                mhz, config = before
            elif not found:
                found.append(Change(part.name, mhz, config))
            elif mhz != before[0] and latency_ns:
                # Asked for so long after the last part that begins by then.
                asking = bisect_right(starts, now - latency_ns) - 1
                delay = now - latency_ns - starts[asking]
                found.append(Change(self.parts[asking].name, mhz, before[1], delay))
                if config != before[1]:
                    found.append(Change(part.name, mhz, config))
            elif (mhz, config) != before:
                found.append(Change(part.name, mhz, config))
            now += int(self.time_ns[row])
        return found


class Raised(NamedTuple):
    """An option whose clocks a GPU has, made of one whose clocks it lacks.

    Attributes:
        knob: its MHz and config.
        clocks: (MHz before, MHz now, whether the profile knows the latter) of those that differ.
    """

    knob: Knob
    clocks: tuple[tuple[int, int, bool], ...]


def raised(
    table: OptionTable, config: str, gpu_mhz: Sequence[int], how: ByParts
) -> tuple[OptionTable, Raised] | None:
    """The table with one option more: that of clocks by part which a GPU has, and no part slower.

    Clocks that it lacks become the next ones above. Where the profile does not know such a clock,
    a part counts as no faster than at the highest one below. Where a clock would then come too soon
    after the one before, the parts at these two get the higher one.

    Args:
        config: of the option whose clocks are raised.
        gpu_mhz: the clocks of the GPU, ascending.

    Returns:
        The table and the new option; None where no clock is as fast.
    """
    assert isinstance(table.config, _Configs)
    rows, planned = table.config.rows, table.config.chosen[table.config.index(config)].tolist()
    follows = np.flatnonzero(rows.asks).tolist()
    clocks: list[int] = rows.mhz[planned].tolist()
    latency_ns = ns_from_s(how.switch_latency_s)
    apart_ns = max(latency_ns, ns_from_s(how.min_hold_s))
    tight: tuple[int, int] | None = (0, 0)
    while tight is not None:
        chosen = list(planned)
        for least, same in groupby(follows, key=clocks.copy().__getitem__):
            members = list(same)
            fitting = (
                (clock, standing)
                for clock in gpu_mhz[bisect_left(gpu_mhz, least) :]
                if (standing := rows.as_fast(members, clock, planned)) is not None
            )
            found = next(fitting, None)
            if found is None:
                return None
            for p, row in zip(members, found[1], strict=True):
                clocks[p], chosen[p] = found[0], row
        starts = [0, *rows.time_ns[chosen].cumsum().tolist()]
        due, tight = apart_ns + latency_ns, None
        for before, p in pairwise(follows):
            if clocks[p] != clocks[before] and tight is None:
                tight = (clocks[before], clocks[p]) if starts[p] < due else None
                due = starts[p] + apart_ns
        if tight is not None:
            clocks = [max(tight) if clock in tight else clock for clock in clocks]
    changes = rows.changes(chosen, latency_ns, clocks)
    knob = changes[0].frequency_mhz, label(changes)
    of_parts = np.array([chosen], np.int32)
    options = _Options(
        np.append(table.frequency_mhz, knob[0]),
        np.append(table.left_mhz, changes[-1].frequency_mhz),
        np.append(table.time_ns, rows.time_ns[chosen].sum()),
        np.append(table.energy_fj, rows.energy_fj[chosen].sum()),
        np.append(table.changes_clock, True),
        np.concatenate([table.config.chosen, of_parts]),
        [*table.config.known, knob[1]],
    )
    pairs = {(int(rows.mhz[planned[p]]), clocks[p]) for p in follows} - {(m, m) for m in clocks}
    found_table = _table(table.stage, table.instruction, rows, options, latency_ns)
    known = {mhz for _, mhz in pairs}.intersection(rows.mhz.tolist())
    return found_table, Raised(knob, tuple(sorted((*pair, pair[1] in known) for pair in pairs)))


class _Configs(Sequence[str]):
    """The configs of options, those of clocks by part made when they are asked for.

    Args:
        chosen: the row of each part, int32 (options, parts).
        known: those that are not made of parts.
    """

    def __init__(
        self, rows: _PartRows, chosen: NDArray[np.int32], latency_ns: int, known: list[str | None]
    ) -> None:
        self.rows, self.chosen, self.known = rows, chosen, known
        self._latency_ns = latency_ns

    def __len__(self) -> int:
        return len(self.known)

    @overload
    def __getitem__(self, k: int) -> str: ...
    @overload
    def __getitem__(self, k: slice) -> list[str]: ...
    def __getitem__(self, k: int | slice) -> str | list[str]:
        if isinstance(k, slice):
            return [self[n] for n in range(*k.indices(len(self)))]
        found = self.known[k]
        if found is None:
            found = label(self.rows.changes(self.chosen[k].tolist(), self._latency_ns))
            self.known[k] = found
        return found


def pieces(table: OptionTable, config: str, latency_ns: int) -> list[Piece]:
    """What each part of an operation does under clocks by part, at one clock each, in order.

    As csrc/replay.hpp has it: a request counts so long after it was made, and what is then left of
    a part is carried over in proportion.

    Args:
        config: of an option with clocks by part.
        latency_ns: from a request until the clock changes, ns.
    """
    changes = changes_of(config)
    mhz = asked = changes[0].frequency_mhz
    knob = changes[0].config
    coming: deque[tuple[int, int]] = deque()
    found: list[Piece] = []
    now = 0
    for part in table.parts:
        for change in changes:
            if change.part == part.name:
                knob = change.config
                if change.frequency_mhz != asked:
                    asked = change.frequency_mhz
                    coming.append((now + change.delay_ns + latency_ns, asked))
        rows = {(mhz, label): (time, energy) for mhz, label, time, energy in part.table.rows()}
        constant = rows.get((mhz, knob), next(iter(rows.values())))
        left = whole = 0
        while True:
            while coming and coming[0][0] <= now:
                mhz = coming.popleft()[1]
            time, energy = rows.get((mhz, knob), constant)
            left = -(-left * time // whole) if whole else time
            whole = time
            spent = min(left, coming[0][0] - now) if coming else left
            used = (2 * energy * spent + time) // (2 * time)
            found.append(Piece(part.name, mhz, spent, used))
            now, left = now + spent, left - spent
            if not left:
                break
    return found


def retimed(table: OptionTable, configs: Container[str], latency_ns: int) -> OptionTable:
    """Options with clocks by part as they are where clocks come at another latency.

    Args:
        configs: which of them to keep; those of one clock all stay.
    """
    kept, slices = [], []
    begin = table.slices.begin.tolist()
    for k, (mhz, config, time, energy) in enumerate(table.rows()):
        if not table.changes_clock[k]:
            own = slice(begin[k], begin[k + 1])
            powers = table.slices.power_uw[own].tolist()
            kept.append((time, energy, -mhz, k))
            slices.append(list(zip(table.slices.time_ns[own].tolist(), powers, strict=True)))
        elif config in configs:
            each = pieces(table, config, latency_ns)
            time = sum(piece.time_ns for piece in each)
            kept.append((time, sum(piece.energy_fj for piece in each), -mhz, k))
            slices.append([(p.time_ns, -(-p.energy_fj // p.time_ns)) for p in each])
    order = sorted(range(len(kept)), key=kept.__getitem__)
    times, energies, _, rows = zip(*map(kept.__getitem__, order), strict=True)
    flat = [one for k in order for one in slices[k]]
    return replace(
        table,
        frequency_mhz=table.frequency_mhz[list(rows)],
        config=tuple(table.config[k] for k in rows),
        time_ns=frozen(times),
        energy_fj=frozen(energies),
        left_mhz=table.left_mhz[list(rows)],
        changes_clock=table.changes_clock[list(rows)],
        first_config=tuple(table.first_config[k] for k in rows),
        slices=Slices(
            np.cumsum([0, *(len(slices[k]) for k in order)]), *np.array(flat, np.int64).T
        ),
    )


def noise_of(stds: Sequence[float | None], values: Sequence[float], usual: float) -> float:
    """Three standard deviations of a sum against its first term, as a fraction of that.

    Args:
        stds: of the measured whole, then of each part; `usual` times its value where not known.
    """
    known = (usual * value if std is None else std for std, value in zip(stds, values, strict=True))
    return 3 * math.sqrt(sum(std * std for std in known)) / values[0] if values[0] else 0.0


def _at(mhz: int, config: str) -> str:
    return f"{mhz} MHz" + (f" config {config}" if config else "")
