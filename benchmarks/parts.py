"""Clocks by part: how fast options are composed, and `python -m benchmarks.parts`: what they save.

The page's tables are modelled: parts by roofline from the GPU model, operations around the pipeline
from their bytes. A row of a measured profile split into equal layers is as measured as its profile,
but for the split.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import Section, percent, ratio, seconds, table
from benchmarks.running import note
from envplan import Pipeline, Profile
from envplan.devices.modelled import GPUS, ModelledGpu
from envplan.planners.part_clocks import LATENCIES_S, compare_part_clocks
from envplan.profile import (
    ByParts,
    ClockSetting,
    ExactCost,
    PartCosts,
    builtin_profiles,
    compose_options,
)
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import GPT3_1_3B
from envplan.profiling.training_job import Model, TrainingJob
from envplan.profiling.transformer import TransformerModel
from envplan.replay import Problem
from envplan.solve import Frontier, trace_frontier
from envplan.units import in_10uw, j_from_10fj, s_from_ns

_COMPOSED_S: Final = 0.05
_SLOWER: Final = 3.0
_KINDS: Final = (("smooth", 0.0), ("with 1% noise", 0.01))
#: Switch latency and minimum hold, s.
_LATE: Final = ((0.0, 0.0), (0.001, 0.0), (0.005, 0.0), (0.0, 0.005), (0.005, 0.02))
_GAP: Final = 0.001
_STEP_MHZ: Final = 45
_GPT3_175B: Final = TransformerModel(
    name="GPT-3 175B",
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    vocabulary_size=51200,
    sequence_length=2048,
)
#: GPU, model, stages, tensor parallel, samples of a microbatch.
_JOBS: Final[tuple[tuple[str, Model, int, int, int], ...]] = tuple(
    (gpu, model, *sizes)
    for gpu in ("a40", "a100-sxm4-80gb", "h100-sxm")
    for model, sizes in ((GPT3_1_3B, (4, 1, 4)), (_GPT3_175B, (8, 8, 1)))
)
_MICROBATCHES: Final = 8
#: Measured profiles whose operations are split into equal layers.
_IN_LAYERS: Final = ("sosp24-a40-gpt3-175b-8stage", "sosp24-a100sxm-gpt3-175b-8stage")
_REPLICAS: Final = 8
_NETWORK: Final = 25e9  # bytes/s of one GPU
_OPTIMIZER_BYTES: Final = 30.0  # of a parameter: gradient, weight and two moments; read, written
_OPTIMIZER_ACTIVITY: Final = 0.5
#: Parameters of the models that built-in profiles are named after.
_PARAMETERS: Final = {
    "175b": 175e9, "176b": 176e9, "2.7b": 2.7e9, "1.3b": 1.3e9, "-3b": 3e9, "xl": 1.3e9,
    "bert-huge": 1.3e9, "wide-resnet": 1.5e9, "336m": 336e6, "125m": 125e6, "resnet-152": 60e6,
}  # fmt: skip


def run(quick: bool, folder: Path) -> Section:
    """Speed of composition, of the frontier by parts, and the gap that parts leave."""
    section = Section("Clocks by part")
    rows, slowest = [], 0.0
    for (kind, noise), (latency, hold) in product(_KINDS, _LATE):
        parts = _random_parts(48, 100, noise)
        how = ByParts(blocking_power_w=70.0, switch_latency_s=latency, min_hold_s=hold)
        spent = float("inf")
        for _ in range(3):  # the first one warms up
            begin = time.process_time()
            composed = compose_options(0, "forward", parts, how)
            spent = min(spent, time.process_time() - begin)
        slowest = max(slowest, spent)
        late = {"latency_s": latency, "hold_s": hold}
        section.raw.append({"kind": kind, **late, "cpu_s": spent, "options": len(composed)})
        name = f"48 parts x 100 clocks, {kind}"
        held = [f"{1e3 * latency:g} ms", f"{1e3 * hold:g} ms"]
        rows.append([name, *held, f"{len(composed)}", seconds(spent)])
    header = ["composing one kind of operation", "latency", "hold", "options", "CPU"]
    section.paragraphs.append(table(header, rows))
    section.target(
        "compose 48 parts x 100 clocks", "50 ms", seconds(slowest), slowest <= _COMPOSED_S
    )
    note("frontier by parts")
    profile = in_layers(Profile.builtin("sosp24-a100-gpt3-xl-4stage"), 6)
    how = ByParts()
    times = {}
    for name, one in (("one clock", None), ("by parts", how)):
        begin = time.process_time()
        given = profile if one is None else profile.adjusted(by_parts=one)
        trace_frontier(given.pipeline(), given).sample_plans(20)
        times[name] = time.process_time() - begin
    slower = times["by parts"] / times["one clock"]
    section.raw.append(times)
    one, parted = (seconds(times[name]) for name in ("one clock", "by parts"))
    section.paragraphs.append(
        f"The demo's frontier and 20 plans on it: one clock an operation {one}, six equal layers "
        f"as parts {parted}, composition included."
    )
    section.target("frontier by parts, demo", "3x one clock", ratio(slower), slower <= _SLOWER)
    note("gap on A40 GPT-3 175B")
    rows, worst = [], 0.0
    for microbatches in (12,) if quick else (12, 48):
        for name, (options, gaps) in gaps_in_layers(microbatches).items():
            worst = max(worst, *gaps) if name == "by layers" else worst
            section.raw.append({"microbatches": microbatches, "kind": name, "gaps": gaps})
            rows.append([f"{microbatches}, {name}", options, *map(percent, gaps)])
    section.paragraphs.append(
        "Certified gaps on sosp24-a40-gpt3-175b-8stage, rows as measured, by 12 equal layers:"
    )
    header = ["microbatches", "options an operation", "gap at T_min", "2% slower", "at T_star"]
    section.paragraphs.append(table(header, rows))
    section.target("gap by 12 layers, A40 GPT-3 175B raw", "0.1%", percent(worst), worst < _GAP)
    return section


def _random_parts(count: int, clocks: int, noise: float) -> PartCosts:
    random = np.random.default_rng(1)
    mhz = np.linspace(1980, 600, clocks).astype(int)
    rows = {}
    for number in range(count):
        times = random.uniform(0.2, 2) + random.uniform(0.2, 4) * 1980 / mhz
        times *= 1 + noise * random.normal(size=clocks)
        watts = 200 + random.uniform(200, 350) * (mhz / 1980) ** 3
        energies = times * watts * (1 + noise * random.normal(size=clocks))
        rows[f"part{number}"] = {
            ClockSetting(int(m), ""): ExactCost(int(1e6 * t), int(1e12 * e))
            for t, e, m in zip(times, energies, mhz, strict=True)
        }
    return PartCosts.from_rows("forward", rows)


def in_layers(profile: Profile, layers: int) -> Profile:
    """A measured profile whose forwards and backwards are so many equal parts each.

    That is an assumption, for models whose stages are stacks of equal layers.
    """
    rows: list[tuple[Any, ...]] = []
    for whole in profile.tables():
        split = whole.instruction in ("forward", "backward")
        count = layers if split else 1
        for mhz, _, time_ns, energy_10fj in whole.options():
            for k in range(count):
                share_ns, share_10fj = (
                    total * (k + 1) // count - total * k // count
                    for total in (time_ns, energy_10fj)
                )
                name = f"layers.{k}" if split else ""
                row = (
                    whole.stage,
                    whole.instruction,
                    mhz,
                    s_from_ns(share_ns),
                    j_from_10fj(share_10fj),
                )
                rows.append((*row, name))
    columns = ("stage", "instruction", "frequency", "time", "energy", "part")
    return Profile.from_rows(rows, columns=columns, name=profile.name, metadata=profile.metadata)


def gaps_in_layers(microbatches: int) -> dict[str, tuple[str, list[float]]]:
    """Options of an operation and certified gaps of three plans on raw A40 GPT-3 175B."""
    profile = in_layers(Profile.builtin("sosp24-a40-gpt3-175b-8stage", raw=True), 12)
    pipeline = Pipeline("1f1b", 8, microbatches)
    found = {}
    for name, how in (("one clock", None), ("by layers", ByParts())):
        frontier = trace_frontier(pipeline, profile.adjusted(by_parts=how))
        asked: tuple[dict[str, Any], ...] = ({}, {"slowdown": 0.02}, {"min_energy": True})
        sizes = sorted({len(one) for one in frontier.profile.tables()})
        options = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        found[name] = options, [frontier.plan(**one).gap for one in asked]
    return found


def latency_table() -> str:
    """Savings of clocks by part beside one clock an operation, by GPU, model and latency.

    Modelled parts come first, then measured rows in equal layers.
    """
    rows = []
    header = ["GPU", "model", "parts of a forward (ms)"]
    for gpu, model, stages, tensor_parallel, samples in _JOBS:
        note(f"{gpu} {model.name}")
        job = TrainingJob(
            model=model, num_stages=stages, num_microbatches=_MICROBATCHES,
            microbatch_size=samples, tensor_parallel=tensor_parallel,
        )  # fmt: skip
        profile = modelled_profile(job, gpu, name="parts", step=_STEP_MHZ, parts=True)
        shares = 1e-6 * profile.measured_costs[1, "forward"].time_ns[-1]
        frontier = trace_frontier(profile.pipeline(), profile.adjusted(by_parts=ByParts()))
        rows.append(
            [gpu, model.name, f"{shares.min():.1f} to {shares.max():.1f}", *_saved(frontier)]
        )
    for name in _IN_LAYERS:
        note(name)
        profile = in_layers(Profile.builtin(name, raw=True), 12)
        shares = 1e-6 * profile.measured_costs[1, "forward"].time_ns[-1]
        pipeline = Pipeline("1f1b", profile.num_stages, 12)
        frontier = trace_frontier(pipeline, profile.adjusted(by_parts=ByParts()))
        rows.append([name, "12 layers", f"{shares.min():.1f}", *_saved(frontier)])
    return table([*header, *(f"{1e3 * latency:g} ms" for latency in LATENCIES_S)], rows)


def _saved(frontier: Frontier) -> list[str]:
    """Percent saved with one clock an operation and by parts, at each latency."""
    cells = []
    for row in compare_part_clocks(frontier):
        both = row.one_clock_saved_percent, row.by_parts_saved_percent
        cells.append(" / ".join("-" if saved is None else f"{saved:.1f}" for saved in both))
    print(cells, flush=True)
    return cells


def around_table() -> str:
    """What clocks of their own save on operations around the pipeline, for each built-in."""
    rows = []
    for profile in builtin_profiles():
        gpu = next((g for g in GPUS.values() if g.name == profile.metadata.gpu), None)
        size = next((n for name, n in _PARAMETERS.items() if name in profile.name), None)
        if gpu is None or size is None:
            rows.append([profile.name, "-", "-", "-", "-"])
            continue
        each = size / profile.num_stages / (profile.metadata.tensor_parallel or 1)
        taken, high, low = _around(gpu, each)
        pipeline = profile.pipeline() if profile.metadata.num_microbatches else None
        pipeline = pipeline or Pipeline("1f1b", profile.num_stages, _MICROBATCHES)
        watts = profile.blocking_power_w or [70.0] * pipeline.num_stages
        given = profile.fitted({op.instruction for op in pipeline.operations})
        problem = Problem(pipeline, given, [in_10uw(w) for w in watts])
        replay = problem.replay(problem.max_frequency_rows)
        iteration, around = j_from_10fj(replay.energy_10fj), high * pipeline.num_stages
        saved = (high - low) * pipeline.num_stages
        rows.append(
            [
                profile.name,
                f"{1e3 * taken:.0f}",
                f"{100 * around / (iteration + around):.2f}",
                f"{100 * saved / around:.1f}",
                f"{100 * saved / (iteration + around):.2f}",
            ]
        )
    return table(
        [
            "profile",
            "around (ms)",
            "its share of energy (%)",
            "saved of that (%)",
            "saved of all (%)",
        ],
        rows,
    )


def _around(gpu: ModelledGpu, parameters: float) -> tuple[float, float, float]:
    """Time (s) and energy (J) of one GPU in reduce-scatter, optimizer step and all-gather.

    Both at the highest clock and at the one of least energy. Bytes: gradients and weights of two
    bytes over the network, the optimizer's states over the replicas (Rajbhandari et al., "ZeRO",
    SC 2020).
    """
    sent = 2.0 * parameters * (_REPLICAS - 1) / _REPLICAS / _NETWORK
    step = _OPTIMIZER_BYTES * parameters / _REPLICAS / (gpu.memory_efficiency * gpu.bandwidth)
    joules = [
        2 * sent * gpu.blocking_power_w(mhz) + step * gpu.power_w(mhz, _OPTIMIZER_ACTIVITY)
        for mhz in gpu.clocks_mhz
    ]
    return 2 * sent + step, joules[0], min(joules)


if __name__ == "__main__":
    print(latency_table())
    print()
    print(around_table())
