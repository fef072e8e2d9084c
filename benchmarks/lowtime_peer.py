"""lowtime (Perseus's solver, from PyPI) on our tables and pipeline, set up as Zeus's users do it.

An option's cost is its energy less what the GPU draws while it waits that long, at 70 W; one
exponential is fitted to each table's Pareto options, the best of a grid of starts; time is cut into
quanta of 1 ms; the walk goes from all slowest to the least time.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import networkx as nx
import numpy as np
from lowtime.cost_model import ExponentialModel
from lowtime.operation import (
    CandidateExecutionOptions,
    DummyOperation,
    ExecutionOption,
    Operation,
    OperationSpec,
)
from lowtime.solver import PhillipsDessouky
from numpy.typing import NDArray

from benchmarks.running import note
from envplan import Pipeline, Profile
from envplan.profile import DEFAULT_BLOCKING_POWER_W, OptionTable
from envplan.units import j_from_10fj, s_from_ns

_FEW_OPTIONS = 3  # with so few Pareto options left, noise is allowed for
_NOISE_FACTOR = 0.95
_NOTE_EVERY_S = 30.0


@dataclass(frozen=True)
class Walk:
    """Where lowtime went.

    Attributes:
        wall_s, cpu_s: of its solver alone.
        fit_s: fitting the exponentials.
        build_s: building the graph.
        iterations: quanta walked.
        stated_time_s: iteration time by its own count, (plans,), s, descending; every tenth quantum
            and the last.
        frequency_mhz: those plans' frequencies, (plans, N).
    """

    wall_s: float
    cpu_s: float
    fit_s: float
    build_s: float
    iterations: int
    stated_time_s: NDArray[np.float64]
    frequency_mhz: NDArray[np.int32]


def walk(pipeline: Pipeline, profile: Profile, quantum_s: float, keep_every: int = 10) -> Walk:
    """Run lowtime's solver to its end."""
    begin = time.perf_counter()
    specs = {
        (stage, instruction): _spec(profile.table(stage, instruction), quantum_s)
        for stage, instruction in sorted(
            {(op.profile_stage, op.instruction) for op in pipeline.operations}
        )
    }
    fitted = time.perf_counter()
    operations = [Operation(specs[op.profile_stage, op.instruction]) for op in pipeline.operations]
    graph = _graph(pipeline, operations)
    built = time.perf_counter()

    stated: list[float] = []
    frequencies: list[list[int]] = []
    last: tuple[float, list[int]] | None = None
    wall = cpu = 0.0
    iterations, noted = 0, built
    results = None
    while True:
        wall_begin, cpu_begin = time.perf_counter(), time.process_time()
        if results is None:
            results = PhillipsDessouky(graph).run()
        result = next(results, None)
        wall += time.perf_counter() - wall_begin
        cpu += time.process_time() - cpu_begin
        if result is None:
            break
        iterations += 1
        last = (result.real_time, [op.assigned_knob for op in operations])
        if result.quant_time % keep_every == 0:
            stated.append(last[0])
            frequencies.append(last[1])
        if time.perf_counter() - noted > _NOTE_EVERY_S:
            noted = time.perf_counter()
            note(f"lowtime at {result.real_time:.3f} s after {wall:.0f} s")
    if last is not None and (not stated or stated[-1] != last[0]):
        stated.append(last[0])
        frequencies.append(last[1])
    return Walk(
        wall_s=wall,
        cpu_s=cpu,
        fit_s=fitted - begin,
        build_s=built - fitted,
        iterations=iterations,
        stated_time_s=np.array(stated),
        frequency_mhz=np.array(frequencies, np.int32),
    )


def _spec(table: OptionTable, quantum_s: float) -> OperationSpec[int]:
    options = []
    for row in range(len(table)):
        option = ExecutionOption(
            real_time=s_from_ns(table.time_ns[row]),
            unit_time=quantum_s,
            cost=j_from_10fj(table.energy_10fj[row]),
            knob=int(table.frequency_mhz[row]),
        )
        option.cost -= DEFAULT_BLOCKING_POWER_W * option.quant_time * quantum_s
        options.append(option)
    candidates = CandidateExecutionOptions(options)
    if len(candidates.options) <= _FEW_OPTIONS:
        candidates = CandidateExecutionOptions(options, noise_factor=_NOISE_FACTOR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # starts of the grid that do not converge
        model = ExponentialModel(candidates, search_strategy="best")
    return OperationSpec(candidates, model)


def _graph(pipeline: Pipeline, operations: list[Operation[int]]) -> nx.DiGraph:
    graph = nx.DiGraph(source_node="source", sink_node="sink")
    for i, operation in enumerate(operations):
        graph.add_node(i, op=operation)
    for i, successors in enumerate(np.split(pipeline.succ, pipeline.succ_begin[1:-1])):
        graph.add_edges_from((i, j) for j in successors.tolist())
    first = [i for i, degree in graph.in_degree() if degree == 0]
    last = [i for i, degree in graph.out_degree() if degree == 0]
    graph.add_node("source", op=DummyOperation())
    graph.add_node("sink", op=DummyOperation())
    graph.add_edges_from(("source", i) for i in first)
    graph.add_edges_from((i, "sink") for i in last)
    return graph
