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

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan import _kernel
from envplan._model import Model
from envplan.errors import InputError
from envplan.profile.options import Knob, OptionTable, Part, Slices, frozen, option_table
from envplan.units import MAX_INTEGER, ns_from_s, uw_from_w

#: How much more energy an option left out may save where nobody says, as a fraction.
WITHIN: Final = 2e-3

_MOST_CHOICES: Final = 10_000_000
_MOST_FJ: Final = MAX_INTEGER
#: What is a name of a part.
NAME: Final = re.compile(r"[^\s@=/,\"]+")
_TOKEN: Final = re.compile(rf"@({NAME.pattern})=(\d+)(?:\+(\d+)ns)?(?:/(.*))?")


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
    options = []
    for (mhz, config), each in _at_one_clock(stage, instruction, parts).items():
        times, energies = zip(*each, strict=True)
        options.append((sum(times), sum(energies), -mhz, config))
    if max(energy for _, energy, *_ in options) > _MOST_FJ:
        raise InputError(f"stage {stage} {instruction}: its parts use more than 4600 J together")
    return option_table(stage, instruction, options)


def _at_one_clock(
    stage: int, instruction: str, parts: Sequence[Part]
) -> dict[Knob, list[tuple[int, int]]]:
    """By clock and config ns and fJ of each part; of parts of constant time alone at 0 MHz.

    Raises:
        InputError: a part has no row at a clock that another one has.
    """
    rows = [part.table.by_knob() for part in parts]
    clocked = [any(mhz for mhz, _ in own) for own in rows]
    knobs = dict.fromkeys(k for own, has in zip(rows, clocked, strict=True) if has for k in own)
    found: dict[Knob, list[tuple[int, int]]] = {knob: [] for knob in knobs or [(0, "")]}
    for part, own, has_clock in zip(parts, rows, clocked, strict=True):
        for knob, each in found.items():
            if has_clock and knob not in own:
                has = next(other.name for other in parts if knob in other.table.by_knob())
                raise InputError(
                    f"stage {stage} {instruction}: part {part.name} has no row at {_at(*knob)}, "
                    f"which part {has} has; every part needs the same clocks, or one row at 0 MHz"
                )
            each.append(own[knob] if has_clock else min(own.values()))
    return found


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
    each, own = _at_one_clock(stage, name, parts), whole.by_knob()
    if constant := {(0, "")} == each.keys():
        each = dict.fromkeys(own, each[0, ""])
    if lacking := sorted(own.keys() ^ each.keys(), reverse=True):
        who, other = "the operation itself", "its parts"
        if lacking[0] in own:
            who, other = other, who
        raise InputError(
            f"stage {stage} {name}: at {_at(*lacking[0])} there are rows for {other} and none for "
            f"{who}"
        )
    options: list[list[tuple[int, int, int, str]]] = [[] for _ in parts]
    for (mhz, config), measured in own.items():
        shares = []
        for k, (what, unit, sign) in enumerate((("take", 1e9, "s"), ("use", 1e15, "J"))):
            values = [part[k] for part in each[mhz, config]]
            total, given = sum(values) / unit, measured[k] / unit
            if total < given * (1 - noise[mhz, config][k]):
                raise InputError(
                    f"stage {stage} {name} at {_at(mhz, config)}: its parts {what} {total:.6g} "
                    f"{sign} together, {given - total:.6g} {sign} "
                    f"({100 * (1 - total / given):.1f}%) less than was measured of it; some part "
                    "is missing, or leave out the rows of the operation itself"
                )
            ends = [measured[k] * upto // max(1, sum(values)) for upto in accumulate(values)]
            shares.append([end - begin for begin, end in pairwise([0, *ends])])
        for own_options, time, energy in zip(options, *shares, strict=True):
            own_options.append((max(1, time), energy, -mhz, config))
    if constant:
        return tuple(parts)
    tables = (option_table(stage, name, own_options) for own_options in options)
    return tuple(Part(part.name, table) for part, table in zip(parts, tables, strict=True))


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
    latency_ns, more = 0, chosen[:0]
    if how is not None and rows.asks.any() and len(parts) > 1:
        latency_ns, more = ns_from_s(how.switch_latency_s), _composed(whole, rows, how)
        knobs = rows.knob[more[:, np.flatnonzero(rows.asks)]]
        more = more[(knobs != knobs[:, :1]).any(axis=1)]
    return _extended(whole, _Configs(rows, chosen, latency_ns, list(whole.config)), more)


def _extended(
    table: OptionTable,
    options: _Configs,
    more: NDArray[np.int32],
    asked: Sequence[Change] | None = None,
) -> OptionTable:
    """A table with further options, those of clocks by part.

    Args:
        options: those that the table has.
        more: the row of each part that each further one takes, (further options, parts).
        asked: the clocks of the one further option; None: those of its rows.
    """
    rows = options.rows
    clocked = np.flatnonzero(rows.asks)[[0, -1]] if rows.asks.any() else (0, 0)
    begin, left = (
        rows.mhz[more[:, part]] if asked is None else [asked[end].frequency_mhz]
        for part, end in zip(clocked, (0, -1), strict=True)
    )
    mhz = np.concatenate([table.frequency_mhz, begin])
    times = np.concatenate([table.time_ns, rows.time_ns[more].sum(axis=1)])
    energies = np.concatenate([table.energy_fj, rows.energy_fj[more].sum(axis=1)])
    changes = np.concatenate([table.changes_clock, np.ones(len(more), np.bool_)])
    chosen = np.concatenate([options.chosen, more])
    first = np.concatenate(
        [np.array(table.first_config, object), rows.configs[more[:, clocked[0]]]]
    )
    order = np.lexsort((-mhz, energies, times))
    known = [*options.known, *[None if asked is None else label(asked)] * len(more)]
    return OptionTable(
        stage=table.stage,
        instruction=table.instruction,
        frequency_mhz=frozen(mhz[order]),
        config=_Configs(rows, chosen[order], options.latency_ns, [known[k] for k in order]),
        time_ns=frozen(times[order]),
        energy_fj=frozen(energies[order]),
        left_mhz=frozen(np.concatenate([table.left_mhz, left])[order]),
        changes_clock=changes[order],
        first_config=tuple(first[order]),
        slices=Slices.of(rows.time_ns[chosen[order]], rows.energy_fj[chosen[order]]),
        parts=rows.parts,
    )


def _composed(whole: OptionTable, rows: _PartRows, how: ByParts) -> NDArray[np.int32]:
    """Rows of each part of all options worth having, (options, parts)."""
    where = f"stage {whole.stage} {whole.instruction}"
    least_fj = sum(int(part.table.energy_fj.min()) for part in rows.parts)
    waiting_uw = uw_from_w(how.blocking_power_w or 0.0)
    if waiting_uw * sum(int(part.table.time_ns[-1]) for part in rows.parts) > MAX_INTEGER:
        raise InputError(
            f"{where}: waiting as long as its parts take costs too much for exact 64-bit "
            "arithmetic; check that times are in seconds"
        )
    try:
        *_, found = _kernel.compose(
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
            f"{where}: {error}; allow more than {100 * how.within:g}% of energy with "
            "--parts-within, or profile at fewer clocks"
        ) from None
    return found


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
            by_clock: dict[int, list[tuple[int, str, int, int]]] = defaultdict(list)
            for row in part.table.rows():
                by_clock[row[0]].append(row)
            own = {}
            for c, mhz in enumerate(clocks or [0]):
                for row in by_clock[0] or by_clock[mhz]:
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
    while True:
        chosen = list(planned)
        for least, same in groupby(follows, key=clocks.copy().__getitem__):
            members = list(same)
            for clock in gpu_mhz[bisect_left(gpu_mhz, least) :]:
                if (standing := rows.as_fast(members, clock, planned)) is not None:
                    break
            else:
                return None
            for p, row in zip(members, standing, strict=True):
                clocks[p], chosen[p] = clock, row
        starts = [0, *rows.time_ns[chosen].cumsum().tolist()]
        due = apart_ns + latency_ns
        for before, p in pairwise(follows):
            if clocks[p] != clocks[before]:
                if starts[p] < due:
                    break
                due = starts[p] + apart_ns
        else:
            break
        tight = clocks[before], clocks[p]
        clocks = [max(tight) if clock in tight else clock for clock in clocks]
    changes = rows.changes(chosen, latency_ns, clocks)
    extended = _extended(table, table.config, np.array([chosen], np.int32), changes)
    pairs = {(int(rows.mhz[planned[p]]), clocks[p]) for p in follows} - {(m, m) for m in clocks}
    known = {mhz for _, mhz in pairs}.intersection(rows.mhz.tolist())
    knob = changes[0].frequency_mhz, label(changes)
    return extended, Raised(knob, tuple(sorted((*pair, pair[1] in known) for pair in pairs)))


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
        self.latency_ns = latency_ns

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, k: int) -> str:  # type: ignore[override]  # nobody takes slices
        found = self.known[k]
        if found is None:
            found = label(self.rows.changes(self.chosen[k].tolist(), self.latency_ns))
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
        rows = part.table.by_knob()
        constant = rows.get((mhz, knob), next(iter(rows.values())))
        left = whole = 1
        while left:
            while coming and coming[0][0] <= now:
                mhz = coming.popleft()[1]
            time, energy = rows.get((mhz, knob), constant)
            left, whole = -(-left * time // whole), time
            spent = min(left, coming[0][0] - now) if coming else left
            used = (2 * energy * spent + time) // (2 * time)
            found.append(Piece(part.name, mhz, spent, used))
            now, left = now + spent, left - spent
    return found


def retimed(table: OptionTable, configs: Container[str], latency_ns: int) -> OptionTable:
    """Options with clocks by part as they are where clocks come at another latency.

    Args:
        configs: which of them to keep; those of one clock all stay.
    """
    kept = []
    for k, (mhz, config, time, energy) in enumerate(table.rows()):
        draws = table.slices.of_option(k)
        if table.changes_clock[k]:
            if config not in configs:
                continue
            each = pieces(table, config, latency_ns)
            time = sum(piece.time_ns for piece in each)
            energy = sum(piece.energy_fj for piece in each)
            draws = [(piece.time_ns, -(-piece.energy_fj // piece.time_ns)) for piece in each]
        kept.append((time, energy, -mhz, k, draws))
    times, energies, _, rows, slices = map(list, zip(*sorted(kept), strict=True))
    begin = np.cumsum([0, *map(len, slices)])
    return replace(
        table,
        frequency_mhz=table.frequency_mhz[rows],
        config=tuple(table.config[k] for k in rows),
        time_ns=frozen(times),
        energy_fj=frozen(energies),
        left_mhz=table.left_mhz[rows],
        changes_clock=table.changes_clock[rows],
        first_config=tuple(table.first_config[k] for k in rows),
        slices=Slices(begin, *np.array(list(chain(*slices)), np.int64).T),
    )


def _at(mhz: int, config: str) -> str:
    return f"{mhz} MHz" + (f" config {config}" if config else "")
