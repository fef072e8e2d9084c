"""Section e: trace time per operation of every schedule against 1F1B's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import Section, Target, ratio, seconds, table
from benchmarks.running import note
from benchmarks.tables import noisy_profile
from envplan import Pipeline, Profile
from envplan.frontier import Relaxation
from envplan.units import ENERGY_UNITS_PER_J

SHAPES = ((8, 384), (8, 1536), (8, 6144), (16, 1536), (16, 6144))  # model stages x operations
MOST_QUICK = 1536
CHUNKS = {"interleaved": 2, "looped-bfs": 2, "interleaved-zb": 2, "zb-v": 2, "dualpipe-v": 2}
JUDGED = ("interleaved-zb", "zb-h1", "zb-v", "dualpipe-v")  # split backwards and Vs
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", *JUDGED)
MOST_RATIO = 2.0
REPETITIONS = 5


class Shape(NamedTuple):
    """A schedule that runs a model."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int

    def pipeline(self) -> Pipeline:
        """The pipeline of this row."""
        return Pipeline(self.schedule, self.ranks, self.microbatches, num_chunks=self.chunks)


def run(quick: bool, _folder: Path) -> Section:
    """Trace frontiers of other schedules than 1F1B."""
    section = Section("Schedules with split backwards and Vs against 1F1B")
    rows = []
    worst = dict.fromkeys(JUDGED, 0.0)
    for model_stages, operations in SHAPES:
        if quick and operations > MOST_QUICK:
            continue
        note(f"schedules of {model_stages} model stages, about {operations} operations")
        results = list(measure(model_stages, operations))
        section.raw += results
        one = results[0]["per_operation_s"]
        for result in results:
            against = result["per_operation_s"] / one
            if result["schedule"] in worst:
                worst[result["schedule"]] = max(worst[result["schedule"]], against)
            rows.append(_row(result, against))
    section.paragraphs = [
        "Whole frontier from T_star to T_min, pipeline and network built, of the same model: one "
        "profile of 8 or 16 model stages, with 0.2% noise on every row, backwards whole and in "
        "parts. Schedules with two chunks run it on half as many GPUs. Microbatches are as many as "
        f"make about the same number of operations. CPU time, medians of {REPETITIONS}, the "
        "schedules taking turns. A schedule's breakpoints are what has to be found; where it has "
        "more of them than 1F1B, time goes there.",
        table(
            [
                "schedule, GPUs x chunks x microbatches",
                "operations",
                "breakpoints",
                "time",
                "an operation",
                "against 1F1B",
            ],
            rows,
        ),
    ]
    section.targets = [
        Target(
            f"e: {name}, trace time an operation against 1F1B's",
            f"{MOST_RATIO:.0f}x",
            ratio(most),
            most <= MOST_RATIO,
        )
        for name, most in worst.items()
    ]
    return section


def measure(model_stages: int, operations: int) -> Iterator[dict[str, Any]]:
    """What every schedule takes for its frontier; 1F1B comes first."""
    profile = split_profile(model_stages)
    shapes = [shape_of(name, model_stages, operations) for name in SCHEDULES]
    spent: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    found: dict[Shape, tuple[int, int]] = {}
    for _ in range(REPETITIONS):
        for shape in shapes:
            begin = time.process_time()
            pipeline = shape.pipeline()
            frontier = Relaxation(pipeline, profile).walk()
            spent[shape].append(time.process_time() - begin)
            found[shape] = len(pipeline.operations), len(frontier.times)
    for shape in shapes:
        count, breakpoints = found[shape]
        yield {
            "model_stages": model_stages,
            **shape._asdict(),
            "operations": count,
            "breakpoints": breakpoints,
            "cpu_s": spent[shape],
            "per_operation_s": median(spent[shape]) / count,
        }


def shape_of(name: str, model_stages: int, operations: int) -> Shape:
    """The shape of a schedule that comes closest to so many operations of so many model stages.

    Microbatches are a multiple of the ranks, as interleaved schedules want them.
    """
    chunks = CHUNKS.get(name, 1)
    ranks = model_stages // chunks
    first = 2 * ranks
    counts = [len(Shape(name, ranks, m, chunks).pipeline().operations) for m in (first, 2 * first)]
    each = (counts[1] - counts[0]) / first  # every further microbatch makes as many
    rounds = round((operations - counts[0]) / (each * ranks))
    return Shape(name, ranks, max(ranks, first + rounds * ranks), chunks)


def split_profile(model_stages: int, *, noise: float = 0.002, seed: int = 1) -> Profile:
    """noisy_profile with every backward also in two halves, each as noisy as the whole."""
    whole = noisy_profile(model_stages, noise=noise)
    rng = np.random.default_rng(seed)
    rows = []
    for stage in range(model_stages):
        for instruction, parts in (
            ("forward", ("forward",)),
            ("backward", ("backward", "backward_input", "backward_weight")),
        ):
            measured = whole.table(stage, instruction)
            for part in parts:
                share = 1.0 if part == instruction else 0.5
                for k in range(len(measured)):
                    blur = 1 + rng.normal(0, noise, 2) if share < 1 else np.ones(2)
                    seconds_, joules = (
                        measured.time_ns[k] * 1e-9,
                        measured.energy_10fj[k] / ENERGY_UNITS_PER_J,
                    )
                    rows.append(
                        (
                            stage,
                            part,
                            int(measured.frequency_mhz[k]),
                            round(float(seconds_ * share * blur[0]), 9),
                            round(float(joules * share * blur[1]), 6),
                        )
                    )
    return Profile.from_rows(rows, name=f"split-a40-{model_stages}stage")


def _row(result: dict[str, Any], against: float) -> list[str]:
    shape = f"{result['ranks']} x {result['chunks']} x {result['microbatches']}"
    return [
        f"{result['schedule']}, {shape}",
        f"{result['operations']:,}",
        f"{result['breakpoints']:,}",
        seconds(median(result["cpu_s"])),
        f"{1e6 * result['per_operation_s']:.1f} us",
        ratio(against),
    ]
