"""How well measured rows predict each other without any model: what a model cannot be better than.

A row is predicted by the geometric mean of others: of the same configuration, of the same under
other versions of the engine, or of the loads with half and twice as many requests at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from envplan.serving.identify.benchmark import Benchmark

FloatArray = npt.NDArray[np.float64]


def print_spread(title: str, rows: Sequence[Benchmark]) -> None:
    """Print relative errors of rows with prefill and decode on the same GPUs, by other rows.

    Args:
        title: what the rows are.
        rows: that state both times.
    """
    aggregated = [row for row in rows if not row.disaggregated]
    predictors = {
        "by runs of the same configuration": same_configuration(aggregated),
        "by other versions of the engine": other_versions(aggregated),
        "by half and twice as many requests": nearest_loads(aggregated),
    }
    for name, others in predictors.items():
        for number, time in enumerate(("interval", "first")):
            errors = relative_errors(aggregated, others)[:, number]
            best = errors[: max(1, int(0.95 * len(errors)))]
            print(
                f"{title}, {name}, {time}: {len(errors)} rows, rms {_rms(errors):.3f}, without "
                f"the worst twentieth {_rms(best):.3f}, median {np.median(errors):.3f}"
            )


def same_configuration(rows: Sequence[Benchmark]) -> list[list[int]]:
    """Of each row, the numbers of the others of the same software, parallelism and load."""
    groups = _grouped(rows, lambda row: (row.parallelism, _load(row)))
    return [
        [other for other in groups[row.parallelism, _load(row)] if other != number]
        for number, row in enumerate(rows)
    ]


def other_versions(rows: Sequence[Benchmark]) -> list[list[int]]:
    """Of each row, the numbers of those that differ in the engine's version alone."""

    def but_for_version(row: Benchmark) -> Hashable:
        gpus = (row.num_gpus, row.attention_groups, row.layout)
        return row.pair, row.engine, row.precision, gpus, _load(row)

    groups = _grouped(rows, but_for_version)
    return [
        [other for other in groups[but_for_version(row)] if rows[other].version != row.version]
        for row in rows
    ]


def nearest_loads(rows: Sequence[Benchmark]) -> list[list[int]]:
    """Of each row, the numbers of those with half and twice as many requests, if there are both."""
    groups = _grouped(rows, lambda row: (row.parallelism, _load(row)))
    found = []
    for row in rows:
        fewer, more = (groups.get((row.parallelism, _load(row, times)), []) for times in (0.5, 2.0))
        # As many of either, so that neither side weighs more.
        found.append(fewer * len(more) + more * len(fewer))
    return found


def relative_errors(rows: Sequence[Benchmark], others: Sequence[Sequence[int]]) -> FloatArray:
    """Absolute relative errors of both times of the rows that have others, each column ascending.

    Args:
        rows: that state both times.
        others: of each row, the numbers of those whose geometric mean predicts it.
    """
    logs = np.log([(row.token_interval_s or np.nan, row.first_token_s or np.nan) for row in rows])
    errors = [
        np.abs(np.exp(logs[list(numbers)].mean(axis=0) - logs[number]) - 1)
        for number, numbers in enumerate(others)
        if numbers
    ]
    return np.sort(np.array(errors).reshape(-1, 2), axis=0)


def _load(row: Benchmark, times: float = 1.0) -> Hashable:
    """Lengths, and the requests at once times a factor."""
    return row.input_tokens, row.output_tokens, times * row.concurrency


def _grouped(
    rows: Sequence[Benchmark], key: Callable[[Benchmark], Hashable]
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[key(row)].append(number)
    return groups


def _rms(errors: FloatArray) -> float:
    return float(np.sqrt(np.mean(errors**2)))
