"""Plans under a peak power cap against every choice there is: `python -m benchmarks.peak_power`.

Pipelines of 8 operations with 4 clocks each, chosen at random with a fixed seed; for each of them
three caps between the least and the greatest peak of its 65,536 choices.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from benchmarks.report import table
from envplan import Frontier, NoAnswerError, Pipeline, Profile, trace_frontier
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W

PIPELINES = 12
SHARES = (0.15, 0.4, 0.7)
SLACK = 1.2


def small(clocks: list[int]) -> Profile:
    """Two stages of growing work on a GPU whose time goes with 1/f and power with f^2.6."""
    rows: list[tuple[object, ...]] = []
    for stage, instruction, work in (
        (0, "forward", 1.0),
        (0, "backward", 2.1),
        (1, "forward", 1.15),
        (1, "backward", 2.415),
    ):
        for mhz in clocks:
            time = round(work * (0.01 + 0.07 * 1740 / mhz), 6)
            power = 90 + 190 * (mhz / 1740) ** 2.6
            rows.append((stage, instruction, mhz, time, round(power * time, 6)))
    return Profile.from_rows(rows)


def everything(frontier: Frontier) -> list[tuple[int, int, int]]:
    """(peak in 10 uW, makespan in ns, energy in 10 fJ) of every choice of options."""
    problem = frontier.problem
    lengths = [len(problem.tables[number]) for number in problem.table.tolist()]
    replays = (
        problem.replay(np.array(rows, np.int32))
        for rows in itertools.product(*(range(length) for length in lengths))
    )
    return [(one.peak_10uw, one.makespan_ns, one.energy_10fj) for one in replays]


def above_best(frontier: Frontier) -> list[tuple[float, float]]:
    """For each cap, how far time, and energy by a deadline, lie above the best; as fractions."""
    choices = everything(frontier)
    low, high = min(choices)[0], max(choices)[0]
    found = []
    for share in SHARES:
        cap_10uw = int(low + share * (high - low))
        fitting = [(time, energy) for peak, time, energy in choices if peak <= cap_10uw]
        best_ns = min(fitting)[0]
        by_ns = int(best_ns * SLACK)
        least_10fj = min(energy for time, energy in fitting if time <= by_ns)
        fastest = frontier.plan(peak_power_cap=cap_10uw / POWER_UNITS_PER_W)
        cheapest = frontier.plan(by_ns / 1e9, peak_power_cap=cap_10uw / POWER_UNITS_PER_W)
        found.append(
            (
                fastest.iteration_time / (best_ns / 1e9) - 1,
                cheapest.energy / (least_10fj / ENERGY_UNITS_PER_J) - 1,
            )
        )
    return found


def main() -> None:
    """Run it and print a table."""
    rng = random.Random(1)
    results: list[tuple[float, float]] = []
    refused = 0
    for _ in range(PIPELINES):
        clocks = sorted(rng.sample(range(600, 1741, 60), 4), reverse=True)
        frontier = trace_frontier(Pipeline("1f1b", 2, 2), small(clocks), blocking_power=70.0)
        try:
            results += above_best(frontier)
        except NoAnswerError:
            refused += 1
    rows = []
    for name, values in zip(("fastest", "cheapest"), zip(*results, strict=True), strict=True):
        best = sum(value < 1e-9 for value in values)
        rows.append((name, f"{best} of {len(values)}", f"{100 * max(values):.2f}"))
    print(table(("plan", "as good as the best", "at worst above it, %"), rows))
    print(f"\n{refused} of {PIPELINES} pipelines with a cap that no plan was found for")


if __name__ == "__main__":
    main()
