"""The report: one page that says what a plan saves, where, and on what assumptions."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envplan._io.words import counted, signed_percent, significant
from envplan.plotting import page
from envplan.plotting.figures import in_unit
from envplan.simulation.iteration import simulate
from envplan.solve.savings import Site

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

_CURRENCY: Final = "USD"
_FRONTIER: Final = page.section("Energy against time", page.chart("frontier", "frontier"))
_TIMELINE: Final = page.section("What runs when", page.chart("timeline", "timeline"))


def frontier_page(
    frontier: Frontier, along: Sequence[Plan], comparison: Comparison | None = None
) -> str:
    """A page with the frontier alone.

    Args:
        along: plans along the frontier, at least one, by ascending time.
        comparison: planners to show beside it.
    """
    data = {"frontier": page.frontier_data(frontier, along, comparison)}
    return page.job_page("Frontier of {}", frontier, [_FRONTIER], data)


def timeline_page(timeline: Timeline, before: Timeline | None = None) -> str:
    """A page with a plan's timeline; above it, if given, that of maximum frequency."""
    shown = {} if before is None else {"maximum frequency": before}
    data = {"timeline": page.timelines_data(shown | {"plan": timeline})}
    by = f"; planner {timeline.plan.planner}"
    return page.job_page("Timeline of {}", timeline, [_TIMELINE], data, by)


def animation_page(frontier: Frontier, plans: Sequence[Plan]) -> str:
    """A page on which the pipeline reshapes while its time walks along the frontier.

    Args:
        plans: at least one, by ascending time: a frame each.
    """
    timelines = [simulate(plan, frontier.profile) for plan in plans]
    data = {
        "frames": [page.timeline_data(timeline, "plan") for timeline in timelines],
        "span": max(timeline.sync_time for timeline in timelines),
        "frontier": page.frontier_data(frontier, plans, beyond=False),
    }
    body = [page.section("Along the frontier", page.chart("animation", "animation"))]
    return page.job_page("From T_min to T_star: {}", frontier, body, {"animation": data})


def report_page(
    plan: Plan,
    file: Path,
    frontier: Frontier,
    along: Sequence[Plan],
    timeline: Timeline,
    comparison: Comparison | None = None,
    notes: Iterable[str] = (),
) -> str:
    """The report as one self-contained HTML page. Money and carbon are those of `plan.costs`.

    Args:
        plan: the plan it is about.
        file: where the plan is.
        frontier: of the plan's pipeline and profile.
        along: plans along the frontier, at least one, by ascending time.
        timeline: of the plan.
        comparison: other planners' plans; None where nobody asked.
        notes: what else to know about the plan, in sentences.
    """
    before = timeline.at_max_frequency()
    data: dict[str, Any] = {
        "frontier": page.frontier_data(frontier, along, comparison, plan),
        "timeline": page.timelines_data({"maximum frequency": before, "this plan": timeline}),
    }
    body = [
        page.cards([*_money_cards(plan), *_plan_cards(plan)]),
        _FRONTIER,
        _TIMELINE,
        page.section("Stage by stage", _stage_table(before, timeline)),
    ]
    if comparison is not None:
        body.append(page.section("Planners side by side", _planner_table(comparison)))
    # What to type to prove, apply and replay it.
    verbs = ("check", "apply", "simulate", "timeline")
    commands = [f"envplan {verb} {shlex.quote(file.as_posix())}" for verb in verbs]
    body += [
        page.section("Use this plan", page.commands(commands)),
        page.section("Method and assumptions", _assumptions(plan, frontier, notes)),
        f"<footer>envplan {html.escape(version('envplan'))}</footer>",
    ]
    return page.job_page("Energy plan of {}", frontier, body, data)


def _plan_cards(plan: Plan) -> list[tuple[str, str, str]]:
    before, after, until = plan.predicted.baseline, plan.predicted, plan.predicted.until_straggler
    modelled = " (modelled)" if plan.profile.source == "modelled" else ""
    joules, watts, seconds = (
        (in_unit(before.energy_j, "J"), in_unit(after.energy_j, "J")),
        (in_unit(before.average_power_w, "W"), in_unit(after.average_power_w, "W")),
        tuple(f"{significant(one.iteration_time_s)} s" for one in (before, after)),
    )
    shown = [
        (f"{after.savings_percent:.1f}%", f"energy saved{modelled}", "good"),
        (
            f"{signed_percent(after.slowdown_percent)}%",
            "iteration time against maximum frequency",
            "",
        ),
        (joules[1], f"an iteration, was {joules[0]}", ""),
        (seconds[1], f"an iteration, was {seconds[0]}", ""),
        (watts[1], f"average over all GPUs, was {watts[0]}", ""),
    ]
    gap, what = plan.gap, "certified gap: no plan saves more than this beyond it"
    if until is not None:  # what counts is all energy until the straggler has finished
        with_waiting = "energy saved until the straggler has finished, waiting included"
        saved = 100 * (1 - until.energy_j / until.baseline_energy_j)
        shown.append((f"{saved:.1f}%", with_waiting, "good"))
        gap, what = until.gap, "certified gap, waiting included"
    return [*shown, (f"{100 * gap:.3f}%", what, "")]


def _money_cards(plan: Plan) -> list[tuple[str, str, str]]:
    """Money and carbon saved: over the run where its length is known, and in a year."""
    costs = plan.costs
    unit = (costs.currency if costs else None) or _CURRENCY
    saved: list[tuple[float | None, str, str]] = []
    if costs is not None and costs.run is not None:
        over = f"saved over the run of {costs.iterations:,} iterations, of"
        units = {"money": (unit, 1.0), "carbon_g": ("kg CO2", 1e3), "energy_kwh": ("kWh", 1.0)}
        for name, (of, scale) in units.items():
            was, now = (getattr(one, name) for one in (costs.run.max_frequency, costs.run.plan))
            if was is not None:
                saved.append(((was - now) / scale, of, f"{over} {significant(was / scale)}"))
    site = Site() if costs is None else Site.of_run(costs)
    _, year = site.year(plan)
    gpus = counted(plan.job.num_gpus * plan.job.stages, "GPU")
    assumed = " (assumed; say `--price`)" if costs is None or costs.price is None else ""
    money = f"saved in a year of {gpus} that always train, at {site.price:.4g} a kWh{assumed}"
    saved += [
        (year.money, unit, ", ".join(filter(None, (money, site.in_words())))),
        (year.carbon_t, "t CO2", f"saved in a year, at {site.carbon or 0:.4g} g a kWh"),
        (year.kwh, "kWh", "saved in a year"),
    ]
    return [
        (f"{significant(value)} {of}", what, "good" if value > 0 else "")
        for value, of, what in saved
        if value is not None
    ]


def _stage_table(before: Timeline, after: Timeline) -> str:
    headers = (
        "", "saved (%)", "energy before", "energy now", "waited before (%)", "waits now (%)",
        "mean clock (MHz)", "clock changes",
    )  # fmt: skip
    rows = []
    for was, now in zip(before.stages, after.stages, strict=True):
        had, has = was.energy_j, now.energy_j
        clocks = [
            (run.frequency_mhz, run.duration_s) for run in now.operations if run.frequency_mhz
        ]
        busy = sum(time for _, time in clocks)
        weighed = sum(mhz * time for mhz, time in clocks)
        waits = (
            use.blocked_s / max(1e-9, of.sync_time) for use, of in ((was, before), (now, after))
        )
        cells = (
            f"{100 * (1 - has / had):.1f}" if had else "–",
            *(in_unit(joules, "J") for joules in (had, has)),
            *(f"{100 * share:.1f}" for share in waits),
            f"{weighed / busy:.0f}" if busy else "–",
            str(len(now.clock_changes) - 1),
        )
        rows.append((f"stage {now.stage}", *cells))
    note = f"<p class='about'>Energies over {counted(after.num_gpus, 'GPU')} a stage.</p>"
    return note + page.table(headers, rows)


def _planner_table(comparison: Comparison) -> str:
    headers = ("", "saved (%)", "slower (%)", "time (s)", "energy", "gap (%)", "schedule")
    rows = [
        (
            page.entry_name(entry.plan.planner, entry.point),
            f"{entry.savings_percent:.2f}",
            signed_percent(entry.slowdown_percent),
            significant(entry.plan.iteration_time),
            in_unit(entry.plan.energy, "J"),
            f"{100 * entry.plan.gap:.3f}",
            entry.plan.job.schedule,
        )
        for entry in comparison.entries
    ]
    return page.table(headers, rows)


_SOURCES: Final = {
    "measured": "The profile was measured: its times and energies are readings of a GPU.",
    "identified": "The profile's times were measured on GPUs; its energies were identified from "
    "measured iterations, not read operation by operation.",
    "modelled": "The profile is modelled, not measured: figures say what the model of this GPU "
    "predicts. Profile a real GPU before relying on them.",
    None: "The profile does not say whether it was measured or modelled.",
}
_WAITING: Final = {
    "profile": "from the profile",
    "argument": "as given",
    "default": "a default, for the profile does not say",
}


def _assumptions(plan: Plan, frontier: Frontier, notes: Iterable[str]) -> str:
    job, reference = plan.job, plan.profile
    curve = "it" if plan.predicted.bound == "relaxation" else "a bound that CP-SAT proved"
    items = [
        _SOURCES[frontier.profile.metadata.energies_are],
        f"Profile {reference.name}, SHA-256 {reference.sha256}.",
        *(f"Derived from it: {words}." for words in frontier.profile.adjustments.in_words()),
        f"A GPU that waits draws {_span(job.blocking_power_w)} W "
        f"({_WAITING[job.blocking_power_source]}); waiting counts until the iteration ends.",
        "Energy is that of the GPUs in one iteration: of every operation at its clock and of "
        "waiting. Host, network and cooling are not in it.",
        "The curve is the exact optimum of the relaxed problem, in which an operation may mix "
        "neighbouring clocks: no plan lies below it. The certified gap is this plan's distance "
        f"from {curve} at its own deadline.",
        *(f"{note[:1].upper()}{note[1:]}." for note in notes),
    ]
    if not job.switch_latency_s:
        items.append("Clocks change at once; `envplan solve --switch-latency` plans for slow ones.")
    if plan.predicted.robustness is None:
        items.append(
            "Times repeat exactly; `envplan simulate --noise` replays the plan where they vary."
        )
    return page.notes(items)


def _span(values: Iterable[float]) -> str:
    """Such as "60 to 90", or "70" where all are alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:g}" for value in (ordered[0], ordered[-1])))
