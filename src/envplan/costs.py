"""What a training run costs: money and carbon, at fixed rates or at rates that change with time.

A run is a number of iterations of one plan, back to back. It draws the plan's average power all the
while, so what it costs is that power times the integral of the rate over the hours it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from envplan.errors import InputError, NoAnswerError
from envplan.rates import Rate, Steps
from envplan.units import J_PER_KWH, ns_from_s, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.plan import Plan

__all__ = [
    "Costs",
    "Pair",
    "Run",
    "Spent",
    "check_costs",
    "duration_text",
    "parse_duration",
    "tokens_per_iteration",
]

MAX_ITERATIONS: Final = 10**12

#: How far a stated cost may lie from its recomputation.
_TOLERANCE: Final = 1e-9
#: Local minima of the relaxed cost that are rounded to plans, at most.
_MAX_CANDIDATES: Final = 8

_UNITS_S: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}

Minimized = Literal["energy", "money", "carbon"]
Amount = Annotated[float, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Spent(_Model):
    """What an iteration or a run takes, over all GPUs."""

    time_s: Amount
    energy_kwh: Amount
    money: float | None = Field(None, description="in currency units, where a price is known")
    carbon_g: Amount | None = Field(None, description="gCO2, where the carbon intensity is known")


class Pair(_Model):
    """The same work at maximum frequency and by the plan."""

    max_frequency: Spent
    plan: Spent


class Costs(_Model):
    """What a plan was reckoned to cost, with all that is needed to reckon it again."""

    currency: str | None = None
    price: Rate | None = Field(None, description="currency units per kWh")
    carbon: Rate | None = Field(None, description="gCO2 per kWh")
    iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    deadline_s: Amount | None = Field(None, description="the run is over by then")
    minimized: Minimized | None = Field(None, description="what the plan was chosen for")
    iteration: Pair
    run: Pair | None = None


@dataclass(frozen=True)
class Run:
    """A training run to be reckoned.

    Attributes:
        iterations: how many; None: only one iteration is reckoned.
        price: currency units per kWh.
        carbon: gCO2 per kWh.
        currency: what to call the units of money.
        tokens: what the iterations were derived from, if they were.
        deadline_s: when the run must be over, s after its start.
        minimize: what is least for the chosen plan; default: money where there is a price, else
            carbon where that is known, else energy.
    """

    iterations: int | None = None
    price: Rate | None = None
    carbon: Rate | None = None
    currency: str | None = None
    tokens: int | None = None
    deadline_s: float | None = None
    minimize: Minimized | None = None

    def __post_init__(self) -> None:
        """Raises: InputError: parts are missing, or numbers are out of range."""
        if self.iterations is not None and not 1 <= self.iterations <= MAX_ITERATIONS:
            raise InputError(f"iterations must be between 1 and 10^12, not {self.iterations}")
        for kind, rate in (("price", self.price), ("carbon", self.carbon)):
            if rate is not None and not rate.is_fixed and self.iterations is None:
                raise InputError(
                    f"a {kind} that changes with time needs to know how long the run is: give "
                    "--iterations or --tokens"
                )
        if self.minimize == "money" and self.price is None:
            raise InputError("to minimize money, give a price per kWh (--price)")
        if self.minimize == "carbon" and self.carbon is None:
            raise InputError("to minimize carbon, give gCO2 per kWh (--carbon)")

    @classmethod
    def of(cls, costs: Costs) -> Run:
        """The run that a plan's costs were reckoned for."""
        return cls(
            iterations=costs.iterations,
            price=costs.price,
            carbon=costs.carbon,
            currency=costs.currency,
            tokens=costs.tokens,
            deadline_s=costs.deadline_s,
            minimize=costs.minimized,
        )

    @property
    def minimized(self) -> Minimized:
        """What the cheapest plan has least of."""
        if self.minimize is not None:
            return self.minimize
        if self.price is not None:
            return "money"
        return "energy" if self.carbon is None else "carbon"

    @property
    def minimized_rate(self) -> Rate:
        """What is to be least, per kWh."""
        known = {"money": self.price, "carbon": self.carbon, "energy": Rate.fixed(1.0)}
        rate = known[self.minimized]
        assert rate is not None
        return rate

    def reckon(self, plan: Plan) -> Plan:
        """The plan, with what it costs; where it waits for a straggler, until that has finished.

        Raises:
            InputError: a rate ends before the run does.
        """
        iteration, run = _pairs(plan, self.iterations, self.price, self.carbon)
        costs = Costs(
            currency=self.currency,
            price=self.price,
            carbon=self.carbon,
            iterations=self.iterations,
            tokens=self.tokens,
            deadline_s=self.deadline_s,
            minimized=self.minimized if self.deadline_s is not None else None,
            iteration=iteration,
            run=run,
        )
        return plan.model_copy(update={"costs": costs})

    def cheapest_plan(
        self,
        frontier: Frontier,
        *,
        polish: float = 0.0,
        switch_latency: float = 0.0,
        min_dwell: float = 0.0,
        probability: float | None = None,
        noise: float | None = None,
    ) -> Plan:
        """The plan whose run costs least of those that meet the deadline.

        The relaxed cost is exact: between breakpoints of the frontier and changes of the rate it is
        (a + b T)(c + d T) / T, whose least value is known. Its local minima are rounded to plans,
        cheapest first, until none that is left could cost less. Iterations between T_min and T_star
        are looked at: not slower ones, and no pauses until an hour is cheaper.

        Args:
            polish: seconds to spend on improving the plan with CP-SAT.
            switch_latency, min_dwell: as for Frontier.plan; not with polish.
            probability: of the run being over in time though times vary, as noise says; both as for
                Frontier.robust_plan. Iterations vary independently, so late ones make up for early
                ones. Costs are reckoned for exact times. Not with polish or min_dwell.

        Raises:
            NoAnswerError: even at T_min the run takes longer; says how long. Or no plan was found
                that is in time with such clocks, or as surely; says what was.
            InputError: a rate ends before the longest run that was looked at, or the run lacks
                iterations or a deadline.
        """
        if polish > 0 and (switch_latency > 0 or min_dwell > 0):
            raise InputError("polish goes with clocks that change at once and at any time")
        make = partial(frontier.plan, switch_latency=switch_latency, min_dwell=min_dwell)
        if probability is not None:
            if polish > 0 or min_dwell > 0:
                raise InputError("a probability goes neither with a dwell nor with polish")
            make = partial(self._sure_plan, frontier, probability, noise, switch_latency)
        return _cheapest_plan(self, frontier, make, polish)

    def _sure_plan(
        self,
        frontier: Frontier,
        probability: float,
        noise: float | None,
        switch_latency: float,
        time: float,
    ) -> Plan:
        """The plan of least energy found, with iterations up to `time` s, that is sure to be over
        in time."""
        from envplan.frontier.robust import Noise, NoisyRun, robust_plan
        from envplan.frontier.switching import Switching

        assert self.iterations is not None
        assert self.deadline_s is not None
        return robust_plan(
            frontier,
            ns_from_s(time),
            {"kind": "time", "time_s": time},
            probability,
            Noise(noise),
            run=NoisyRun(self.iterations, ns_from_s_floor(self.deadline_s)),
            latency_ns=Switching.from_seconds(switch_latency, 0.0).latency_ns,
        )


def _before_and_after(plan: Plan) -> list[tuple[float, float]]:
    """Time (s) and energy (J) of an iteration at maximum frequency and by the plan; where it waits
    for a straggler, both until that has finished."""
    predicted, straggler_s = plan.predicted, plan.target.straggler_time_s
    before, until = predicted.baseline, predicted.until_straggler
    if until is None or straggler_s is None:
        return [
            (before.iteration_time_s, before.energy_j),
            (predicted.iteration_time_s, predicted.energy_j),
        ]
    return [
        (max(straggler_s, before.iteration_time_s), until.baseline_energy_j),
        (straggler_s, until.energy_j),
    ]


def _pairs(
    plan: Plan, iterations: int | None, price: Rate | None, carbon: Rate | None
) -> tuple[Pair, Pair | None]:
    """What one iteration costs, and what the run does."""
    runs = [
        _spent(time_s, energy_j, iterations or 1, price, carbon)
        for time_s, energy_j in _before_and_after(plan)
    ]
    single = [_share(spent, iterations or 1) for spent in runs]
    run = None if iterations is None else Pair(max_frequency=runs[0], plan=runs[1])
    return Pair(max_frequency=single[0], plan=single[1]), run


def _spent(
    time_s: float, energy_j: float, iterations: int, price: Rate | None, carbon: Rate | None
) -> Spent:
    duration = time_s * iterations
    for rate in (price, carbon):
        if rate is not None:
            _check_span(rate, duration)

    def total(rate: Rate | None) -> float | None:
        if rate is None:
            return None
        if rate.is_fixed:
            return rate.per_kwh[0] * (energy_j * iterations) / J_PER_KWH
        return energy_j / time_s * rate.steps().integral(duration) / J_PER_KWH

    return Spent(
        time_s=duration,
        energy_kwh=energy_j * iterations / J_PER_KWH,
        money=total(price),
        carbon_g=total(carbon),
    )


def _share(spent: Spent, iterations: int) -> Spent:
    return Spent(
        time_s=spent.time_s / iterations,
        energy_kwh=spent.energy_kwh / iterations,
        money=None if spent.money is None else spent.money / iterations,
        carbon_g=None if spent.carbon_g is None else spent.carbon_g / iterations,
    )


def _check_span(rate: Rate, duration_s: float) -> None:
    if duration_s > rate.lasts_s:
        raise InputError(
            f"lasts {duration_text(rate.lasts_s)} from the start of the run, and the run "
            f"{duration_text(duration_s)}; add the rows that are missing, or let it begin again "
            "with --repeat-rates",
            path=rate.file,
        )


class _Candidate(NamedTuple):
    """A local minimum of the relaxed cost: iteration time in ns, cost of the run."""

    time_ns: int
    cost: float


def _cheapest_plan(
    run: Run, frontier: Frontier, make: Callable[[float], Plan], polish: float
) -> Plan:
    if run.iterations is None or run.deadline_s is None:
        raise InputError("a deadline needs to know the work: give --iterations or --tokens")
    least_ns = frontier.min_time_ns * run.iterations
    deadline_ns = ns_from_s_floor(run.deadline_s)
    if deadline_ns < least_ns:
        raise NoAnswerError(
            f"{run.iterations} iterations take at least {duration_text(s_from_ns(least_ns))} "
            f"({s_from_ns(least_ns):.9g} s, at T_min), longer than the deadline of "
            f"{duration_text(run.deadline_s)}"
        )
    latest_ns = min(frontier.min_energy_time_ns, deadline_ns // run.iterations)
    for rate in (run.price, run.carbon):
        if rate is not None:
            _check_span(rate, s_from_ns(latest_ns * run.iterations))
    best: Plan | None = None
    refusal: NoAnswerError | None = None
    least = math.inf
    for candidate in _local_minima(frontier, run.minimized_rate, run.iterations, latest_ns):
        if candidate.cost >= least:
            break
        try:
            plan = make(s_from_ns(candidate.time_ns))
        except NoAnswerError as error:
            refusal = error
            continue
        cost = _cost(plan, run)
        if cost < least:
            best, least = plan, cost
    if best is None:
        raise refusal or NoAnswerError("no plan is in time")
    if polish > 0:
        polished = frontier.plan(best.target.time_s, polish=polish)
        best = polished if _cost(polished, run) <= least else best
    return best


def _cost(plan: Plan, run: Run) -> float:
    assert run.iterations is not None
    money = _spent(plan.iteration_time, plan.energy, run.iterations, run.minimized_rate, None).money
    assert money is not None
    return money


def _local_minima(
    frontier: Frontier, rate: Rate, iterations: int, latest_ns: int
) -> list[_Candidate]:
    """Of the relaxed cost of a run over [T_min, latest], cheapest and then fastest first."""
    if rate.is_fixed and rate.per_kwh[0] > 0:
        return [_Candidate(latest_ns, 0.0)]  # energy only falls until T_star
    steps = rate.steps()

    def energy(time_ns: int) -> float:
        return frontier.energy_at(s_from_ns(time_ns))

    def integral(time_ns: int) -> float:
        return steps.integral(s_from_ns(time_ns) * iterations)

    points: list[int] = []
    for begin, end in pairwise(_bends(frontier, steps, iterations, latest_ns)):
        turn = _turning_point(begin, end, energy, integral)
        points += [begin] if turn is None else [begin, turn]
    points.append(latest_ns)
    costs = [energy(t) / s_from_ns(t) * integral(t) / J_PER_KWH for t in points]
    minima = [
        _Candidate(point, here)
        for point, before, here, after in zip(
            points, [math.inf, *costs], costs, [*costs[1:], math.inf], strict=False
        )
        if before > here <= after
    ]
    return sorted(minima, key=lambda one: (one.cost, one.time_ns))[:_MAX_CANDIDATES]


def _bends(frontier: Frontier, steps: Steps, iterations: int, latest_ns: int) -> list[int]:
    """T_min, latest, and where in between the frontier or the rate bends, ns, ascending."""
    first_ns = frontier.min_time_ns
    bends = {first_ns, latest_ns, *(t for t in frontier.times_ns.tolist() if t < latest_ns)}
    span = (s_from_ns(first_ns) * iterations, s_from_ns(latest_ns) * iterations)
    changes = {ns_from_s(change / iterations) for change in steps.changes(*span)}
    return sorted(bends | {t for t in changes if first_ns < t < latest_ns})


def _turning_point(
    begin: int, end: int, energy: Callable[[int], float], integral: Callable[[int], float]
) -> int | None:
    """Where (a + b T)(c + d T) / T is least strictly inside a piece, if it is: at sqrt(ac / bd)."""
    t0, t1 = s_from_ns(begin), s_from_ns(end)
    b = (energy(end) - energy(begin)) / (t1 - t0)
    d = (integral(end) - integral(begin)) / (t1 - t0)
    a, c = energy(begin) - b * t0, integral(begin) - d * t0
    if a * c <= 0 or b * d <= 0:
        return None
    turn = ns_from_s(math.sqrt(a * c / (b * d)))
    return turn if begin < turn < end else None


def check_costs(plan: Plan) -> list[str]:
    """Prove the costs in a plan from its rates, time and energy.

    Returns:
        A sentence for what was proved; none where the plan has no costs.

    Raises:
        InputError: the first number that is not so.
    """
    costs = plan.costs
    if costs is None:
        return []
    iteration, run = _pairs(plan, costs.iterations, costs.price, costs.carbon)
    _compare("costs.iteration", costs.iteration, iteration)
    _compare("costs.run", costs.run, run)
    if costs.deadline_s is None or costs.iterations is None:
        return ["costs follow from the plan's time and energy and the rates in the file"]
    taken_ns = ns_from_s(_before_and_after(plan)[1][0]) * costs.iterations
    if taken_ns > ns_from_s_floor(costs.deadline_s):
        raise InputError(
            f"{costs.iterations} iterations take {s_from_ns(taken_ns)!r} s, more than the deadline "
            f"of {costs.deadline_s!r} s"
        )
    return [
        "costs follow from the plan's time and energy and the rates in the file",
        f"{costs.iterations} iterations take {s_from_ns(taken_ns)!r} s <= deadline "
        f"{costs.deadline_s!r} s",
    ]


def _compare(name: str, stated: Pair | None, again: Pair | None) -> None:
    if stated is None or again is None:
        if stated is not again:
            raise InputError(f"{name} goes with costs.iterations: both or neither")
        return
    for plan in ("max_frequency", "plan"):
        for field in Spent.model_fields:
            said = getattr(getattr(stated, plan), field)
            true = getattr(getattr(again, plan), field)
            same = said is true or (
                said is not None
                and true is not None
                and math.isclose(said, true, rel_tol=_TOLERANCE, abs_tol=1e-12)
            )
            if not same:
                raise InputError(f"{name}.{plan}.{field} is {said!r}, recomputed {true!r}")


def tokens_per_iteration(frontier: Frontier) -> int:
    """Tokens of one iteration over all replicas, from what the profile's sidecar says.

    Microbatch size x sequence length x microbatches x replicas.

    Raises:
        InputError: the sidecar does not say microbatch_size or sequence_length.
    """
    metadata = frontier.profile.metadata
    length = metadata.extra.get("sequence_length")
    if metadata.microbatch_size is None or not isinstance(length, int) or not 0 < length < 2**31:
        missing = "microbatch_size" if metadata.microbatch_size is None else "sequence_length"
        raise InputError(
            f"how many tokens has an iteration? Give --tokens-per-iteration (the sidecar of "
            f"profile {frontier.profile.name} does not say {missing})"
        )
    batch = metadata.microbatch_size * frontier.pipeline.num_microbatches * frontier.replicas
    return batch * length


def parse_duration(text: str, option: str) -> float:
    """Seconds of a duration such as 14d, 36h, 90m, 3600s or 1d12h.

    Raises:
        InputError: it is none.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if not parts or "".join(map("".join, parts)) != text or len(text) > 40:
        raise InputError(
            f"{option} must be a number with a unit, such as 14d, 36h, 90m, 3600s or 1d12h, "
            f"not {text}"
        )
    return float(sum(Decimal(number) * _UNITS_S[unit] for number, unit in parts))


def duration_text(seconds: float) -> str:
    """A duration in its two largest units, rounded: "13 d 7 h"."""
    if seconds < 60:
        return f"{seconds:.4g} s"
    names = ("d", "h", "m", "s")
    for larger, smaller in pairwise(names):
        unit = _UNITS_S[larger]
        if seconds >= unit:
            whole, rest = divmod(round(seconds / _UNITS_S[smaller]), unit // _UNITS_S[smaller])
            return f"{whole} {larger} {rest} {smaller}" if rest else f"{whole} {larger}"
    return f"{seconds:.4g} s"
