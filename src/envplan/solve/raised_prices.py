"""Prices at which the bound of late and held clocks is high.

The bound is a concave function of the prices, the Lagrangian dual of the choice of clocks. For each
stage its least cost is the minimum over paths, each linear in the prices. So a linear program over
the paths found so far overestimates the bound, and its optimum says which prices to try next. That
is Dantzig-Wolfe decomposition as Kelley's cutting planes see it (Kelley 1960). Trial prices stay
within a box around the best ones (Marsten, Hogan and Blankenship 1975), since the program knows
little of prices far from those tried.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.pipeline import Pipeline
from envplan.pipeline.spec import DAG_SCHEDULE
from envplan.plan.late_clock_prices import (
    LateClockPrices,
    PriceClasses,
    is_next_on_stage,
    precedences,
)
from envplan.solve.late_bound import (
    ClockLimits,
    FlowPrices,
    PricedBound,
    StagePaths,
    cheapest_stage_paths,
)
from envplan.units import ENERGY_UNITS_PER_J, NS_PER_S, POWER_UNITS_PER_W

if TYPE_CHECKING:
    from ortools.linear_solver.pywraplp import Solver, Variable

#: Trial prices at most, for so many classes of prices; fewer where there are more classes.
_MAX_ROUNDS: Final = 32
_CLASSES_FOR_MAX_ROUNDS: Final = 470
_MIN_ROUNDS: Final = 8
#: Where there are more classes, the linear programs take too long.
_MAX_CLASSES: Final = 5000
#: Prices of pipelines with more microbatches are those of one with so many.
_MAX_MICROBATCHES: Final = 24
#: Microbatches at each end with prices of their own: at least so many, and one for each stage.
_LEAST_ENDS: Final = 8
#: The box around the best prices, as parts of the whole flow: at first, at least, and at most.
_FIRST_BOX, _LEAST_BOX, _LARGEST_BOX = 0.005, 0.002, 1.0
#: A round that brings so much of what was predicted enlarges the box; less makes it smaller.
_GOOD_SHARE: Final = 0.5
_ENLARGED, _SHRUNK = 1.5, 0.8
#: A predicted gain below this part of the energy ends the search.
_TOLERANCE: Final = 2e-6


@dataclass(frozen=True)
class Trial:
    """Prices that were tried.

    Attributes:
        prices_w: of each class, W.
        bound_10fj: of one GPU a stage, 10 fJ.
    """

    prices_w: NDArray[np.float64]
    bound_10fj: int

    @property
    def prices_10uw(self) -> NDArray[np.int64]:
        """The prices in whole 10 uW."""
        rounded: NDArray[np.int64] = np.rint(
            np.maximum(self.prices_w, 0) * POWER_UNITS_PER_W
        ).astype(np.int64)
        return rounded


def raised_prices(
    relaxation: Relaxation, deadline_ns: int, clocks: ClockLimits, effort: float = 1.0
) -> LateClockPrices | None:
    """The best prices found for a deadline, from those of the relaxed optimum on.

    Prices of a long pipeline are found on a shorter one, which repeats itself as it does, at the
    deadline where time is worth as much.

    Args:
        relaxation: of the pipeline.
        deadline_ns: not below T_min, ns.
        clocks: how late they come and how long they are held.
        effort: share of the usual trials, at most 1.

    Returns:
        None where none were looked for, in very large pipelines, or none were found.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    pipeline = relaxation.pipeline
    if pipeline.num_microbatches > _MAX_MICROBATCHES and pipeline.schedule != DAG_SCHEDULE:
        shorter = pipeline.with_microbatches(_MAX_MICROBATCHES)
        slope_10uw = relaxation.slope_10uw(deadline_ns)
        relaxation = relaxation.retraced(shorter, relaxation.profile)
        deadline_ns = _deadline_of_slope_ns(relaxation, slope_10uw)
    half = -(-relaxation.pipeline.num_microbatches // 2)
    num_ends = min(max(_LEAST_ENDS, pipeline.num_stages), half)
    classes = PriceClasses(relaxation.pipeline, num_ends)
    num_distinct = len(np.unique(classes.of_precedences))
    if num_distinct > _MAX_CLASSES:
        return None
    search = _PriceSearch(relaxation, deadline_ns, clocks, classes)
    share = min(1.0, effort, _CLASSES_FOR_MAX_ROUNDS / max(1, num_distinct))
    best = search.run(max(_MIN_ROUNDS, round(_MAX_ROUNDS * share)))
    return None if best is None else LateClockPrices.of_classes(classes, best.prices_10uw)


def _deadline_of_slope_ns(relaxation: Relaxation, slope_10uw: int) -> int:
    """The latest time around which a ns more saves at least as much power, from T_min to T_star."""
    earliest_ns, latest_ns = relaxation.min_time_ns, relaxation.min_energy_time_ns
    while earliest_ns < latest_ns:
        middle_ns = (earliest_ns + latest_ns + 1) // 2
        if relaxation.slope_10uw(middle_ns) >= slope_10uw:
            earliest_ns = middle_ns
        else:
            latest_ns = middle_ns - 1
    return earliest_ns


class _PriceSearch:
    """Tries prices, each where the linear program expects most within the box."""

    def __init__(
        self, relaxation: Relaxation, deadline_ns: int, clocks: ClockLimits, classes: PriceClasses
    ) -> None:
        self._relaxation = relaxation
        self._deadline_ns = deadline_ns
        self._clocks = clocks
        self._classes = classes
        self._master = _Master(relaxation, deadline_ns, classes)
        relaxed = FlowPrices.relaxed(relaxation, deadline_ns)
        mean_w = classes.mean(relaxed.arcs_10uw) / POWER_UNITS_PER_W
        self._center_w = _nearest_flow(relaxation.pipeline, classes, mean_w)
        self._whole_w = max(relaxed.total_10uw, relaxation.total_power_10uw) / POWER_UNITS_PER_W
        self._master.add_paths(self._paths(relaxed))

    def run(self, max_rounds: int) -> Trial | None:
        """The best prices found in so many trials; None: no flow was found."""
        if self._center_w is None:
            return None
        best, paths = self._try(self._center_w)
        self._master.add_paths(paths)
        box = _FIRST_BOX
        for _ in range(max_rounds):
            predicted = self._master.best_within(self._center_w, box * self._whole_w)
            if predicted is None:  # numbers that the program is not solved with; others may do
                box = max(_LEAST_BOX, box * _SHRUNK)
                continue
            prices_w, predicted_j = predicted
            trial, paths = self._try(prices_w)
            self._master.add_paths(paths)
            best_j = best.bound_10fj / ENERGY_UNITS_PER_J
            gain_j = (trial.bound_10fj - best.bound_10fj) / ENERGY_UNITS_PER_J
            is_good = gain_j > _GOOD_SHARE * (predicted_j - best_j)
            if gain_j > 0:
                best = trial
                self._center_w = prices_w
            box = min(_LARGEST_BOX, box * _ENLARGED) if is_good else max(_LEAST_BOX, box * _SHRUNK)
            if predicted_j - best_j < _TOLERANCE * best_j:
                break
        return best

    def _try(self, prices_w: NDArray[np.float64]) -> tuple[Trial, StagePaths]:
        trial = Trial(prices_w, 0)
        arcs_10uw = trial.prices_10uw[self._classes.of_precedences]
        prices = FlowPrices.of_arcs(self._relaxation.pipeline, arcs_10uw)
        paths = self._paths(prices)
        bound = PricedBound.of_paths(self._relaxation, prices, paths)
        return Trial(prices_w, bound.energy_10fj(self._deadline_ns)), paths

    def _paths(self, prices: FlowPrices) -> StagePaths:
        return cheapest_stage_paths(
            self._relaxation.problem,
            prices,
            self._clocks.machine,
            min_dwell_ns=self._clocks.min_dwell_ns,
        )


class _FlowProgram:
    """A linear program over flows whose precedences of a class carry the same, in W.

    Attributes:
        prices: the variable of each class that has precedences.
        sources, sinks: what flows from the beginning to operations, and from operations to the end.
        counts: how many precedences each class has.
    """

    def __init__(self, pipeline: Pipeline, classes: PriceClasses) -> None:
        from ortools.linear_solver import pywraplp  # takes a while to import

        self.solver: Solver = pywraplp.Solver.CreateSolver("GLOP")
        # A basis stays dual feasible where rows come in and bounds move.
        self.solver.SetSolverSpecificParametersAsString("use_dual_simplex: true")
        self.infinity: float = self.solver.infinity()
        self.flows = _Flows(pipeline, classes)
        self.num_classes = classes.num_classes
        self.counts = np.bincount(classes.of_precedences, minlength=classes.num_classes)
        self.prices = {k: self._flow() for k in np.flatnonzero(self.counts).tolist()}
        self.sources = {i: self._flow() for i in self.flows.from_beginning}
        self.sinks = {i: self._flow() for i in self.flows.to_end}
        self._conserve()

    def _flow(self) -> Variable:
        return self.solver.NumVar(0, self.infinity, "")

    def _conserve(self) -> None:
        """What flows into an operation flows out of it; equal operations have one constraint."""
        variables = {"price": self.prices, "source": self.sources, "sink": self.sinks}
        known = set[frozenset[tuple[tuple[str, int], int]]]()
        for operation, (into, out_of) in enumerate(
            zip(self.flows.into, self.flows.out_of, strict=True)
        ):
            terms = Counter[tuple[str, int]]()
            terms.update(("price", k) for k in into)
            terms.subtract(("price", k) for k in out_of)
            if operation in self.sources:
                terms["source", operation] = 1
            if operation in self.sinks:
                terms["sink", operation] = -1
            if frozenset(terms.items()) in known:
                continue
            known.add(frozenset(terms.items()))
            row = self.solver.Constraint(0, 0)
            for (name, key), factor in terms.items():
                row.SetCoefficient(variables[name][key], factor)

    def solved(self) -> bool:
        """Solve it; whether that is an optimum."""
        from ortools.linear_solver import pywraplp

        if self.solver.Solve() == self.solver.OPTIMAL:
            return True
        # The basis of the last program may be of no use for this one.
        afresh = pywraplp.MPSolverParameters()
        afresh.SetIntegerParam(afresh.INCREMENTALITY, afresh.INCREMENTALITY_OFF)
        return bool(self.solver.Solve(afresh) == self.solver.OPTIMAL)

    def solution_w(self) -> NDArray[np.float64]:
        """The prices of the last solution, (num_classes,)."""
        prices_w = np.zeros(self.num_classes)
        for k, price in self.prices.items():
            prices_w[k] = price.solution_value()
        return prices_w


def _nearest_flow(
    pipeline: Pipeline, classes: PriceClasses, prices_w: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The flow that differs least from some prices, summed over all precedences, (num_classes,)."""
    program = _FlowProgram(pipeline, classes)
    objective = program.solver.Objective()
    objective.SetMinimization()
    for k, price in program.prices.items():
        difference = program.solver.NumVar(0, program.infinity, "")
        objective.SetCoefficient(difference, float(program.counts[k]))
        for sign in (-1, 1):
            row = program.solver.Constraint(sign * float(prices_w[k]), program.infinity)
            row.SetCoefficient(price, sign)
            row.SetCoefficient(difference, 1)
    return program.solution_w() if program.solved() else None


class _Master:
    """The linear program: conserved prices, in W, whose bound by the paths known so far is highest.

    Besides the prices, its variables are what each stage costs.
    """

    def __init__(self, relaxation: Relaxation, deadline_ns: int, classes: PriceClasses) -> None:
        self._pipeline = relaxation.pipeline
        self._classes = classes
        self._program = _FlowProgram(self._pipeline, classes)
        self._costs = [
            self._program.solver.NumVar(-self._program.infinity, self._program.infinity, "")
            for _ in range(self._pipeline.num_stages)
        ]
        self._maximize(relaxation.total_power_10uw / POWER_UNITS_PER_W, deadline_ns / NS_PER_S)

    def _maximize(self, waiting_w: float, deadline_s: float) -> None:
        """The bound: costs of stages and lags, less what the time until the deadline is worth."""
        whole = self._program.solver.NumVar(waiting_w, self._program.infinity, "")
        total = self._program.solver.Constraint(0, 0)
        total.SetCoefficient(whole, -1)
        for sink in self._program.sinks.values():
            total.SetCoefficient(sink, 1)
        objective = self._program.solver.Objective()
        objective.SetMaximization()
        objective.SetOffset(waiting_w * deadline_s)
        objective.SetCoefficient(whole, -deadline_s)
        for cost in self._costs:
            objective.SetCoefficient(cost, 1)
        lags_s = np.zeros(self._classes.num_classes)
        np.add.at(lags_s, self._classes.of_precedences, self._pipeline.succ_lag_ns / NS_PER_S)
        for k, price in self._program.prices.items():
            objective.SetCoefficient(price, float(lags_s[k]))

    def add_paths(self, paths: StagePaths) -> None:
        """No stage costs more than a path that it may take."""
        program = self._program
        for stage, (first, last) in enumerate(pairwise(self._pipeline.stage_begin.tolist())):
            row = program.solver.Constraint(
                -program.infinity, paths.energies_10fj[stage] / ENERGY_UNITS_PER_J
            )
            row.SetCoefficient(self._costs[stage], 1)
            if first == last:
                continue
            seconds: defaultdict[int, float] = defaultdict(float)  # that each price is paid for
            for operation in range(first, last):
                time_s = float(paths.times_ns[operation]) / NS_PER_S
                for k in program.flows.into[operation]:
                    seconds[k] += time_s
                wait_s = float(paths.waits_ns[operation]) / NS_PER_S
                if operation == first:
                    row.SetCoefficient(program.sources[first], -(time_s + wait_s))
                elif operation in program.sources:
                    row.SetCoefficient(program.sources[operation], -time_s)
                if operation > first and wait_s:
                    seconds[program.flows.next_on_stage[operation]] += wait_s
            for k, paid_s in seconds.items():
                row.SetCoefficient(program.prices[k], -paid_s)
            end_wait_s = float(paths.end_waits_ns[stage]) / NS_PER_S
            row.SetCoefficient(program.sinks[last - 1], -end_wait_s)

    def best_within(
        self, center_w: NDArray[np.float64], box_w: float
    ) -> tuple[NDArray[np.float64], float] | None:
        """The prices that promise most, (num_classes,), W, and the bound that they promise, J.

        Args:
            center_w: prices by class.
            box_w: by how much each may differ at most.

        Returns:
            None where there is no flow within the box.
        """
        for k, price in self._program.prices.items():
            center = float(center_w[k])
            reach_w = box_w / float(self._program.counts[k]) ** 0.5
            price.SetBounds(max(0.0, center - reach_w), center + reach_w)
        if not self._program.solved():
            return None
        return self._program.solution_w(), self._program.solver.Objective().Value()


class _Flows:
    """Which classes of prices flow into and out of each operation.

    Attributes:
        into, out_of: the classes of each operation's precedences.
        next_on_stage: the class of the precedence from the operation before on the same stage, by
            operation.
        from_beginning: operations that may get flow straight from the beginning: those that wait
            for none, and the first of each stage.
        to_end: those from which it may go straight to the end, likewise.
    """

    def __init__(self, pipeline: Pipeline, classes: PriceClasses) -> None:
        num_operations = len(pipeline.operations)
        before, after = precedences(pipeline)
        is_next = is_next_on_stage(pipeline)
        self.into: list[list[int]] = [[] for _ in range(num_operations)]
        self.out_of: list[list[int]] = [[] for _ in range(num_operations)]
        self.next_on_stage: dict[int, int] = {}
        arcs = zip(
            before.tolist(),
            after.tolist(),
            classes.of_precedences.tolist(),
            is_next.tolist(),
            strict=True,
        )
        for earlier, later, k, follows in arcs:
            self.out_of[earlier].append(k)
            self.into[later].append(k)
            if follows:
                self.next_on_stage[later] = k
        bounds = [pair for pair in pairwise(pipeline.stage_begin.tolist()) if pair[0] < pair[1]]
        firsts, lasts = {first for first, _ in bounds}, {last - 1 for _, last in bounds}
        self.from_beginning = sorted(
            firsts.union(i for i, into in enumerate(self.into) if not into)
        )
        self.to_end = sorted(lasts.union(i for i, out in enumerate(self.out_of) if not out))
