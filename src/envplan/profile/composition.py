"""Options of operations that consist of parts, such as a forward of attention and matrix products.

Parts only make options. Each part has rows of its own; the options of the operation are those that
its parts make together, each with a time, an energy and a config that says which part runs at which
clock (see clocks/requests.py). What comes after this module knows no parts. The composition itself
is in csrc/parts.hpp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import replace
from typing import Annotated, Final, NamedTuple, Self

import numpy as np
from pydantic import Field

from envplan import _kernel
from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.profile.options import OptionTable, PowerSegments
from envplan.profile.part_costs import ClockSetting, ExactCost, IntArray, PartCosts
from envplan.units import MAX_INTEGER, in_10uw, ns_from_s

#: How much more energy an option left out may save where nobody says, as a fraction.
DEFAULT_WITHIN: Final = 2e-3

_MAX_CHOICES: Final = 10_000_000


class ByParts(Model):
    """The rule by which options of operations are composed of those of their parts."""

    within: Annotated[float, Field(ge=0, le=1)] = Field(
        DEFAULT_WITHIN,
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
        """The rule that options of commands ask for.

        Args:
            within_percent: of the operation's least energy; None: the usual.
            blocking_power_w: W of a GPU that waits; None: what the profile says.

        Raises:
            InputError: a number is out of range.
        """
        within = DEFAULT_WITHIN if within_percent is None else within_percent / 100
        return cls.of(within=within, blocking_power_w=blocking_power_w)

    def in_words(self) -> str:
        """The rule in a phrase.

        Such as "clocks by part, options within 0.05% of energy, switch latency 0.005 s".
        """
        words = ["clocks by part"]
        if self.within:
            words.append(f"options within {100 * self.within:g}% of energy")
        if self.switch_latency_s:
            words.append(f"switch latency {self.switch_latency_s:g} s")
        if self.min_hold_s:
            words.append(f"clocks held {self.min_hold_s:g} s")
        return ", ".join(words)


def compose_options(
    stage: int, instruction: str, parts: PartCosts, rule: ByParts | None
) -> OptionTable:
    """The options of an operation: all parts at one setting, and some with clocks by part.

    Args:
        stage: stage of the profile.
        instruction: its name.
        parts: costs of the operation's parts.
        rule: how to mix settings; None: only options of one setting.

    Raises:
        InputError: there are more options than can be kept; asks for a larger `within`.
    """
    num_settings, num_parts = parts.time_ns.shape
    one_setting: IntArray = np.repeat(np.arange(num_settings), num_parts)
    one_setting = one_setting.reshape(num_settings, num_parts)
    if rule is None or parts.follows_clock.sum() < 2:
        return OptionTable.from_settings(stage, instruction, parts, one_setting)
    mixed = _mixed_settings(parts, rule, f"stage {stage} {instruction}")
    return OptionTable.from_settings(
        stage,
        instruction,
        parts,
        np.concatenate([one_setting, mixed]),
        latency_ns=ns_from_s(rule.switch_latency_s),
    )


def _mixed_settings(parts: PartCosts, rule: ByParts, where: str) -> IntArray:
    """Settings of the parts in each Pareto option whose parts differ in them, (n, P).

    Raises:
        InputError: there are more options than can be kept, or costs are out of range.
    """
    num_settings, num_parts = parts.time_ns.shape
    waiting_10uw = in_10uw(rule.blocking_power_w or 0.0)
    _check_range(parts, waiting_10uw, where)
    # The kernel numbers options of parts one after the other: part by part, and by setting.
    first_of_part = num_settings * np.arange(num_parts)
    ends_of_clocks = np.flatnonzero(np.diff(parts.frequency_mhz, append=-1)) + 1
    least_energy_10fj = int(parts.energy_10fj.min(axis=0).sum())
    try:
        numbered = _kernel.compose(
            (first_of_part[:, None] + ends_of_clocks).astype(np.int32),
            parts.time_ns.T.ravel(),
            parts.energy_10fj.T.ravel(),
            parts.follows_clock.astype(np.uint8),
            ns_from_s(rule.switch_latency_s),
            ns_from_s(rule.min_hold_s),
            waiting_10uw,
            int(rule.within * least_energy_10fj),
            _MAX_CHOICES,
        )
    except OverflowError as error:
        raise InputError(
            f"{where}: {error}; allow more than {100 * rule.within:g}% of energy with "
            "--parts-within, or profile at fewer clocks"
        ) from None
    settings: IntArray = numbered - first_of_part
    clocked = settings[:, parts.follows_clock]
    mixed: IntArray = settings[(clocked != clocked[:, :1]).any(axis=1)]
    return mixed


def _check_range(parts: PartCosts, waiting_10uw: int, where: str) -> None:
    highest_energy_10fj = float(parts.energy_10fj.max(axis=0).sum(dtype=float))
    waiting_10fj = waiting_10uw * int(parts.time_ns.max(axis=0).sum())
    if max(highest_energy_10fj, waiting_10fj) > MAX_INTEGER:
        raise InputError(
            f"{where}: its parts, or waiting as long as they take, cost too much for exact 64-bit "
            "arithmetic; check that times are in seconds and energies in joules"
        )


class PartRun(NamedTuple):
    """A span of a part's execution at one clock."""

    part: str
    frequency_mhz: int
    time_ns: int
    energy_10fj: int


def part_runs(table: OptionTable, option: int, latency_ns: int) -> list[PartRun]:
    """The spans in which the parts of an operation run at one clock each, in order.

    As csrc/replay.hpp has it: a request counts so long after it was made, and what then remains of
    a part is carried over in proportion.

    Args:
        table: the options.
        option: one with clocks by part.
        latency_ns: from a request until the clock changes, ns.
    """
    parts, requests = table.parts, table.clock_requests(option)
    row_of = {setting: row for row, setting in enumerate(parts.settings)}
    planned_rows = table.setting_of_part[option].tolist()
    clock_mhz = requested_mhz = requests[0].frequency_mhz
    config = requests[0].config
    pending: deque[tuple[int, int]] = deque()  # (ns when it counts, MHz)
    runs: list[PartRun] = []
    now_ns = 0
    for part, name in enumerate(parts.names):
        for request in requests:
            if request.part != name:
                continue
            config = request.config
            if request.frequency_mhz != requested_mhz:
                requested_mhz = request.frequency_mhz
                pending.append((now_ns + request.delay_ns + latency_ns, requested_mhz))
        # The part remains as a whole, whose time is known once its clock is.
        remaining_ns = whole_ns = 1
        while remaining_ns:
            while pending and pending[0][0] <= now_ns:
                clock_mhz = pending.popleft()[1]
            row = row_of.get(ClockSetting(clock_mhz, config), planned_rows[part])
            time_ns, energy_10fj = int(parts.time_ns[row, part]), int(parts.energy_10fj[row, part])
            remaining_ns, whole_ns = -(-remaining_ns * time_ns // whole_ns), time_ns
            run_ns = min(remaining_ns, pending[0][0] - now_ns) if pending else remaining_ns
            used_10fj = (2 * energy_10fj * run_ns + time_ns) // (2 * time_ns)
            runs.append(PartRun(name, clock_mhz, run_ns, used_10fj))
            now_ns += run_ns
            remaining_ns -= run_ns
    return runs


def retimed(table: OptionTable, configs: Container[str], latency_ns: int) -> OptionTable:
    """A table whose options with clocks by part cost what they do at another latency.

    Args:
        table: the options.
        configs: of the options with clocks by part that are kept; those of one clock all stay.
        latency_ns: from a request until the clock changes, ns.
    """
    segments_of = {
        option: _segments_at(table, option, latency_ns)
        for option, changes_clock in enumerate(table.changes_clock.tolist())
        if not changes_clock or table.config[option] in configs
    }

    def rank(option: int) -> tuple[int, int, int, int]:
        """Options ascend by time, energy, falling frequency."""
        times, energies = zip(*segments_of[option], strict=True)
        return sum(times), sum(energies), -int(table.frequency_mhz[option]), option

    order = sorted(segments_of, key=rank)
    counts = [len(segments_of[option]) for option in order]
    costs = np.array([cost for option in order for cost in segments_of[option]], np.int64)
    segments = PowerSegments(np.cumsum([0, *counts]), costs[:, 0], costs[:, 1])
    return replace(table, setting_of_part=table.setting_of_part[order], segments=segments)


def _segments_at(table: OptionTable, option: int, latency_ns: int) -> list[ExactCost]:
    """The segments of an option where clocks come at a latency."""
    if not table.changes_clock[option]:
        return table.segments.of_option(option)
    runs = part_runs(table, option, latency_ns)
    return [ExactCost(run.time_ns, run.energy_10fj) for run in runs]
