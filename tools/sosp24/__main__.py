"""Measured profiles of Perseus's artifact: python -m tools.sosp24 [FOLDER]."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from envplan import Profile
from tools.sosp24.data import WORKLOADS, read_runs
from tools.sosp24.stages import STAGE_PROFILES, stage_profile
from tools.sosp24.workloads import find_latency, identify, workload_profile

_PROFILES = Path(__file__).resolve().parents[2] / "profiles"


def main() -> None:
    """Write every profile into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.sosp24", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=_PROFILES)
    folder = parser.parse_args().folder
    for profile in all_profiles():
        path = folder / f"{profile.name}.csv"
        profile.save_csv(path)
        print(path)


def all_profiles() -> Iterator[Profile]:
    """Every `sosp24-` profile, made from the published tables."""
    yield from map(stage_profile, STAGE_PROFILES)
    latencies = {gpu: find_latency(gpu) for gpu in ("a100", "a40")}
    for name, workload in WORKLOADS.items():
        latency, runs = latencies[workload.gpu], read_runs(name)
        yield workload_profile(identify(runs, latency.seconds), latency, len(runs))


if __name__ == "__main__":
    main()
