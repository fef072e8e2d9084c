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
    """A split of units into consecutive stages; the smaller of two is the better one.

    Its order is that of its fields: of equal objectives, fewer units on earlier stages are better.

    Attributes:
        objective: what is to be small.
        counts: units of each stage.
    """

    objective: int
    counts: tuple[int, ...]


#: The objective of a split, from its first stage's cost and the objective of the stages after it.
_Objective = Callable[[int, int], int]


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
    whole_costs = [round(cost * scale) for cost in costs]
    cumulative = [0, *accumulate(whole_costs)]
    fastest, slowest = _least_imbalance(cumulative, num_stages)
    most_alike = _best_split(cumulative, num_stages, fastest, slowest, objective=_sum_of_squares)
    assert most_alike is not None  # the bounds come from such a split
    return list(most_alike.counts)


class _StageBounds(NamedTuple):
    """Costs of the fastest and of the slowest stage of a split."""

    fastest: int
    slowest: int

    @property
    def ratio(self) -> Fraction:
        """How many times slower the slowest stage is."""
        return Fraction(self.slowest, self.fastest)


def _least_imbalance(cumulative: Sequence[int], num_stages: int) -> _StageBounds:
    """Costs of the fastest and the slowest stage where their ratio is least.

    For each cost that a fastest stage may have, the largest first, the slowest stage is made as
    fast as possible.
    """
    total = cumulative[-1]
    mean = Fraction(total, num_stages)  # the slowest stage takes that at least
    best: _StageBounds | None = None
    for fastest in _possible_stage_costs(cumulative):
        if fastest > mean:
            continue
        if best is not None and mean / fastest >= best.ratio:
            break
        split = _best_split(cumulative, num_stages, fastest, total, objective=max)
        if split is None:
            continue
        bounds = _StageBounds(fastest, slowest=split.objective)
        if best is None or bounds.ratio < best.ratio:
            best = bounds
    assert best is not None  # the fastest stage of any split is tried
    return best


def _possible_stage_costs(cumulative: Sequence[int]) -> list[int]:
    """Costs of all runs of consecutive units, the largest first."""
    costs = {end - begin for begin, end in combinations(cumulative, 2)}
    return sorted(costs, reverse=True)


def _sum_of_squares(stage_cost: int, objective_after: int) -> int:
    return stage_cost**2 + objective_after


def _best_split(
    cumulative: Sequence[int],
    num_stages: int,
    min_cost: int,
    max_cost: int,
    objective: _Objective,
) -> _Split | None:
    """The split into stages that cost `min_cost` to `max_cost` each; None if there is none.

    Dynamic programming over the begin of the last k stages.

    Args:
        cumulative: cost of all units before each one, and of all, (n + 1,), ascending.
        num_stages: stages to make.
        min_cost: of a stage.
        max_cost: of a stage.
        objective: what is to be small.
    """
    num_units = len(cumulative) - 1
    # The best split of the units from each one to the end, into as many stages as rounds are done.
    best_from: list[_Split | None] = [None] * num_units + [_Split(0, ())]

    def splits_from(begin: int, best_after: Sequence[_Split | None]) -> Iterator[_Split]:
        """The splits with one stage more, by the end of that stage."""
        for end in range(begin + 1, num_units + 1):
            later = best_after[end]
            cost = cumulative[end] - cumulative[begin]
            if later is not None and min_cost <= cost <= max_cost:
                counts = (end - begin, *later.counts)
                yield _Split(objective(cost, later.objective), counts)

    for _ in range(num_stages):
        best_after = best_from
        best_from = [
            min(splits_from(begin, best_after), default=None) for begin in range(num_units + 1)
        ]
    return best_from[0]
