"""What an iteration takes beside its operations: transfers, and a constant time a microbatch.

Replaying the measured times of operations through the dependencies of 1F1B is short of the measured
iteration. What is missing is described by three constants of a workload:

- `load_s`: before each forward a stage is busy with something that no clock changes (loading,
  receiving, launching). It delays whatever the stage does next, so it counts on the critical path.
- `transfer_s`: from the end of an operation to the start of one on the neighbour that needs its
  output. It delays only who waits, so plans whose stages are all near the limit show it and plans
  with one slow stage hide it. EnvPipe's plans show it best.
- `node_transfer_s`: the same across the network between two nodes (A40: stages 3 and 4).

All three are found by least squares over the runs. The optimizer's step cannot be told from
`load_s` in runs that all have the same number of microbatches: it is calculated from the bytes that
it moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from tools.sosp24.data import FloatArray, Runs, Workload

__all__ = ["Overheads", "Replay", "find_overheads", "mean_stall", "optimizer_s"]

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

#: What a transfer takes within a node and between two, s: they decide where the runs do not, as
#: where one stage is slower than all others in each of them.
_USUAL_TRANSFER_S: Final = np.array([0.005, 0.05])
#: How much a transfer twice as long as usual counts, as a relative error of one run.
_UNUSUAL: Final = 2e-3
#: How much a run counts that is none of Perseus's plans: warm-ups, and EnvPipe's.
_OTHER_RUN: Final = 0.1

# Standard error of an iteration's mean, as a fraction of it, that only a stall explains.
_STALL: Final = 0.002


@dataclass(frozen=True)
class Overheads:
    """Constant times of a workload, s.

    Attributes:
        load_s: before each forward, on each stage.
        transfer_s: to a neighbour on the same node.
        node_transfer_s: to a neighbour on the other node; None where there is one node.
        optimizer_s: at the end, on each stage.
    """

    load_s: float
    transfer_s: float
    node_transfer_s: float | None
    optimizer_s: float

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
        pipeline = workload.pipeline()
        operations = pipeline.operations
        at = {(o.stage, o.instruction, o.microbatch): i for i, o in enumerate(operations)}
        self._steps: list[tuple[int, int, int, int, bool]] = []
        for i in pipeline.order.tolist():
            op = operations[i]
            forward = op.instruction == "forward"
            neighbour = op.stage - 1 if forward else op.stage + 1
            needed = at.get((neighbour, op.instruction, op.microbatch), -1)
            before = i - 1 if i and operations[i - 1].stage == op.stage else -1
            self._steps.append((i, before, needed, min(neighbour, op.stage), forward))

    def __call__(self, time_s: FloatArray, overheads: Overheads) -> FloatArray:
        """Iteration time of each run, (R), from the times of its operations, (R, N)."""
        lags = overheads.boundaries(self._workload)
        times = np.ascontiguousarray(time_s.T)
        finish = np.zeros(times.shape)
        for i, before, needed, boundary, forward in self._steps:
            start = finish[before] if before >= 0 else np.zeros(times.shape[1])
            if forward:
                start = start + overheads.load_s
            if needed >= 0:
                start = np.maximum(start, finish[needed] + lags[boundary])
            finish[i] = start + times[i]
        last: FloatArray = finish.max(0) + overheads.optimizer_s
        return last


def mean_stall(runs: Runs) -> FloatArray:
    """How much a stall of the loader adds to the mean iteration of each run, s, (R).

    In every second run of the image workloads, whatever the plan, one iteration of the 18 is longer
    by some 2 s. It shows in the standard deviation: if one of n iterations is longer by d, the mean
    is longer by d / n and the standard deviation is d / sqrt(n), so what a stall adds is the
    standard error. Without one the standard error is below 0.2%.
    """
    if not runs.workload.loads_images:
        return np.zeros(len(runs))
    error: FloatArray = runs.iteration_std_s / np.sqrt(runs.iterations)
    return np.where(error > _STALL * runs.iteration_time_s, error, 0.0)


def find_overheads(runs: Runs, replay: Replay | None = None) -> Overheads:
    """The constants that bring the replays of the runs' measured times to their iterations'."""
    replay = replay or Replay(runs.workload)
    two_nodes = runs.workload.node_boundary is not None
    typical = runs.iteration_time_s - mean_stall(runs)
    step = optimizer_s(runs.workload)

    weight = np.where(runs.planned, 1.0, _OTHER_RUN)

    def overheads(values: FloatArray) -> Overheads:
        node = float(values[2]) if two_nodes else None
        return Overheads(float(values[0]), float(values[1]), node, step)

    def errors(values: FloatArray) -> FloatArray:
        short = weight * (replay(runs.time_s, overheads(values)) / typical - 1)
        usual = _USUAL_TRANSFER_S[: 1 + two_nodes]
        unusual = (values[1:] / usual - 1) * _UNUSUAL
        return np.concatenate([short, unusual])

    nothing = Overheads(0.0, 0.0, 0.0, step)
    missing = float(np.median(typical - replay(runs.time_s, nothing)))
    a_microbatch = max(missing, 0.0) / runs.workload.num_microbatches
    # The makespan has kinks, so a search may stop early: it starts where load takes all of what is
    # missing, half of it, and nearly nothing of it.
    fits = []
    for part, lag in ((1.0, 0.005), (0.5, 0.02), (0.05, a_microbatch)):
        first = np.array([part * a_microbatch, lag, max(lag, 0.05)][: 2 + two_nodes])
        fits.append(
            least_squares(
                errors,
                first,
                bounds=(0, np.inf),
                x_scale=np.maximum(first, 1e-3),
                diff_step=1e-2,
                max_nfev=20,
            )
        )
    return overheads(min(fits, key=lambda fit: float(fit.cost)).x)
