"""Hypothesis strategies for profiles and pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from envplan.pipeline import SCHEDULES, Pipeline
from envplan.profile import Profile
from envplan.units import j_from_fj, s_from_ns

#: Round numbers make ties, uneven ones make none: both belong in tests.
_TIMES = st.one_of(
    st.integers(1, 12).map(lambda t: t * 0.01), st.floats(0.001, 0.5).map(lambda t: round(t, 9))
)
_ENERGIES = st.one_of(
    st.integers(1, 60).map(float), st.floats(0.0, 80.0).map(lambda e: round(e, 6))
)


def noisy(modelled: Profile, noise: float = 0.002) -> Profile:
    """A profile as a measurement would see it: seeded relative noise on times and energies."""
    rng = np.random.default_rng(1)
    rows = []
    for stage in range(modelled.num_stages):
        for instruction in ("forward", "backward"):
            table = modelled.table(stage, instruction)
            for option in range(len(table)):
                time = s_from_ns(table.time_ns[option]) * rng.normal(1, noise)
                energy = j_from_fj(table.energy_fj[option]) * rng.normal(1, noise)
                rows.append((stage, instruction, table.frequency_mhz[option], time, energy))
    return Profile.from_rows(rows)


@st.composite
def profiles(draw: Any, num_stages: int, max_options: int = 8) -> Profile:
    """Any table at all: most of its options are not worth having, as in a noisy measurement."""
    rows = [
        (stage, instruction, 210 + 15 * option, draw(_TIMES), draw(_ENERGIES))
        for stage in range(num_stages)
        for instruction in ("forward", "backward")
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
    one = draw(falling_profiles(1))
    rows = []
    for name in ("forward", "backward"):
        table = one.table(0, name)
        mhz, times, energies = table.frequency_mhz, table.time_ns, table.energy_fj
        options = zip(mhz.tolist(), times.tolist(), energies.tolist(), strict=True)
        rows += [
            (stage, name, clock, s_from_ns(time), j_from_fj(energy))
            for clock, time, energy in options
            for stage in range(num_stages)
        ]
    return Profile.from_rows(rows)


@st.composite
def knobbed_profiles(draw: Any, num_stages: int, max_options: int) -> Profile:
    """Clocks that differ from table to table, two configs, and work that no clock controls."""
    knobs = st.tuples(st.sampled_from([0, 900, 1200, 1500, 1590]), st.sampled_from(["", "b"]))
    rows = [
        (stage, name, mhz, draw(st.floats(0.01, 0.2)), draw(st.floats(1.0, 60.0)), config)
        for stage in range(num_stages)
        for name in ("forward", "backward")
        for mhz, config in draw(st.sets(knobs, min_size=1, max_size=max_options))
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

_SEVERAL_CHUNKS = ("interleaved", "looped-bfs", "interleaved-zb")


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
