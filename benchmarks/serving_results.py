"""What the serving planners save: writes docs/results-serving.md.

`python -m benchmarks.serving_results docs/results-serving.md`. What is written is the same on every
machine; how long it took goes to the terminal.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.report import table
from envplan._files import atomic_write
from envplan.plotting.serving import HEADERS, comparison_rows
from envplan.serving import (
    ServingProfile,
    Simulation,
    Trace,
    compare_policies,
    exact_plan,
    hierarchical_plan,
    replay_requests,
)
from envplan.serving.builtin import CLOCKS_MHZ, TABLE_LOAD, TABLE_WH
from envplan.serving.classes import CLASSES
from envplan.serving.plan import ServingPlan

GPUS = 1024
SCALES = (500, 2_000, 8_000, 20_000, 60_000, 80_000)  # tokens/s that a class has at most
SEEDS = range(8)
TRACES = ("coding-week", "conversation-week")
ONE_BY_ONE = ("static", "exact", "hierarchical")  # policies replayed request by request
PROVED = 1e-6  # the exact planner's gap, at which it stops
PATIENCE_S = 120.0  # for a slow machine to get there
HOUR_S = 3600

HEAD = """# Results: serving

Every figure here is **modelled**, but for the energies of the table that the built-in profile
starts from ([how it is made](serving.md#the-built-in-profile)). `python -m
benchmarks.serving_results docs/results-serving.md` writes this page anew.
"""

OPTIMA = f"""## One class at {TABLE_LOAD:g} tokens/s

The configuration with the least Wh per request in the published table, and what the exact planner
picks for that class alone.
"""

GAPS = f"""## The hierarchical planner against the exact one

{len(SEEDS)} random loads of all nine classes for each row, each class uniform up to the number
given, on at most {GPUS:,} GPUs. How much more power the hierarchical planner's fleet draws, and
what both save against TP8 at maximum frequency. The exact planner's own gap is a millionth at most.
"""

WEEK = """## A week

A fleet of at most {gpus:,} GPUs; energy of all GPUs in use, SLO attainment by request, and changes,
under five policies. 5% of the requests with medium or long outputs are predicted one length too
short.

`hierarchical` ends below `exact` because an epoch's exact plan is the best one for the expected
peak and 15% more, where more GPUs at lower clocks pay. At the load that then comes, the fewer GPUs
that the pool manager sizes at maximum frequency draw less, the more so as their clocks follow the
load. Besides, `exact` plans each class alone here, for speed, while `hierarchical` merges pools
([what that costs](serving.md#over-time)). Between epochs the instance manager only gave instances
back here: re-sharding would pay for pools of a single instance, but then nothing could carry on
meanwhile.

DynamoLLM itself reports 53% less energy than its baseline, measured on real GPUs with real traces,
which are not ours.
"""


REQUESTS = """## Request by request

The hour of each week with the fewest requests and the one with the most, replayed again request by
request in the fleets that the simulations had ([how](serving.md#request-by-request)). The
difference is what bursts within a slot take, which flows do not show. A profile's latencies hold
bursts already, so the last column is the harsh side.
"""


def main(path: str) -> None:
    """Write the page."""
    profile = ServingProfile.builtin()
    sections = [HEAD, OPTIMA, _optima(profile), GAPS, _gaps(profile), WEEK.format(gpus=GPUS)]
    results = weeks(profile)
    for name, simulations in results.items():
        sections += [f"### {name} (modelled)\n", table(HEADERS, comparison_rows(simulations))]
    sections += [REQUESTS, _one_by_one(profile, results)]
    atomic_write(path, "\n".join(section.strip() + "\n" for section in sections))
    _full_fleet(profile)


def weeks(profile: ServingProfile) -> dict[str, list[Simulation]]:
    """Every policy on every trace that ships."""
    results = {}
    for name in TRACES:
        begin = time.perf_counter()
        results[name] = compare_policies(profile, Trace.open(name))
        _say(f"{name}: five policies in {time.perf_counter() - begin:.1f} s")
    return results


def headline(results: Mapping[str, Sequence[Simulation]]) -> str:
    """What every policy saves in a week, against the first, as a table."""
    policies = [simulation.policy for simulation in next(iter(results.values()))[1:]]
    rows = []
    for name, (base, *others) in results.items():
        saved = [f"{simulation.saved_percent(base) or 0.0:.1f}" for simulation in others]
        least = min(simulation.attainment for simulation in others)
        rows.append([name, *saved, f"{100 * least:.3f}"])
    return table(["trace", *policies, "SLOs met, least (%)"], rows)


def _one_by_one(profile: ServingProfile, results: Mapping[str, Sequence[Simulation]]) -> str:
    rows = []
    for name, simulations in results.items():
        for simulation in simulations:
            if simulation.policy in ONE_BY_ONE:
                rows += [
                    [name, simulation.policy, *_hour_again(profile, simulation, hour)]
                    for hour in _extreme_hours(simulation)
                ]
    head = ["trace", "policy", "hour", "requests", "kWh, flows", "kWh, one by one"]
    head += ["more (%)", "SLOs met, flows (%)", "SLOs met, one by one (%)"]
    return table(head, rows)


def _extreme_hours(simulation: Simulation) -> tuple[int, int]:
    """Those with the fewest and the most requests."""
    per_hour = round(HOUR_S / simulation.offered.step_s)
    by_hour = simulation.series.requests.reshape(-1, per_hour).sum(axis=1)
    return int(by_hour.argmin()), int(by_hour.argmax())


def _hour_again(profile: ServingProfile, simulation: Simulation, hour: int) -> list[str]:
    again = replay_requests(simulation, profile, begin_s=float(hour * HOUR_S))
    return [
        str(hour),
        str(again.requests),
        f"{again.flow_energy_j / 3.6e6:.2f}",
        f"{again.energy_j / 3.6e6:.2f}",
        f"{round(100 * (again.energy_j / again.flow_energy_j - 1), 1) + 0.0:.1f}",
        f"{100 * again.flow_attainment:.3f}",
        f"{100 * again.attainment:.3f}",
    ]


def _optima(profile: ServingProfile) -> str:
    rows = []
    for name, by_degree in TABLE_WH.items():
        wh, tp, clock = min(
            (wh, tp, clock)
            for tp, cells in by_degree.items()
            for clock, wh in zip(CLOCKS_MHZ, cells, strict=True)
            if wh is not None
        )
        plan = exact_plan(profile, {name: TABLE_LOAD}, GPUS)
        group = plan.pools[0].groups[0]
        found = f"TP{group.tp} at {group.frequency_mhz} MHz, {group.instances} instance"
        rows.append([name, f"TP{tp} at {clock} MHz", f"{wh:.2f}", found, _saved(plan)])
    return table(["class", "table", "Wh", "exact planner", "saved (%)"], rows)


def _gaps(profile: ServingProfile) -> str:
    rows = []
    for scale in SCALES:
        more, saved, slowest, most = [], [], 0.0, 0.0
        for seed in SEEDS:
            draw = random.Random(seed)
            loads = {name: draw.uniform(1, scale) for name in CLASSES}
            begin = time.perf_counter()
            exact = exact_plan(profile, loads, GPUS, time_limit=PATIENCE_S)
            slowest = max(slowest, time.perf_counter() - begin)
            near = hierarchical_plan(profile, loads, GPUS)
            more.append(100 * (near.power / exact.power - 1))
            saved.append((exact.predicted.savings_percent, near.predicted.savings_percent))
            most = max(most, exact.predicted.gap or 0.0)
        _say(f"up to {scale:,} tokens/s: exact plan in at most {slowest:.2f} s, gap {most:.1e}")
        if most > 2 * PROVED:
            sys.exit(f"no optimum was proved within {PATIENCE_S:g} s; the page says it was")
        ours, theirs = (sum(s[k] or 0.0 for s in saved) / len(saved) for k in (0, 1))
        mean = sum(more) / len(more)
        rows.append([f"{scale:,}", f"{mean:.1f}", f"{max(more):.1f}", f"{ours:.1f}",
                     f"{theirs:.1f}"])  # fmt: skip
    head = [
        "tokens/s, up to",
        "more power, mean (%)",
        "most (%)",
        "exact saves (%)",
        "hierarchical saves (%)",
    ]
    return table(head, rows)


def _full_fleet(profile: ServingProfile) -> None:
    """How long it takes where the GPUs just suffice, which is hardest; depends on the machine."""
    draw = random.Random(5)
    loads = {name: draw.uniform(1, 100_000) for name in CLASSES}
    begin = time.perf_counter()
    plan = exact_plan(profile, loads, GPUS)
    taken = time.perf_counter() - begin
    _say(f"{plan.gpus} of {GPUS} GPUs: {taken:.2f} s, gap {plan.predicted.gap:.1e}")


def _saved(plan: ServingPlan) -> str:
    return f"{plan.predicted.savings_percent or 0.0:.1f}"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.serving_results PAGE")
    main(sys.argv[1])
