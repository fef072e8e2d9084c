"""How much better a plan from a noisy profile is for smoothing: python -m benchmarks.smoothing.

Noise of a known size is put on the times and energies of a modelled profile, whose truth is known.
Plans are made from the noisy profile and from its smoothed version, and what each one really takes
follows from replaying its clocks with the true times and energies.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.report import table
from envplan.pipeline import Pipeline
from envplan.profile import BLOCKING, Profile
from envplan.profiling.smoothing import smooth_profile
from envplan.solve import Frontier, plan_from_clocks, trace_frontier
from envplan.units import ENERGY_UNITS_PER_J

SLOWDOWN = 0.02


@dataclass(frozen=True)
class Outcome:
    """What a plan comes to.

    Attributes:
        late: true iteration time over the time asked for, minus one.
        waste: true energy over the least possible in the true iteration time, minus one.
        promise: true energy over the predicted one, minus one.
        rows: root mean square of the relative error of the profile's energies.
    """

    late: float
    waste: float
    promise: float
    rows: float


def main() -> None:
    """Print what smoothing brings on tables with noise."""
    options = _arguments()
    truth = Profile.builtin(options.profile)
    pipeline = Pipeline("1f1b", truth.num_stages, options.microbatches)
    best = trace_frontier(pipeline, truth)
    rows = []
    for noise in options.noise:
        outcomes: dict[str, list[Outcome]] = {"as measured": [], "smoothed": []}
        for seed in range(options.draws):
            for name, profile in zip(outcomes, _noisy(truth, noise / 100, seed), strict=True):
                outcomes[name].append(_outcome(profile, truth, best))
        rows += [[f"{noise:g}", name, *_cells(found)] for name, found in outcomes.items()]
    print(
        f"{options.profile}, {options.microbatches} microbatches, {SLOWDOWN:.0%} slowdown asked "
        f"for, means of {options.draws} draws of normal noise:\n"
    )
    headers = ["noise, %", "profile", "energy of rows off, %", "waste, %", "late, %", "promise, %"]
    print(table(headers, rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoothing", description=__doc__)
    parser.add_argument("--profile", default="a40-gpt3-1.3b-4stage")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0])
    return parser.parse_args()


def _noisy(truth: Profile, noise: float, seed: int) -> tuple[Profile, Profile]:
    """The profile with noise, and the same smoothed."""
    random = np.random.default_rng(seed)
    rows = []
    for stage in range(truth.num_stages):
        for instruction in truth.instructions:
            found = truth.table(stage, instruction)
            spread = np.exp(noise * random.standard_normal((2, len(found))))
            rows += [
                (stage, instruction, clock, time * up / 1e9, energy * more / ENERGY_UNITS_PER_J)
                for clock, time, energy, up, more in zip(
                    found.frequency_mhz.tolist(),
                    found.time_ns.tolist(),
                    found.energy_10fj.tolist(),
                    *spread.tolist(),
                    strict=True,
                )
            ]
        if truth.blocking_power_w is not None:
            rows.append((stage, BLOCKING, 0, 1.0, truth.blocking_power_w[stage]))
    noisy = Profile.from_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noisy.csv"
        noisy.save_csv(path)
        return noisy, smooth_profile(path)


def _outcome(profile: Profile, truth: Profile, best: Frontier) -> Outcome:
    frontier = trace_frontier(best.pipeline, profile)
    plan = frontier.plan(slowdown=SLOWDOWN)
    asked = frontier.min_time * (1 + SLOWDOWN)
    true = plan_from_clocks(best.pipeline, truth, plan.frequencies, frontier=best)
    time, energy = true.iteration_time, true.energy
    return Outcome(
        late=time / asked - 1,
        waste=energy / best.energy_at(max(time, best.min_time)) - 1,
        promise=energy / plan.energy - 1,
        rows=_error(profile, truth),
    )


def _error(profile: Profile, truth: Profile) -> float:
    """Root mean square of the relative error of the energies."""
    squares: list[float] = []
    for stage in range(truth.num_stages):
        for instruction in truth.instructions:
            found, true = (one.table(stage, instruction) for one in (profile, truth))
            energies = dict(zip(true.frequency_mhz.tolist(), true.energy_10fj, strict=True))
            known = np.array([energies[clock] for clock in found.frequency_mhz.tolist()])
            squares += ((found.energy_10fj / known - 1) ** 2).tolist()
    return float(np.sqrt(mean(squares)))


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"{100 * mean(getattr(one, name) for one in outcomes):.2f}"
        for name in ("rows", "waste", "late", "promise")
    ]


if __name__ == "__main__":
    main()
