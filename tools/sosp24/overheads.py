"""What an iteration takes beside its operations: transfers, and a constant time a microbatch.

Replaying the measured times of operations through the dependencies of 1F1B is short of the measured
iteration. What is missing is described by a few constants of a workload:

- `load_s`: before each forward a stage is busy with something that no clock changes (loading,
  receiving, launching). It delays whatever the stage does next, so it counts on the critical path.
  Each stage has its own: the first one decodes images, others hand on more tensors. A stage that no
  run was slowed down by has about what the others have.
- `transfer_s`: from the end of an operation to the start of one on the neighbour that needs its
  output. It delays only who waits, so plans whose stages are all near the limit show it and plans
  with one slow stage hide it. EnvPipe's plans show it best.
- `node_transfer_s`: the same across the network between two nodes (A40: stages 3 and 4).
- `in_turn`: whether the two stages at the network take turns, so that neither computes while the
  other does. T5 hands on several large tensors (the encoder's output, position biases), and its
  iteration is as long as both stages' work together, where it should be as long as one's.

All of them are found by least squares over the runs; whether stages take turns by which of the two
fits better. The optimizer's step cannot be told from `load_s` in runs that all have the same number
of microbatches: it is calculated from the bytes that it moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from tools.sosp24.data import FloatArray, Runs, Workload

__all__ = ["Overheads", "Replay", "find_overheads", "irregular", "optimizer_s"]

#: Parameters of each model, in billions.
_PARAMETERS: Final = {
    "gpt3-xl": 1.3,
    "gpt3-2.7b": 2.7,
    "bert-huge-uncased": 1.3,
    "t5-3b": 2.9,
    "wide-resnet101_8": 1.5,
    "bloom-3b": 3.0,
}
#: Read and written a parameter by Adam in mixed precision: weights, master weights, two moments
#: and gradients.
_BYTES_A_PARAMETER: Final = 30
#: What is reached of the memory's bandwidth, GB/s: 80% of 1935 (A100 PCIe 80 GB) and 696 (A40).
_BANDWIDTH_GBS: Final = {"a100": 1550, "a40": 560}

#: What load takes, and a transfer within a node and between two, s: they decide where the runs do
#: not, as where one stage is slower than all others in each of them.
_USUAL_S: Final = np.array([0.01, 0.005, 0.05])
#: How much each of these counts when it is twice as long, as a relative error of one run.
_UNUSUAL: Final = np.array([1e-3, 5e-3, 5e-3])
#: How much a stage's load 3 ms off the mean of all counts, likewise.
_UNEVEN: Final = 1e-3 / 0.003
#: A run that is none of Perseus's plans, a warm-up or EnvPipe's, counts less and less once it is
#: off by more than this: where the network holds up T5, no model is right about all of them.
_FAR_OFF: Final = 0.02

# Standard error of an iteration's mean, as a fraction of it, that only a stall explains.
_STALL: Final = 0.002
# By how much an iteration is shorter in which stages do not take turns, s.
_SHORTER_S: Final = 4.8


@dataclass(frozen=True)
class Overheads:
    """Constant times of a workload, s.

    Attributes:
        load_s: before each forward, of each stage, (S).
        transfer_s: to a neighbour on the same node.
        node_transfer_s: to a neighbour on the other node; None where there is one node.
        optimizer_s: at the end, on each stage.
        in_turn: whether the stages at the network take turns.
    """

    load_s: tuple[float, ...]
    transfer_s: float
    node_transfer_s: float | None
    optimizer_s: float
    in_turn: bool = False

    def boundaries(self, workload: Workload) -> list[float]:
        """The transfer between each two neighbouring stages, (S - 1)."""
        lags = [self.transfer_s] * (workload.num_stages - 1)
        if workload.node_boundary is not None and self.node_transfer_s is not None:
            lags[workload.node_boundary] = self.node_transfer_s
        return lags


def optimizer_s(workload: Workload) -> float:
    """How long the optimizer's step takes on a stage, calculated from the bytes that it moves."""
    parameters = _PARAMETERS[workload.model] / workload.num_stages
    return parameters * _BYTES_A_PARAMETER / _BANDWIDTH_GBS[workload.gpu]


class Replay:
    """Replays all runs of a workload at once, as often as wanted."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._steps = {turns: _steps(workload, turns) for turns in (False, True)}

    def __call__(self, time_s: FloatArray, overheads: Overheads) -> FloatArray:
        """Iteration time of each run, (R), from the times of its operations, (R, N)."""
        return self.counted(time_s, overheads)[0]

    def counted(self, time_s: FloatArray, overheads: Overheads) -> tuple[FloatArray, FloatArray]:
        """Iteration times, (R), and how often each constant is on the critical path, (R, S + 2).

        The constants are the load of each stage, the transfer within a node and between nodes.
        """
        stages, runs = self._workload.num_stages, len(time_s)
        lags = overheads.boundaries(self._workload)
        finish = np.zeros((time_s.shape[1], runs, 1 + stages + 2))  # time, then the counts
        for i, stage, forward, before, needed in self._steps[overheads.in_turn]:
            at = finish[i]
            if before is not None:
                at[:] = finish[before]
            if forward:
                at[:, 0] += overheads.load_s[stage]
                at[:, 1 + stage] += 1
            for other, boundary in needed:
                later = finish[other, :, 0] + lags[boundary] > at[:, 0]
                at[later] = finish[other, later]
                at[later, 0] += lags[boundary]
                at[later, 1 + stages + (boundary == self._workload.node_boundary)] += 1
            at[:, 0] += time_s[:, i]
        last = finish[finish[:, :, 0].argmax(0), np.arange(runs)]
        return last[:, 0] + overheads.optimizer_s, last[:, 1:]


#: An operation, its stage, whether it is a forward, the one before it on its stage, and those it
#: needs from a neighbour with the boundary between them.
_Step = tuple[int, int, bool, int | None, list[tuple[int, int]]]


def _steps(workload: Workload, in_turn: bool) -> list[_Step]:
    """The operations of an iteration in an order in which they can run."""
    pipeline = workload.pipeline(in_turn)
    operations, waits = pipeline.operations, pipeline.predecessors
    steps: list[_Step] = []
    for i in pipeline.order.tolist():
        stage = operations[i].stage
        others = [(j, min(stage, operations[j].stage)) for j, _ in waits[i]]
        before = next((j for j, _ in others if operations[j].stage == stage), None)
        needed = [(j, boundary) for j, boundary in others if operations[j].stage != stage]
        steps.append((i, stage, operations[i].instruction == "forward", before, needed))
    return steps


def irregular(runs: Runs, in_turn: bool = False) -> FloatArray:
    """How much rare iterations of another kind add to the mean iteration of each run, s, (R).

    Both kinds show in the standard deviation: if a share p of the iterations takes D longer, the
    mean is longer by p D, and the standard deviation is D times the root of p (1 - p).

    - In every second run of the image workloads, whatever the plan, one iteration of the 18 is
      longer by some 2 s: the loader stalls. One of n iterations adds the standard error, D / n.
      Without one the standard error is below 0.2%.
    - Where stages take turns at a network, up to a third of the iterations of a run is shorter by
      some 5 s: for a while they do not. That D leaves least scatter over the plans.

    Args:
        in_turn: whether stages take turns.
    """
    if in_turn:
        part = runs.iteration_std_s / _SHORTER_S
        share = (1 - np.sqrt(np.maximum(1 - 4 * part**2, 0))) / 2
        shorter: FloatArray = -share * _SHORTER_S
        return shorter
    if not runs.workload.loads_images:
        return np.zeros(len(runs))
    error: FloatArray = runs.iteration_std_s / np.sqrt(runs.iterations)
    return np.where(error > _STALL * runs.iteration_time_s, error, 0.0)


def find_overheads(runs: Runs, replay: Replay | None = None) -> Overheads:
    """The constants that bring the replays of the runs' measured times to their iterations'."""
    replay = replay or Replay(runs.workload)
    stages, two_nodes = runs.workload.num_stages, runs.workload.node_boundary is not None
    typical = runs.iteration_time_s - irregular(runs)
    step = optimizer_s(runs.workload)
    lags = 1 + two_nodes
    # Rows of what is unlikely: loads that differ from stage to stage, and unusual constants.
    unlikely = np.zeros((stages + 1 + lags, stages + lags))
    unlikely[:stages, :stages] = _UNEVEN * (np.eye(stages) - 1 / stages)
    weights = (_UNUSUAL / _USUAL_S)[: 1 + lags]
    unlikely[stages, :stages] = weights[0] / stages
    unlikely[stages + 1 :, stages:] = np.diag(weights[1:])
    expected = np.concatenate([np.zeros(stages), _UNUSUAL[: 1 + lags]])

    def overheads(values: FloatArray, in_turn: bool) -> Overheads:
        load_s, (transfer_s, *node) = values[:stages].tolist(), values[stages:].tolist()
        return Overheads(tuple(load_s), transfer_s, node[0] if node else None, step, in_turn)

    def errors(values: FloatArray, in_turn: bool) -> FloatArray:
        short = replay(runs.time_s, overheads(values, in_turn)) / typical - 1
        return np.concatenate([short, unlikely @ values - expected])

    def slopes(values: FloatArray, in_turn: bool) -> FloatArray:
        _, counts = replay.counted(runs.time_s, overheads(values, in_turn))
        return np.vstack([counts[:, : len(values)] / typical[:, None], unlikely])

    far = np.concatenate([~runs.planned, np.zeros(len(expected), bool)])

    def loss(squares: FloatArray) -> FloatArray:
        """Cauchy's for what may be far off, squares for the rest; with two derivatives, (3, n)."""
        near = 1 + np.where(far, squares, 0)
        plain = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        return np.where(far, np.stack([np.log(near), 1 / near, -(near**-2)]), plain)

    nothing = Overheads((0.0,) * stages, 0.0, 0.0, step)
    missing = float(np.median(typical - replay(runs.time_s, nothing)))
    a_microbatch = max(missing, 0.0) / runs.workload.num_microbatches
    # The makespan has kinks, so a search may stop early: it starts where load takes all of what is
    # missing, half of it, and nearly nothing of it.
    fits = []
    for in_turn in (False, True)[: 1 + two_nodes]:
        for part, lag in ((1.0, 0.005), (0.5, 0.02), (0.05, a_microbatch)):
            fit = least_squares(
                errors,
                np.array([part * a_microbatch] * stages + [lag, max(lag, 0.05)][:lags]),
                slopes,
                bounds=(0, np.inf),
                x_scale=0.01,
                loss=loss,
                f_scale=_FAR_OFF,
                max_nfev=30,
                args=(in_turn,),
            )
            fits.append((float(fit.cost), in_turn, fit.x))
    _, in_turn, found = min(fits, key=lambda fit: fit[0])
    return overheads(found, in_turn)
