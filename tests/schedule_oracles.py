"""Schedules as networkx sees them: what waits for what, written down a second time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import networkx as nx

from envplan.pipeline import Operation, Pipeline
from envplan.pipeline.operations import LETTERS

START, END = "start", "end"


INSTRUCTION = {letter: name for name, letter in LETTERS.items()} | {"L": "load"}


def rank(number: int, text: str) -> list[Operation]:
    """`rank(1, "1F0 1B0")`: model stage, instruction and microbatch of what rank 1 runs."""
    words = re.findall(r"(\d+)([A-Z])(\d+)", text)
    return [Operation(number, INSTRUCTION[kind], int(m), 0, int(at)) for at, kind, m in words]


def orders_of(pipeline: Pipeline) -> list[list[Operation]]:
    """The operations of each rank, in execution order."""
    return [list(pipeline.operations[a:b]) for a, b in pairwise(pipeline.stage_begin)]


def dependency_graph(orders: Sequence[Sequence[Operation]], latency_ns: int = 0) -> nx.DiGraph:
    """Edges from each operation to those that wait for it; `lag` is the transfer's time, ns."""
    graph = nx.DiGraph()
    at = {(op.instruction, op.microbatch, op.profile_stage): op for order in orders for op in order}
    for order in orders:
        graph.add_nodes_from(order)
        graph.add_edges_from(pairwise(order), lag=0)
    for (instruction, microbatch, stage), op in at.items():
        for source in _sources(instruction, stage):
            before = at.get((source[0], microbatch, source[1]))
            if before is not None:
                graph.add_edge(before, op, lag=0 if before.stage == op.stage else latency_ns)
    return graph


def _sources(instruction: str, stage: int) -> list[tuple[str, int]]:
    match instruction:
        case "forward":
            return [("forward", stage - 1)]
        case "backward" | "backward_input":
            after = [("backward", stage + 1), ("backward_input", stage + 1)]
            return [("forward", stage), *after]
        case "backward_weight":
            return [("backward_input", stage)]
    return []


def longest_path(graph: nx.DiGraph, time_ns: Mapping[Operation, int]) -> int:
    """How long everything takes at least, ns."""
    timed = nx.DiGraph()
    for op in graph:
        timed.add_edge(START, op, length=0)
        timed.add_edge(op, END, length=time_ns[op])
    for before, op, lag in graph.edges(data="lag"):
        timed.add_edge(before, op, length=time_ns[before] + lag)
    return int(nx.dag_longest_path_length(timed, weight="length"))
