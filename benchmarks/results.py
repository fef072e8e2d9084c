"""What every planner saves on every published workload: writes docs/results.md.

`python -m benchmarks.results docs/results.md` (or `make results`). What is written is the same on
every machine; how long it took goes to the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

from envplan import Frontier, Pipeline, Profile, builtin_profiles, strong_scaling, trace_frontier
from envplan._files import atomic_write
from envplan.planners import Comparison, compare

STRAGGLER = 0.2  # slower than maximum frequency by this fraction
PLANNERS = ("zeus_global", "zeus_per_stage", "envpipe")
EMULATED = "h100-gpt3-175b-8stage"
GLOBAL_BATCH = 1536  # microbatches, as in Perseus' emulation

HEAD = """# Results

Built-in profiles, planned and replayed by envplan, against maximum frequency everywhere. `make
results` writes this page anew. Profiles marked *measured* are identified from what the authors of
Perseus measured on real clusters (times by operation; energies of operations from those of ranks;
see [how well they predict real runs](validation.md)). All others are **modelled** ([how they are
made](profiles.md)). Published figures were measured by their authors on real GPUs; nothing here was
tuned to them. Perseus counts from what training uses under the highest power limit, envplan from
the highest clock.

What inference fleets save is on [a page of its own](results-serving.md).
"""

INTRINSIC = """## No straggler: intrinsic bloat

Percent of energy saved (and percent of time lost, where it is not 0.00). `frontier` is envplan's
own planner: at T_min, at the time that EnvPipe's plan takes on EnvPipe's schedule, and at T_star,
which is the most that can be saved. Zeus's planners stand at their fastest.
"""

TOTAL = f"""## With a straggler {STRAGGLER:.0%} slower: intrinsic and extrinsic bloat

One replica takes {STRAGGLER:.0%} longer than maximum frequency, and everyone waits for it. Percent
of energy saved until it is finished, against maximum frequency waiting for the same straggler.
"""

SCALING = f"""## Thousands of GPUs

`{EMULATED}` (tensor parallel 8, global batch {GLOBAL_BATCH}), strong scaling as Perseus
emulates it: more pipelines with fewer microbatches each, one of them slower by {STRAGGLER:.0%},
plans at T_min. Identical pipelines are simulated once.
"""


def main(path: str) -> None:
    """Write the page."""
    known = [p for p in builtin_profiles() if p.metadata.extra.get("published")]
    known.sort(key=lambda profile: profile.metadata.source != "measured")
    comparisons = [_compared(profile) for profile in known]
    sections = [
        HEAD,
        INTRINSIC,
        _intrinsic(comparisons),
        TOTAL,
        _total(comparisons),
        SCALING,
        _scaling(),
    ]
    atomic_write(path, "\n".join(section.strip() + "\n" for section in sections))


def _compared(profile: Profile) -> Comparison:
    begin = time.perf_counter()
    comparison = compare(_traced(profile), straggler_slowdown=STRAGGLER)
    _say(f"{profile.name}: {time.perf_counter() - begin:.1f} s")
    return comparison


def _traced(profile: Profile) -> Frontier:
    return trace_frontier(profile.pipeline(), profile)


def _intrinsic(comparisons: Iterable[Comparison]) -> str:
    head = [*PLANNERS, "frontier at T_min", "frontier as envpipe", "frontier at T_star"]
    rows = []
    for comparison in comparisons:
        others = {e.planner: e for e in comparison.entries if e.point is None}
        ours = {(e.point, e.plan.job.schedule): e for e in comparison.entries if e.point}
        cells = [others[name] for name in PLANNERS]
        cells.append(ours["T_min", "1f1b"])
        row = [_saved(e.savings_percent, e.slowdown_percent) for e in cells]
        envpipe = others["envpipe"]
        base = comparison.baseline.energy_j
        row.append(_saved(100 * (1 - envpipe.ours.energy / base), envpipe.slowdown_percent))
        star = ours["T_star", "1f1b"]
        row.append(_saved(star.savings_percent, star.slowdown_percent))
        rows.append([_name(comparison), *row, _published(comparison)])
    return _table(["profile", *head, "published"], rows)


def _total(comparisons: Iterable[Comparison]) -> str:
    rows = []
    for comparison in comparisons:
        others = {e.planner: e for e in comparison.entries if e.point is None}
        best = max(
            e.straggler_savings_percent or 0.0
            for e in comparison.entries
            if e.point and e.plan.job.schedule == "1f1b"
            and e.plan.iteration_time <= (comparison.straggler_time or 0.0)
        )  # fmt: skip
        cells = [f"{others[name].straggler_savings_percent:.1f}" for name in PLANNERS]
        rows.append([_name(comparison), *cells, f"{best:.1f}"])
    return _table(["profile", *PLANNERS, "frontier"], rows)


def _scaling() -> str:
    profile = Profile.builtin(EMULATED)
    gpus = profile.metadata.tensor_parallel or 1
    pipeline = Pipeline("1f1b", profile.num_stages, 96)
    plan = trace_frontier(pipeline, profile, gpus_per_stage=gpus, replicas=16).plan()
    rows = []
    for replicas in (16, 32, 64, 128):
        begin = time.perf_counter()
        (report,) = strong_scaling(
            plan,
            profile,
            [replicas],
            global_batch=GLOBAL_BATCH,
            slowdowns=({0: 1 + STRAGGLER},),
        )
        _say(
            f"{report.num_gpus} GPUs: {time.perf_counter() - begin:.1f} s, trace and plans included"
        )
        rows.append(
            [
                f"{report.num_gpus:,}",
                str(replicas),
                str(report.num_microbatches),
                f"{report.time:.3f}",
                f"{report.percent(report.intrinsic_savings):.1f}",
                f"{report.percent(report.extrinsic_savings):.1f}",
                f"{report.percent(report.intrinsic_savings + report.extrinsic_savings):.1f}",
            ]
        )
    head = ["GPUs", "pipelines", "microbatches", "iteration, s", "intrinsic, %", "extrinsic, %"]
    return _table([*head, "saved, %"], rows)


def _name(comparison: Comparison) -> str:
    profile = comparison.frontier.profile
    return f"{profile.name} ({profile.metadata.source})"


def _saved(percent: float, slowdown: float) -> str:
    return f"{percent:.1f}" + (f" ({slowdown:+.2f})" if abs(slowdown) >= 0.005 else "")


def _published(comparison: Comparison) -> str:
    published = comparison.frontier.profile.metadata.extra["published"]
    up_to = "up to " if "up to" in str(published.get("note", "")).lower() else ""
    slowdown = published.get("slowdown_percent")
    at = "" if slowdown is None else f" (<{slowdown:g})"
    return f"{up_to}{published['savings_percent']:g}{at}, {published['source']}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
