"""Writes docs/results-serving.md: python -m benchmarks.serving_results docs/results-serving.md

Both real hours under every policy, at other loads, and the frontier of SLOs met against energy;
then both real-shaped weeks, which takes most of an hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.report import table
from envplan._files import atomic_write
from envplan.plotting.serving import HEADERS, comparison_rows
from envplan.serving import ServingProfile, Simulation, Trace, compare_policies
from envplan.serving.policies import Settings

HOURS = ("azure-2023-code", "azure-2023-conversation")
WEEKS = ("coding-week", "conversation-week")
WEEKLY = ("SinglePool", "ScaleInst", "DynamoLLM", "envplan")
LOADS = (0.1, 0.3, 1.0, 3.0)
QUANTILES = (99.0, 99.9, 99.95, 99.99)


def weeks(profile: ServingProfile) -> dict[str, list[Simulation]]:
    """Both weeks under the policies that can be compared in reasonable time."""
    return {name: compare_policies(profile, Trace.open(name), policies=WEEKLY) for name in WEEKS}


def headline(results: Mapping[str, Sequence[Simulation]]) -> str:
    """Percent saved and SLOs met, by trace and policy."""
    rows = [
        [name, s.policy, f"{s.saved_percent(runs[0]) or 0.0:.1f}", f"{100 * s.attainment:.3f}"]
        for name, runs in results.items()
        for s in runs
    ]
    return table(["trace", "policy", "saved (%)", "SLOs met (%)"], rows)


def main(path: str) -> None:
    """Write the page."""
    profile = ServingProfile.builtin()
    parts = ["# Results: serving\n"]
    for name in HOURS:
        results = compare_policies(profile, Trace.open(name))
        parts += [f"\n## {name}\n", table(list(HEADERS), comparison_rows(results))]
    for name in HOURS:
        found = {
            f"{name} x{factor:g}": compare_policies(
                profile, Trace.open(name).scaled(factor), policies=("SinglePool", "envplan")
            )
            for factor in LOADS
        }
        parts += [f"\n## Other loads: {name}\n", headline(found)]
    rows = []
    for quantile in QUANTILES:
        settings = Settings(late=1 - quantile / 100, headroom=0.0)
        (run,) = compare_policies(profile, Trace.open(HOURS[0]), settings, policies=("envplan",))
        rows.append([f"{quantile:g}", f"{run.energy_j / 3.6e6:.2f}", f"{100 * run.attainment:.3f}"])
    parts += ["\n## SLOs against energy\n", table(["sized for (%)", "kWh", "SLOs met (%)"], rows)]
    begin = time.perf_counter()
    found = weeks(profile)
    minutes = (time.perf_counter() - begin) / 60
    parts += [f"\n## Weeks (real-shaped), {minutes:.0f} minutes in all\n", headline(found)]
    atomic_write(path, "\n".join(parts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
