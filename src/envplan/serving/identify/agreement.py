"""Which rows of published benchmarks say one thing: repeated measurements and contradictions.

Tables of benchmarks hold the same run several times, and runs that differ in what no column says,
such as speculated tokens. Both are found in what was measured alone, whatever a model predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from envplan.serving.identify.benchmark import Benchmark

#: Times of one run that differ by less were rounded differently.
_ROUNDING: Final = 2e-3
#: Runs of one configuration agree where their times are within this factor of each other.
_REPEATED: Final = 1.5
#: More requests at once may shorten times by these factors, between tokens and to the first one.
_SHORTER_INTERVAL: Final = 1.5
_SHORTER_FIRST_TOKEN: Final = 3.0


def distinct(rows: Sequence[Benchmark]) -> list[Benchmark]:
    """Each measurement once: of rows with the same times, the one that says most of its workers.

    Args:
        rows: that state both times.
    """
    kept: dict[Hashable, list[Benchmark]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: not row.workers_known):
        alike = kept[
            row.pair,
            row.engine,
            row.precision,
            row.disaggregated,
            row.input_tokens,
            row.output_tokens,
        ]
        if not any(_is_same_run(row, other) for other in alike):
            alike.append(row)
    chosen = {id(row) for alike in kept.values() for row in alike}
    return [row for row in rows if id(row) in chosen]


def _is_same_run(row: Benchmark, other: Benchmark) -> bool:
    return (
        _ratio(row, other, _interval_s) < 1 + _ROUNDING
        and _ratio(row, other, _first_token_s) < 1 + _ROUNDING
    )


def contradictory(rows: Sequence[Benchmark]) -> list[bool]:
    """Of each row, whether others contradict it.

    Runs of one configuration contradict each other where their times differ by more than a factor
    of 1.5. Of a series of loads, a row contradicts another with more requests at once whose tokens
    come 1.5 times as fast, or whose first token comes in a third of the time; rows that contradict
    most others go, until none does.

    Args:
        rows: that state both times.
    """
    found = [False] * len(rows)
    for members in _grouped(rows, lambda row: (_series(row), row.instance_concurrency)):
        if any(_disagree(rows[one], rows[other]) for one in members for other in members):
            for member in members:
                found[member] = True
    for members in _grouped(rows, _series):
        for member in _out_of_line(rows, [number for number in members if not found[number]]):
            found[member] = True
    return found


def _series(row: Benchmark) -> Hashable:
    return row.parallelism, row.input_tokens, row.output_tokens


def _grouped(rows: Sequence[Benchmark], key: Callable[[Benchmark], Hashable]) -> list[list[int]]:
    """Numbers of rows that are alike in a key."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[key(row)].append(number)
    return list(groups.values())


def _out_of_line(rows: Sequence[Benchmark], members: Sequence[int]) -> list[int]:
    """Rows of a series that contradict the rest of it."""
    left = list(members)
    out: list[int] = []
    while True:
        against = {one: sum(_contradict(rows[one], rows[other]) for other in left) for one in left}
        most = max(against.values(), default=0)
        if not most:
            return out
        worst = [number for number in left if against[number] == most]
        out += worst
        left = [number for number in left if number not in worst]


def _disagree(row: Benchmark, other: Benchmark) -> bool:
    """Whether two runs of one configuration contradict each other."""
    intervals = _ratio(row, other, _interval_s)
    first_tokens = _ratio(row, other, _first_token_s)
    return max(intervals, first_tokens) > _REPEATED


def _contradict(row: Benchmark, other: Benchmark) -> bool:
    """Whether the one with more requests at once of two rows is faster than can be."""
    if row.instance_concurrency == other.instance_concurrency:
        return False
    fewer, more = sorted((row, other), key=lambda row: row.instance_concurrency)
    return _interval_s(fewer) > _SHORTER_INTERVAL * _interval_s(more) or _first_token_s(
        fewer
    ) > _SHORTER_FIRST_TOKEN * _first_token_s(more)


def _ratio(row: Benchmark, other: Benchmark, time_s: Callable[[Benchmark], float]) -> float:
    """How many times the shorter of two times the longer is."""
    shorter, longer = sorted((time_s(row), time_s(other)))
    return longer / shorter


def _interval_s(row: Benchmark) -> float:
    assert row.token_interval_s is not None
    return row.token_interval_s


def _first_token_s(row: Benchmark) -> float:
    assert row.first_token_s is not None
    return row.first_token_s
