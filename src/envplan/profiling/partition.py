"""Splitting the layers of a model over pipeline stages, as evenly as it can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations
from typing import Final, NamedTuple

from envplan.errors import InputError

__all__ = ["partition"]

# Costs are compared as integers, of which all units together make this many: equal units stay
# equal, and ties are broken by rule instead of by rounding.
_RESOLUTION: Final = 10**12


class _Split(NamedTuple):
    """A split of units into consecutive stages.

    Attributes:
        figure: what is to be small.
        counts: units of each stage.
    """

    figure: int
    counts: tuple[int, ...]


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Units per stage such that the slowest stage is the least times slower than the fastest.

    That ratio is how Perseus (SOSP 2024) measures imbalance. Of equal splits the one whose stages
    are most alike wins (least sum of squared costs), then the one with fewer units on earlier
    stages: those keep the activations of more microbatches.

    Args:
        costs: of each unit, above 0, in order.
        num_stages: stages, each of which gets at least one unit.

    Returns:
        num_stages counts that sum to len(costs).

    Raises:
        InputError: there are more stages than units, or none.
    """
    num_units = len(costs)
    if not 1 <= num_stages <= num_units:
        raise InputError(
            f"{num_units} layers cannot be split over {num_stages} stages; choose 1 to "
            f"{num_units} stages"
        )
    scale = _RESOLUTION / sum(costs)
    cumulative = [0, *accumulate(round(cost * scale) for cost in costs)]
    fastest, slowest = _least_imbalance(cumulative, num_stages)
    most_alike = _best_split(cumulative, num_stages, fastest, slowest, _sum_of_squares)
    assert most_alike is not None  # the bounds come from such a split
    return list(most_alike.counts)


def _least_imbalance(cumulative: Sequence[int], num_stages: int) -> tuple[int, int]:
    """Costs of the fastest and the slowest stage where their ratio is least.

    For each cost that a fastest stage may have, the largest first, the slowest stage is made as
    fast as possible.
    """
    mean = Fraction(cumulative[-1], num_stages)  # the slowest stage takes that at least
    best_fastest = best_slowest = 0
    for fastest in _possible_stage_costs(cumulative):
        if fastest > mean:
            continue
        if best_fastest and mean / fastest >= Fraction(best_slowest, best_fastest):
            break
        split = _best_split(cumulative, num_stages, fastest, cumulative[-1], max)
        if split is None:
            continue
        is_better = split.figure * best_fastest < best_slowest * fastest
        if not best_fastest or is_better:
            best_fastest, best_slowest = fastest, split.figure
    return best_fastest, best_slowest


def _possible_stage_costs(cumulative: Sequence[int]) -> list[int]:
    """Costs of all runs of consecutive units, the largest first."""
    costs = {end - begin for begin, end in combinations(cumulative, 2)}
    return sorted(costs, reverse=True)


def _sum_of_squares(stage_cost: int, later_stages: int) -> int:
    return stage_cost**2 + later_stages


def _best_split(
    cumulative: Sequence[int],
    num_stages: int,
    min_cost: int,
    max_cost: int,
    combine: Callable[[int, int], int],
) -> _Split | None:
    """The split into stages that cost `min_cost` to `max_cost` each; None if there is none.

    Dynamic programming over the begin of the last k stages.

    Args:
        cumulative: cost of all units before each one, and of all, (n + 1,), ascending.
        num_stages: stages to make.
        min_cost: of a stage.
        max_cost: of a stage.
        combine: the figure to be small, of a stage's cost and the figure of the stages after it; of
            equal ones fewer units on earlier stages win.
    """
    num_units = len(cumulative) - 1
    # The best split of the units from each one to the end.
    best_from: list[_Split | None] = [None] * num_units + [_Split(0, ())]

    def splits_from(begin: int, best_after: Sequence[_Split | None]) -> Iterator[_Split]:
        """The splits with one stage more, by the end of that stage."""
        for end in range(begin + 1, num_units + 1):
            later = best_after[end]
            cost = cumulative[end] - cumulative[begin]
            if later is not None and min_cost <= cost <= max_cost:
                yield _Split(combine(cost, later.figure), (end - begin, *later.counts))

    for _ in range(num_stages):
        best_from = [
            min(splits_from(begin, best_from), default=None) for begin in range(num_units + 1)
        ]
    return best_from[0]
