"""The profile of a workload from its real runs, with what was identified and how well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan import Profile, ProfileMetadata
from envplan.profile import BLOCKING
from envplan.profile.sidecar import Workload as TrainedJob
from envplan.profile.smoothing import smooth_curve
from tools.sosp24.data import GPU_NAMES, WORKLOADS, FloatArray, Runs, Workload, read_runs
from tools.sosp24.overheads import Overheads, Replay, find_overheads
from tools.sosp24.power import PowerCurves, find_powers
from tools.sosp24.stages import SOURCE
from tools.sosp24.times import SwitchLatency, TimeCurves, find_switch_latency, find_times

__all__ = ["Model", "find_latency", "identify", "load_ms", "profile_name", "workload_profile"]

INSTRUCTIONS: Final = ("forward", "backward")
COLUMNS: Final = (
    "stage",
    "instruction",
    "frequency",
    "time",
    "energy",
    "time_std",
    "energy_std",
    "samples",
    "origin",
)

#: Published savings without a straggler, percent, at a slowdown, percent (Table 3).
_PUBLISHED: Final = {"a100-gpt3-xl-4stage": (13.2, 0.1), "a40-gpt3-2.7b-8stage": (21.1, 0.2)}


@dataclass(frozen=True)
class Model:
    """All that was identified of a workload.

    Attributes:
        workload: which.
        times, powers: of operations, by clock.
        overheads: of an iteration.
        spread: standard deviation of an operation's time from iteration to iteration, as a fraction
            of it, by stage and instruction, (S, 2).
        short: how much the replay of the measured times is off the iterations without overheads
            and with them, as a fraction: means over the runs.
    """

    workload: Workload
    times: TimeCurves
    powers: PowerCurves
    overheads: Overheads
    spread: FloatArray
    short: tuple[float, float]


def profile_name(workload: Workload) -> str:
    """Name of a workload's profile."""
    return f"sosp24-{workload.name}"


def find_latency(gpu: str) -> SwitchLatency:
    """The switching latency of a GPU, from all its workloads: the median of theirs."""
    return find_switch_latency([read_runs(n) for n, w in WORKLOADS.items() if w.gpu == gpu])


def identify(
    runs: Runs,
    latency_s: float,
    replay: Replay | None = None,
    clocks: npt.NDArray[np.int64] | None = None,
) -> Model:
    """What the runs say about a workload.

    Args:
        latency_s: the switching latency of its GPU.
        replay: of the workload, if there is one already.
        clocks: ascending, MHz; default: from the lowest to the highest that the runs had.

    Raises:
        ValueError: all runs are at one clock, so that nothing is said about others.
    """
    if (runs.frequency_mhz == runs.frequency_mhz.flat[0]).all():
        raise ValueError(f"all {len(runs)} runs are at one clock: they say nothing about others")
    replay = replay or Replay(runs.workload)
    times = find_times(runs, latency_s, clocks)
    overheads = find_overheads(runs, replay)
    nothing = Overheads((0.0,) * runs.workload.num_stages, 0.0, 0.0, 0.0)
    short = [
        float((replay(runs.time_s, one) / runs.iteration_time_s - 1).mean())
        for one in (nothing, overheads)
    ]
    relative = runs.time_std_s / runs.time_s
    spread = np.empty((runs.workload.num_stages, 2))
    for stage, backward, which in runs.kinds:
        spread[stage, backward] = np.median(relative[:, which])
    times, powers = _in_shape(times, find_powers(runs, times))
    return Model(runs.workload, times, powers, overheads, spread, (short[0], short[1]))


def _in_shape(times: TimeCurves, powers: PowerCurves) -> tuple[TimeCurves, PowerCurves]:
    """Times and powers on the nearest curves of the shape that physics gives.

    Found apart, they leave kinks in energy over time of a percent or two, which is what an
    operation's energy is uncertain by; a planner would hang on them.
    """
    time_s, power_w = times.time_s.copy(), powers.power_w.copy()
    for stage, kind in np.ndindex(time_s.shape[:2]):
        time, power = times.time_s[stage, kind], powers.power_w[stage, kind]
        smooth, energy = smooth_curve(times.clocks_mhz.astype(np.float64), time, time * power)
        time_s[stage, kind] = smooth
        power_w[stage, kind] = np.maximum.accumulate(energy / smooth)
    return replace(times, time_s=time_s), replace(powers, power_w=power_w)


def workload_profile(model: Model, latency: SwitchLatency, runs: int) -> Profile:
    """The profile, with a row for each clock from the lowest to the highest that runs had.

    Args:
        latency: of the GPU.
        runs: how many the model is from.
    """
    workload, clocks = model.workload, model.times.clocks_mhz
    rows: list[tuple[Any, ...]] = []
    for stage in range(workload.num_stages):
        for kind, instruction in enumerate(INSTRUCTIONS):
            descending = reversed(clocks.tolist())
            rows += [_row(model, stage, kind, instruction, clock) for clock in descending]
        overheads = model.overheads
        constant = (("load", overheads.load_s[stage]), ("optimizer", overheads.optimizer_s))
        for instruction, seconds in constant:
            energy = _digits(seconds * workload.waiting_w)
            rows.append((stage, instruction, 0, _digits(seconds), energy, "", "", "", "identified"))
        highest = int(clocks[-1])
        rows.append((stage, BLOCKING, highest, 1.0, workload.waiting_w, "", "", "", "measured"))
    return Profile.from_rows(
        rows,
        columns=COLUMNS,
        name=profile_name(workload),
        metadata=_sidecar(model, latency, runs),
    )


def job(model: Model) -> TrainedJob:
    """The job that was run, beside schedule and microbatches."""
    workload = model.workload
    stages = list(range(workload.num_stages))
    lags = [_digits(lag) for lag in model.overheads.boundaries(workload)]
    return TrainedJob(
        stages=workload.num_stages,
        p2p_latency_s=lags[0] if len(set(lags)) == 1 else lags,
        extras={"load": stages, "optimizer": stages},
        in_turn=[workload.node_boundary or 0] if model.overheads.in_turn else [],
        gpus_per_stage=1,
    )


def _row(model: Model, stage: int, kind: int, instruction: str, clock: int) -> tuple[Any, ...]:
    times, powers = model.times, model.powers
    at = int(np.searchsorted(times.clocks_mhz, clock))
    time, power = times.time_s[stage, kind, at], powers.power_w[stage, kind, at]
    count = int(times.count[stage, kind, at])
    return (
        stage,
        instruction,
        clock,
        _digits(time),
        _digits(time * power),
        _digits(time * model.spread[stage, kind], 3),
        _digits(time * powers.error_w[stage, kind, at], 3),
        count,
        "measured" if count else "interpolated",
    )


def _digits(value: float, digits: int = 7) -> float:
    return float(f"{value:.{digits}g}")


def _sidecar(model: Model, latency: SwitchLatency, runs: int) -> ProfileMetadata:
    workload, overheads = model.workload, model.overheads
    seen = model.times.count > 0
    off = model.powers.error_w / model.powers.power_w
    extra: dict[str, Any] = {
        **SOURCE,
        "recompute": True,
        "layers_per_stage": list(workload.layers_per_stage or ()) or "uniform",
        "blocking_power_w": workload.waiting_w,
        "identified": {
            "from": f"{runs} runs of Perseus's and EnvPipe's plans, clock by clock",
            "time": (
                "origin measured: mean of the measured operations at that clock, corrected for the "
                "late change of clock and moved towards a curve that falls with the clock by less "
                "than their error; origin interpolated: no run had that clock there. At the top "
                "the power limit, not the clock, decides: the curve is level."
            ),
            "time_error_percent": {
                "measured": round(100 * float(np.median(model.times.error[seen])), 3),
                "interpolated": (
                    round(100 * float(np.median(model.times.error[~seen])), 3)
                    if (~seen).any()
                    else None
                ),
            },
            "energy": (
                "not measured by operation: power over the clock by stage and instruction, "
                "identified from the measured energies of ranks over whole iterations and the "
                "known waiting power, never falling with the clock, with its valley where Perseus "
                "measured it, and brought to the nearest curve that is convex over time. "
                "energy_std is its standard error. A GPU that waits at a high clock draws more "
                "than the one waiting power: its operations have the difference, so at the top "
                "they can lie above the power limit of 300 W."
            ),
            "energy_error_percent": {
                "operations": round(100 * float(np.median(off[seen])), 2),
                "ranks": round(100 * model.powers.residual, 2),
            },
            "recompute": "backward takes 2.4 to 3.3 times as long as forward",
            "load": (
                f"{load_ms(overheads)} ms by stage before each forward that no clock changes "
                "(loading, receiving, launching), found from what replays of the measured "
                "operations are short of the measured iterations; a stage that slowed no run down "
                "has about what the others have"
            ),
            "optimizer": (
                f"{1000 * overheads.optimizer_s:.3g} ms an iteration, calculated from the bytes "
                "that it moves; runs with one number of microbatches cannot tell it from load"
            )
            + (
                ". Stalls of the loader (2 s in one of 18 iterations of every second run) are left "
                "out"
                if workload.loads_images
                else ""
            ),
            "p2p_latency": _transfers(model),
            "short_percent": {
                "without_overheads": round(100 * model.short[0], 2),
                "with_overheads": round(100 * model.short[1], 2),
            },
            "switch_latency_s": _digits(latency.seconds, 2),
            "switch_latency_of_workloads_s": [_digits(latency.low, 2), _digits(latency.high, 2)],
        },
    }
    if workload.name in _PUBLISHED:
        savings, slowdown = _PUBLISHED[workload.name]
        extra["published"] = {
            "savings_percent": savings,
            "slowdown_percent": slowdown,
            "source": "Perseus (SOSP 2024), Table 3",
            "note": "Measured, without a straggler, over all GPUs at maximum frequency.",
        }
    return ProfileMetadata(
        gpu=GPU_NAMES[workload.gpu],
        source="measured",
        workload=f"{workload.title} training, {workload.num_stages} stages",
        microbatch_size=workload.microbatch_size,
        tensor_parallel=1,
        schedule="1f1b",
        num_microbatches=workload.num_microbatches,
        job=job(model),
        extra=extra,
    )


def load_ms(overheads: Overheads) -> str:
    """The least and the most load of a stage, ms."""
    least, most = (f"{1000 * load:.1f}" for load in (min(overheads.load_s), max(overheads.load_s)))
    return least if least == most else f"{least} to {most}"


def _transfers(model: Model) -> str:
    overheads = model.overheads
    text = f"{1000 * overheads.transfer_s:.3g} ms between stages of a node"
    if overheads.node_transfer_s is not None:
        text += (
            f", {1000 * overheads.node_transfer_s:.3g} ms between the two nodes (stages "
            f"{model.workload.node_boundary} and {(model.workload.node_boundary or 0) + 1})"
        )
    if overheads.in_turn:
        text += ", which take turns: neither computes while the other does"
    return text + ", found with load; plans with one slow stage hide them"
