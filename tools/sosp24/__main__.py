"""Measured profiles of Perseus's artifact: python -m tools.sosp24 profiles, or noise."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from envplan import Profile
from tools.sosp24.data import WORKLOADS, read_runs
from tools.sosp24.noise import effect, noise_is_clear
from tools.sosp24.stages import STAGE_PROFILES, stage_profile
from tools.sosp24.workloads import find_latency, identify, workload_profile

_SLOWDOWNS = (0.0, 0.01, 0.02, 0.05, 0.1)
_PROFILES = Path(__file__).resolve().parents[2] / "profiles"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sosp24", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    profiles = commands.add_parser("profiles", help="write the profiles and their sidecars")
    profiles.add_argument("folder", nargs="?", type=Path, default=_PROFILES)
    noise = commands.add_parser("noise", help="say what noise does to plans")
    noise.add_argument("names", nargs="*", default=list(STAGE_PROFILES))
    noise.add_argument("--microbatches", type=int, nargs="+", default=[12, 24, 48, 96, 192, 256])
    options = parser.parse_args()
    if options.what == "noise":
        _say_noise(options.names, options.microbatches)
        return
    for profile in all_profiles():
        path = options.folder / f"{profile.name}.csv"
        profile.save_csv(path)
        print(path)


def _say_noise(names: Sequence[str], microbatches: Sequence[int]) -> None:
    for name in names:
        profile = Profile.builtin(name)
        print(f"{name}: noise is {'clear' if noise_is_clear(profile) else 'not clear'}")
        print("microbatches slowdown raw_gap smooth_gap late dearer, percent")
        for one in effect(profile, microbatches, _SLOWDOWNS):
            percents = (one.raw, one.smooth, one.late, one.dearer)
            shown = " ".join(f"{100 * part:7.3f}" for part in percents)
            print(f"{one.microbatches:4} {100 * one.slowdown:4.0f} {shown}", flush=True)


def all_profiles() -> Iterator[Profile]:
    """Every `sosp24-` profile, made from the published tables."""
    yield from map(stage_profile, STAGE_PROFILES)
    latencies = {gpu: find_latency(gpu) for gpu in ("a100", "a40")}
    for name, workload in WORKLOADS.items():
        latency, runs = latencies[workload.gpu], read_runs(name)
        yield workload_profile(identify(runs, latency.seconds), latency, len(runs))


if __name__ == "__main__":
    main()
