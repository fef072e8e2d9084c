"""Gives the compiled core arguments that are wrong in one place, for a while.

What envplan hands over is recorded from real work; then an entry, a size or a whole argument is
replaced. The core must refuse it by an exception, or work. It must not die: the test that starts
this program sees that.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import envplan
from envplan import _kernel, _serving
from envplan.cli.app import run

FIXTURES = Path(__file__).parent / "fixtures"

EXTREMES = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**40, 2**58, 2**62, 2**63 - 1, -(2**63)]
REFUSALS = (ValueError, TypeError, OverflowError, IndexError, MemoryError, KeyError)

Recorded = list[tuple[type, tuple[Any, ...], dict[str, Any]]]


def record() -> Recorded:
    """The arguments that the classes of the core are made with while two jobs are planned."""
    made: Recorded = []

    def recording(kind: type) -> Any:
        def make(*args: Any, **keywords: Any) -> Any:
            made.append((kind, args, keywords))
            return kind(*args, **keywords)

        return make

    modules = [
        (_kernel, ["ParametricFlow", "Problem", "Rounding", "Search", "compose"]),
        (_serving, ["Service", "Replay"]),
    ]
    kept = [(module, name, getattr(module, name)) for module, names in modules for name in names]
    for module, name, kind in kept:
        setattr(module, name, recording(kind))
    profile = envplan.Profile.builtin("v100-gpt-125m-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 6), profile)
    frontier.plan(slowdown=0.02)
    frontier.plan(slowdown=0.02, switch_latency=0.005, min_dwell=0.02)
    parts = envplan.Profile.read_csv(FIXTURES / "v0.1" / "parts" / "profile.csv")
    envplan.trace_frontier(envplan.Pipeline("1f1b", parts.num_stages, 4), parts)
    with suppress(SystemExit):
        run(["serving", "compare", "--trace", str(FIXTURES / "now" / "requests.csv"), "--quiet"])
    for module, name, kind in kept:
        setattr(module, name, kind)
    return made


def spoil(value: Any, random: Random) -> Any:
    """An argument with something wrong in it."""
    if isinstance(value, np.ndarray) and value.size:
        match random.randrange(6):
            case 0:
                return None
            case 1:
                return value[: random.randrange(len(value) + 1)].copy()
            case _:
                spoilt = value.copy()
                for _ in range(random.randint(1, 3)):
                    at = random.randrange(spoilt.size)
                    extreme = random.choice(EXTREMES)
                    if spoilt.dtype.kind == "f":
                        extreme = random.choice([float("nan"), float("inf"), -1.0, 1e300])
                    else:
                        extreme = max(
                            min(extreme, np.iinfo(spoilt.dtype).max), np.iinfo(spoilt.dtype).min
                        )
                    spoilt.flat[at] = extreme
                return spoilt
    if isinstance(value, bool) or value is None:
        return random.choice([None, True, False, 3, "x"])
    if isinstance(value, int):
        return random.choice(EXTREMES)
    if isinstance(value, float):
        return random.choice([float("nan"), float("inf"), -1.0, 1e300, 0.0])
    return random.choice([None, 3, value])


def exercise(kind: type, made: Any, random: Random) -> None:
    """Call what an object of the core offers, with wrong arguments now and then."""
    sizes = [0, 1, 5, 48, 97, 1000]

    def array(dtype: str, n: int | None = None) -> Any:
        n = random.choice(sizes) if n is None or random.random() < 0.3 else n
        low, high = (0, 3) if random.random() < 0.5 else (-(2**31), 2**31 - 1)
        return np.array([random.randint(low, high) for _ in range(n)], dtype)

    calls: list[Any] = []
    if kind is _kernel.ParametricFlow:
        n, m = made.num_nodes, made.num_arcs
        flow = array("int64", m)
        if len(flow) and random.random() < 0.5:
            flow[random.randrange(len(flow))] = random.choice(EXTREMES)
        times = array("int64", n)
        calls = [
            lambda: made.solve_at_flow(flow, None, random.choice(EXTREMES)),
            lambda: made.solve_at_flow(flow, times, 7, is_rough=True),
            lambda: made.solve_at_time(flow, times, random.choice(EXTREMES)),
            lambda: made.optimum(),
            lambda: trace(made, random, array),
        ]
    elif kind is _kernel.Problem:
        rows = array("int32", made.num_operations)
        latency, ahead = random.choice([0, 10**7, *EXTREMES]), random.random() < 0.5
        factors = random.choice(
            [None, np.full(len(rows), random.choice([1.0, -1.0, 1e300, np.nan]))]
        )
        prices = np.full(random.choice([len(rows), 12]), random.choice([0.0, 1e9, np.nan, -1e300]))
        calls = [
            lambda: made.replay(rows, latency, ahead, factors),
            lambda: made.parts(rows, latency, ahead, factors),
            lambda: made.power_steps(rows, latency, ahead, factors),
            lambda: made.requests(rows, latency, ahead, factors),
            lambda: made.makespans(rows, latency, ahead, np.ones((2, len(rows)))),
            lambda: made.cheapest_stage_path(
                random.choice([0, 3, 4, -1]),
                latency,
                ahead,
                random.choice(EXTREMES),
                1e9,
                prices,
                prices,
            ),
        ]
    elif kind is _kernel.Search:
        rows = array("int32", 48)
        calls = [
            lambda: made.score(rows),
            lambda: made.improve(
                rows, random.choice([-1, 0, 200]), random.choice([0.0, 1.0, np.nan]), 7
            ),
            lambda: made.constant(random.choice([0, 1, -1])),
        ]
    elif kind is _kernel.Rounding:
        choice = array("int32", 48)
        calls = [made.round, lambda: made.improve(choice, random.choice([-1, 0, 200]), 1.0, 7)]
    elif kind is _serving.Service:
        calls = [
            lambda: made.counts(
                random.choice([-1.0, 0.0, np.nan, 1e300]), random.choice([1e300, 5.0])
            ),
            lambda: made.need(
                0.0, 1e4, random.choice([0, 1, 511, 2**32 - 1]), random.choice([0, -1, 9]), 0.01
            ),
        ]
    elif kind is _serving.Replay:
        number = random.choice([0, 1, -1, 10**6, 2**31 - 1])
        size, clock = random.choice([0, 1, -1, 10**6]), random.choice([0, 3, -1, 10**6])
        calls = [
            lambda: made.start(
                random.choice([0, 1, -1, 10**6]),
                size,
                clock,
                True,
                random.choice([0.0, np.nan, 1e300]),
            ),
            lambda: made.start(0, 0, 0, True, 0.0),
            lambda: made.retire(number),
            lambda: made.move(number, random.choice([0, -1, 10**6]), clock, False),
            lambda: made.route(
                random.choice([0, 8, 9, -1]),
                random.choice([0, -1, 10**6]),
                random.choice([[], [0], [-1, 10**6]]),
            ),
            lambda: made.set_pack(random.choice([0, -1, 10**6]), True),
            lambda: made.advance(random.choice([-1.0, 10.0, 600.0, np.nan])),
            made.instances,
            made.gpus,
            made.results,
        ]
    elif kind is _kernel.compose:
        calls = []
    for call in random.sample(calls, len(calls)):
        with suppress(*REFUSALS):
            call()


def trace(flow: Any, random: Random, array: Any) -> None:
    """Walk a frontier with watched arcs and times that are none."""
    made = flow.trace(random.choice([-1, 0, 5, 2**62]))
    for call in (
        lambda: made.watch(array("int32"), array("int32")),
        lambda: made.extend(random.choice(EXTREMES)),
        lambda: made.optimum_at(random.choice(EXTREMES)),
        lambda: made.breakpoints(),
        lambda: made.periods(),
    ):
        with suppress(*REFUSALS):
            call()


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    made, random, end, tried = record(), Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind, args, keywords = random.choice(made)
        tried += 1
        spoilt_args, spoilt = list(args), dict(keywords)
        if random.random() < 0.8:
            if spoilt and (not spoilt_args or random.random() < 0.5):
                name = random.choice(list(spoilt))
                spoilt[name] = spoil(spoilt[name], random)
            elif spoilt_args:
                at = random.randrange(len(spoilt_args))
                spoilt_args[at] = spoil(spoilt_args[at], random)
        with suppress(*REFUSALS):
            exercise(kind, kind(*spoilt_args, **spoilt), random)
    print(tried)


if __name__ == "__main__":
    main()
