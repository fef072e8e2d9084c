"""The published tables in benchmarks/data/sosp24, as arrays in execution order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from envplan import Pipeline

__all__ = ["DATA", "WORKLOADS", "Runs", "Workload", "read_runs", "read_stage_profile"]

FloatArray = npt.NDArray[np.float64]

DATA: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "sosp24"

#: W that a GPU draws while it waits for a neighbour, as the artifact gives it.
WAITING_W: Final = {"a100": 83.64, "a40": 70.38}
GPU_NAMES: Final = {
    "a100": "NVIDIA A100 80GB PCIe",
    "a100sxm": "NVIDIA A100-SXM4-80GB",
    "a40": "NVIDIA A40",
}


@dataclass(frozen=True)
class Workload:
    """A job of the artifact's real runs.

    Attributes:
        gpu: `a100` or `a40`.
        model: its name in the artifact.
        title: its name for people.
        num_stages, num_microbatches, microbatch_size: of the job.
        layers_per_stage: None where the artifact only says uniform.
        node_boundary: the stage before the network between two nodes; None within one node.
    """

    gpu: str
    model: str
    title: str
    num_stages: int
    num_microbatches: int
    microbatch_size: int
    layers_per_stage: tuple[int, ...] | None
    node_boundary: int | None = None

    @property
    def name(self) -> str:
        """As in the artifact's file names."""
        return f"{self.gpu}-{self.model}-{self.num_stages}stage"

    @property
    def waiting_w(self) -> float:
        """Power of one GPU that waits for a neighbour, W."""
        return WAITING_W[self.gpu]

    @property
    def loads_images(self) -> bool:
        """Whether its samples are images, which its loader at times is late with."""
        return "resnet" in self.model

    def pipeline(self, in_turn: bool = False) -> Pipeline:
        """The schedule of the runs, with nothing beside forwards and backwards.

        Args:
            in_turn: whether the stages at the network between two nodes take turns.
        """
        turns = () if self.node_boundary is None or not in_turn else (self.node_boundary,)
        return Pipeline("1f1b", self.num_stages, self.num_microbatches, in_turn=turns)


def _workload(
    gpu: str, model: str, title: str, partition: tuple[int, ...] | None, size: int, count: int
) -> Workload:
    layers = None if partition is None else tuple(np.diff(partition).tolist())
    # A40: two nodes of four GPUs; stages 0 to 3 are on the first.
    stages, boundary = (4, None) if gpu == "a100" else (8, 3)
    return Workload(gpu, model, title, stages, count, size, layers, boundary)


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        _workload("a100", "gpt3-xl", "GPT-3 1.3B", (0, 8, 14, 21, 27), 8, 128),
        _workload("a100", "bert-huge-uncased", "BERT 1.3B", (0, 8, 14, 20, 26), 8, 32),
        _workload("a100", "t5-3b", "T5 3B", (0, 16, 33, 53, 74), 4, 32),
        _workload("a100", "wide-resnet101_8", "Wide-ResNet101 1.5B", (0, 7, 16, 25, 34), 64, 24),
        _workload("a100", "bloom-3b", "Bloom 3B", (0, 10, 18, 26, 32), 4, 128),
        _workload("a40", "gpt3-2.7b", "GPT-3 2.7B", None, 4, 256),
        _workload("a40", "bert-huge-uncased", "BERT 1.3B", None, 8, 32),
        _workload("a40", "t5-3b", "T5 3B", (0, 9, 16, 24, 33, 43, 53, 63, 74), 4, 32),
        _workload(
            "a40",
            "wide-resnet101_8",
            "Wide-ResNet101 1.5B",
            (0, 4, 9, 13, 17, 21, 25, 30, 34),
            32,
            48,
        ),
        _workload("a40", "bloom-3b", "Bloom 3B", (0, 6, 10, 14, 18, 22, 26, 30, 32), 4, 128),
    )
}


@dataclass(frozen=True)
class Runs:
    """What was measured in the runs of a workload; R runs of N operations on S stages.

    Attributes:
        workload: which.
        keys: (planner, run) of each, R of them; the planner is `perseus` or `envpipe`.
        stage: of each operation, (N).
        backward: whether the operation is a backward, (N).
        frequency_mhz: that was asked for, (R, N).
        time_s: measured, mean over the iterations, (R, N).
        time_std_s: its standard deviation, (R, N).
        iteration_time_s: mean over the ranks, (R).
        iteration_std_s: standard deviation over the iterations, mean over the ranks, (R).
        iterations: how many were measured, (R).
        rank_energy_j: of an iteration, (R, S).
    """

    workload: Workload
    keys: tuple[tuple[str, int], ...]
    stage: npt.NDArray[np.int64]
    backward: npt.NDArray[np.bool_]
    frequency_mhz: npt.NDArray[np.int64]
    time_s: FloatArray
    time_std_s: FloatArray
    iteration_time_s: FloatArray
    iteration_std_s: FloatArray
    iterations: npt.NDArray[np.int64]
    rank_energy_j: FloatArray

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def energy_j(self) -> FloatArray:
        """Of an iteration over all ranks, (R)."""
        total: FloatArray = self.rank_energy_j.sum(1)
        return total

    @property
    def planned(self) -> npt.NDArray[np.bool_]:
        """Runs of Perseus's plans, (R); the others are warm-ups and EnvPipe's plan."""
        return np.array([planner == "perseus" and run >= 2 for planner, run in self.keys])

    @property
    def kinds(self) -> list[tuple[int, int, npt.NDArray[np.bool_]]]:
        """(stage, 0 forward or 1 backward, which operations, (N)) of each table of a profile."""
        stages = range(self.workload.num_stages)
        return [
            (stage, kind, (self.stage == stage) & (self.backward == bool(kind)))
            for stage in stages
            for kind in (0, 1)
        ]

    def by_clock(
        self,
        values: FloatArray,
        clocks_mhz: npt.NDArray[np.int64],
        asked_mhz: npt.NDArray[np.int64] | None = None,
    ) -> FloatArray:
        """What a curve for each stage and instruction says of each operation, (R, N).

        Args:
            values: of stage, instruction (0 forward, 1 backward) and clock, (S, 2, F).
            clocks_mhz: ascending, (F).
            asked_mhz: clocks of the operations, (R, N); default: those asked for.
        """
        at = np.searchsorted(clocks_mhz, self.frequency_mhz if asked_mhz is None else asked_mhz)
        found: FloatArray = values[self.stage, self.backward.astype(int), at]
        return found

    def clocks(self, run: int) -> list[list[int]]:
        """The clocks of one run, a list per stage in execution order."""
        stages = range(self.workload.num_stages)
        return [self.frequency_mhz[run, self.stage == stage].tolist() for stage in stages]

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Runs:
        """Some of the runs."""
        each = {name: getattr(self, name)[index] for name in _OF_EACH_RUN}
        return replace(
            self, keys=tuple(self.keys[k] for k in np.arange(len(self))[index].tolist()), **each
        )


#: Fields of Runs that are arrays over the runs.
_OF_EACH_RUN: Final = (
    *("frequency_mhz", "time_s", "time_std_s", "iteration_time_s", "iteration_std_s"),
    *("iterations", "rank_energy_j"),
)


@cache
def read_runs(name: str, folder: Path = DATA) -> Runs:
    """All runs of a workload, Perseus's first.

    Raises:
        ValueError: the operations are not those of 1F1B in its order.
    """
    workload = WORKLOADS[name]
    operations = workload.pipeline().operations
    order = [(o.stage, o.instruction, o.microbatch) for o in operations]
    keys: list[tuple[str, int]] = []
    frequency, time, spread = [], [], []
    for planner in ("perseus", "envpipe"):
        table = pd.read_csv(folder / "runs" / f"{planner}+{name}.csv.gz")
        for run, rows in table.sort_values(["stage", "position"]).groupby("run"):
            listed = zip(rows["stage"], rows["instruction"], rows["microbatch"], strict=True)
            if list(listed) != order:
                raise ValueError(f"{planner} {name} run {run} is not in the order of 1F1B")
            keys.append((planner, int(str(run))))
            frequency.append(rows["frequency"].to_numpy(np.int64))
            time.append(rows["time"].to_numpy(np.float64))
            spread.append(rows["time_std"].to_numpy(np.float64))
    ranks = pd.read_csv(folder / "iterations.csv")
    ranks = ranks[ranks["workload"] == name].set_index(["planner", "run", "rank"]).sort_index()
    per_rank = {
        column: np.array([ranks.loc[key, column].to_numpy() for key in keys])
        for column in ("time", "time_std", "iterations", "energy")
    }
    return Runs(
        workload,
        tuple(keys),
        np.array([o.stage for o in operations]),
        np.array([o.instruction == "backward" for o in operations]),
        np.array(frequency),
        np.array(time),
        np.array(spread),
        per_rank["time"].mean(1),
        per_rank["time_std"].mean(1),
        per_rank["iterations"][:, 0],
        per_rank["energy"],
    )


def read_stage_profile(file: str, folder: Path = DATA) -> pd.DataFrame:
    """A table of stage_profile/ as it is."""
    return pd.read_csv(folder / "stage_profile" / file)
