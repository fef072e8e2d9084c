"""Hypothesis strategies for profiles, pipelines and whole requests for plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from envplan.costs import Rate, Run
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.schedules import schedules_of_any_chunks
from envplan.profile import Profile
from envplan.request import Request
from envplan.solve import Frontier, trace_frontier
from envplan.units import POWER_UNITS_PER_W, j_from_10fj, s_from_ns

#: Round numbers make ties, uneven ones make none: both belong in tests.
_TIMES = st.one_of(
    st.integers(1, 12).map(lambda t: t * 0.01), st.floats(0.001, 0.5).map(lambda t: round(t, 9))
)
_ENERGIES = st.one_of(
    st.integers(1, 60).map(float), st.floats(0.0, 80.0).map(lambda e: round(e, 6))
)


def _rows(profile: Profile) -> list[tuple[int, str, int, float, float]]:
    """Stage, instruction, MHz, s and J of a profile's forwards and backwards."""
    return [
        (table.stage, table.instruction, mhz, s_from_ns(time), j_from_10fj(energy))
        for stage in range(profile.num_stages)
        for table in (profile.table(stage, name) for name in ("forward", "backward"))
        for mhz, _, time, energy in table.options()
    ]


def noisy(modelled: Profile, noise: float = 0.002) -> Profile:
    """A profile as a measurement would see it: seeded relative noise on times and energies."""
    rng = np.random.default_rng(1)
    return Profile.from_rows(
        [
            (*of, time * rng.normal(1, noise), energy * rng.normal(1, noise))
            for *of, time, energy in _rows(modelled)
        ]
    )


def slower(profile: Profile, factor: float) -> Profile:
    """The same work on GPUs that take so many times as long, at the same energy."""
    rows = [(*of, time * factor, energy) for *of, time, energy in _rows(profile)]
    return Profile.from_rows(rows, name="slower")


@st.composite
def profiles(
    draw: Any,
    num_stages: int,
    max_options: int = 8,
    instructions: Sequence[str] = ("forward", "backward"),
) -> Profile:
    """Any table at all: most of its options are not worth having, as in a noisy measurement."""
    rows = [
        (stage, instruction, 210 + 15 * option, draw(_TIMES), draw(_ENERGIES))
        for stage in range(num_stages)
        for instruction in instructions
        for option in range(draw(st.integers(1, max_options)))
    ]
    return Profile.from_rows(rows)


@st.composite
def falling_profiles(
    draw: Any,
    num_stages: int,
    max_options: int = 12,
    instructions: Sequence[str] = ("forward", "backward"),
) -> Profile:
    """Tables in which slower is cheaper, so that there is much to trade."""
    rows = []
    for stage in range(num_stages):
        for instruction in instructions:
            time, energy = draw(st.floats(0.01, 0.1)), draw(st.floats(40.0, 90.0))
            for option in range(draw(st.integers(1, max_options))):
                rows.append(
                    (stage, instruction, 1740 - 15 * option, round(time, 9), round(energy, 6))
                )
                time *= 1 + draw(st.floats(0.001, 0.1))
                energy *= 1 - draw(st.floats(0.0, 0.08))
    return Profile.from_rows(rows)


@st.composite
def equal_profiles(draw: Any, num_stages: int) -> Profile:
    """The same falling tables on every stage, as of layers split evenly: ties everywhere."""
    one = _rows(draw(falling_profiles(1)))
    return Profile.from_rows([(stage, *row) for stage in range(num_stages) for _, *row in one])


@st.composite
def profiles_with_configs(
    draw: Any,
    num_stages: int,
    max_options: int = 6,
    instructions: Sequence[str] = ("forward", "backward"),
) -> Profile:
    """Clocks that differ from table to table, two configs, and work that no clock controls; each
    stage has a blocking power of its own.
    """
    settings = st.tuples(st.sampled_from([0, 900, 1200, 1500, 1590]), st.sampled_from(["", "b"]))
    rows = [
        (stage, name, mhz, draw(st.floats(0.01, 0.2)), draw(st.floats(1.0, 60.0)), config)
        for stage in range(num_stages)
        for name in instructions
        for mhz, config in draw(st.sets(settings, min_size=1, max_size=max_options))
    ]
    rows += [
        (stage, "blocking", 0, 1.0, float(draw(st.integers(0, 300))), "")
        for stage in range(num_stages)
    ]
    return Profile.from_rows(rows)


@st.composite
def dags(draw: Any, num_stages: int, max_operations: int = 9) -> Pipeline:
    """A random connected DAG whose operations use all stages."""
    count = draw(st.integers(num_stages, max_operations))
    operations = []
    for i in range(count):
        stage = i if i < num_stages else draw(st.integers(0, num_stages - 1))
        after = set()
        if i > 0:
            after = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3))
        operations.append(
            {
                "id": f"op{i}",
                "stage": stage,
                "instruction": draw(st.sampled_from(["forward", "backward"])),
                "microbatch": i,
                "after": [
                    {"id": f"op{j}", "latency": draw(st.sampled_from([0, 0, 0.003]))}
                    for j in sorted(after)
                ],
            }
        )
    return Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})


@st.composite
def pipelines(draw: Any, max_stages: int = 4, max_microbatches: int = 6) -> Pipeline:
    """A pipeline of any generated schedule."""
    stages = draw(st.integers(1, max_stages))
    latency = draw(st.sampled_from([0.0, 0.002]))
    if draw(st.booleans()):
        microbatches = stages * draw(st.integers(1, 2))
        return Pipeline("interleaved", stages, microbatches, num_chunks=2, p2p_latency=latency)
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    return Pipeline(schedule, stages, draw(st.integers(1, max_microbatches)), p2p_latency=latency)


#: What operations of any generated schedule may be.
EVERY_INSTRUCTION = ("forward", "backward", "backward_input", "backward_weight")

_SEVERAL_CHUNKS = schedules_of_any_chunks()


@st.composite
def schedules(
    draw: Any, name: str | None = None, max_stages: int = 4, max_microbatches: int = 9
) -> Pipeline:
    """A pipeline of any built-in schedule, or of the named one, in any shape it has."""
    name = name or draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, max_stages))
    chunks = draw(st.integers(1, 3)) if name in _SEVERAL_CHUNKS else None
    fewest = 2 * stages if name == "dualpipe-v" else 1
    most = max(max_microbatches, fewest)
    if name.startswith("interleaved") and chunks != 1:  # microbatches fill equal groups
        possible = [m for m in range(1, most + 1) if m % max(1, m // stages) == 0]
    else:
        possible = list(range(fewest, most + 1))
    microbatches = draw(st.sampled_from(possible))
    latency = draw(st.sampled_from([0.0, 0.002]))
    return Pipeline(name, stages, microbatches, num_chunks=chunks, p2p_latency=latency)


class Case(NamedTuple):
    """A request, and the frontier that it is for."""

    frontier: Frontier
    request: Request


@st.composite
def frontiers(draw: Any, max_stages: int = 2, max_microbatches: int = 3) -> Frontier:
    """Any pipeline, with operations besides forwards and backwards or not, on any profile."""
    if draw(st.integers(0, 3)) == 0:
        pipeline = draw(dags(draw(st.integers(1, max_stages))))
    else:
        pipeline = draw(schedules(None, max_stages, max_microbatches))
        extras = draw(st.sets(st.sampled_from(["load", "all_reduce", "optimizer"]), max_size=1))
        if extras:
            stages = list(range(pipeline.num_profile_stages))
            job = pipeline.to_job() | {"extras": dict.fromkeys(extras, stages)}
            pipeline = Pipeline.from_job(job)
    instructions = {op.instruction for op in pipeline.operations}
    backward = {"backward_input", "backward_weight"} & instructions or {"backward"}
    instructions = sorted(instructions | backward | {"forward"})
    kind = draw(st.sampled_from([falling_profiles, profiles, profiles_with_configs]))
    profile = draw(kind(pipeline.num_profile_stages, 5, instructions))
    return trace_frontier(
        pipeline,
        profile,
        blocking_power=draw(st.sampled_from([None, 0.0, 20.0, 300.0])),
        gpus_per_stage=draw(st.integers(1, 2)),
        replicas=draw(st.integers(1, 3)),
    )


@st.composite
def requests(draw: Any, conditions: int = 3) -> Case:
    """Anything asked of any pipeline, with up to so many conditions, at small effort."""
    frontier = draw(frontiers())
    names = draw(st.sets(st.sampled_from(sorted(CONDITIONS)), max_size=conditions))
    asked: dict[str, Any] = {"moves": 0.05}
    for name in sorted(names):
        asked |= CONDITIONS[name](frontier, draw)
    if "run" not in asked or asked["run"].deadline_s is None:
        asked |= draw(deadlines(frontier))
    return Case(frontier, Request.from_options(**asked))


@st.composite
def deadlines(draw: Any, frontier: Frontier) -> dict[str, Any]:
    """Keyword arguments of `Request.from_options` that say when an iteration must be over."""
    part = draw(st.floats(0.0, 1.5))
    kind = draw(st.sampled_from(["none", "slowdown", "time", "min_energy", "sync_time"]))
    span = frontier.slowest_time - frontier.min_time
    return {
        "none": {},
        "slowdown": {"slowdown": part * span / frontier.min_time},
        "time": {"target_time": frontier.min_time + part * span},
        "min_energy": {"min_energy": True},
        "sync_time": {"sync_time": frontier.min_time + part * span},
    }[kind]


def _run(frontier: Frontier, draw: Any) -> dict[str, Any]:
    iterations = draw(st.integers(1, 10_000))
    slack = draw(st.none() | st.floats(1.0, 2.0))
    return {
        "run": Run(
            iterations=iterations,
            price=draw(st.none() | rates(least=0.01, repeats=True)),
            carbon=draw(st.none() | st.just(Rate.fixed(300.0))),
            deadline_s=None if slack is None else slack * iterations * frontier.min_time + 1e-6,
        )
    }


def _between(frontier: Frontier, part: float) -> float:
    """J: a part of what lies between the least relaxed energy and that at maximum frequency."""
    least = frontier.energy_at(frontier.min_energy_time)
    return max(0.0, least + part * abs(frontier.max_frequency_plan().energy - least))


def _peak_w(frontier: Frontier) -> float:
    problem = frontier.problem
    return (
        problem.replay(problem.max_frequency_rows).peak_10uw * frontier.num_gpus / POWER_UNITS_PER_W
    )


#: By name: keyword arguments of `Request.from_options` for one condition on plans.
CONDITIONS: dict[str, Callable[[Frontier, Any], dict[str, Any]]] = {
    "straggler": lambda f, draw: {"straggler_time": f.min_time * draw(st.floats(0.9, 3.0))},
    "energy budget": lambda f, draw: {"energy_budget": _between(f, draw(st.floats(-0.05, 1.0)))},
    "power cap": lambda f, draw: {
        "power_cap": f.max_frequency_plan().average_power * draw(st.floats(0.5, 1.1))
    },
    "peak cap": lambda f, draw: {"peak_power_cap": _peak_w(f) * draw(st.floats(0.5, 1.05))},
    "ramp": lambda f, draw: {
        "ramp_limit": _peak_w(f) * draw(st.floats(0.0, 1.0)),
        "ramp_window": draw(st.sampled_from([0.05, 0.3, 1.0])) * f.min_time,
    },
    "latency": lambda _, draw: {
        "switch_latency": draw(st.sampled_from([1e-9, 0.003, 0.02, 0.3, 5.0])),
        "ask": draw(st.sampled_from(["ahead", "start"])),
    },
    "min hold": lambda _, draw: {"min_dwell": draw(st.sampled_from([1e-9, 0.05, 0.4, 100.0]))},
    "probability": lambda _, draw: {
        "probability": draw(st.sampled_from([0.5, 0.9, 0.99])),
        "noise": draw(st.sampled_from([0.005, 0.05])),
    },
    "ladder": lambda _, draw: {"ladder": draw(st.integers(1, 4))},
    "run": _run,
}


@st.composite
def rates(draw: Any, *, least: float = -1.0, repeats: bool | None = None) -> Rate:
    """What a kWh costs, changing up to five times."""
    lengths = draw(st.lists(st.floats(10, 5000), min_size=1, max_size=6))
    ends = np.cumsum(lengths).tolist()
    return Rate(
        begins_s=[0.0, *ends[:-1]],
        per_kwh=draw(st.lists(st.floats(least, 3), min_size=len(lengths), max_size=len(lengths))),
        end_s=ends[-1],
        start_s=draw(st.floats(0, 0.99)) * ends[-1],
        repeats=draw(st.booleans()) if repeats is None else repeats,
    )
