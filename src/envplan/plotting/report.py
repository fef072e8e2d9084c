"""The report: one page that says what a plan saves, where, and on what assumptions."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from envplan._words import counted, job_in_words
from envplan.plotting import page
from envplan.plotting.frontier import in_joules, label_job
from envplan.units import j_from_fj

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

__all__ = ["Report", "frontier_page", "report_page", "timeline_page"]

#: Plans beyond T_star, for the straggler that one can move along the chart.
_SLOWER: Final = 12
_PLANNER_NAMES = {
    "max_frequency": "maximum frequency",
    "zeus_global": "Zeus, one clock for all",
    "zeus_per_stage": "Zeus, one clock a stage",
    "envpipe": "EnvPipe",
    "frontier": "envplan",
}


@dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
        plan: the plan it is about.
        frontier: of the plan's pipeline and profile.
        along: plans along the frontier, at least one, by ascending time.
        before, after: timelines of maximum frequency everywhere and of the plan.
        comparison: other planners' plans; None where nobody asked.

    Money and carbon are those of `plan.costs`.
    """

    plan: Plan
    frontier: Frontier
    along: Sequence[Plan]
    before: Timeline
    after: Timeline
    comparison: Comparison | None = None


def frontier_page(
    frontier: Frontier, along: Sequence[Plan], comparison: Comparison | None = None
) -> str:
    """A page with the frontier alone.

    Args:
        along: plans along the frontier, at least one, by ascending time.
        comparison: planners to show beside it.
    """
    title = f"Frontier of {frontier.profile.name}"
    body = page.heading(title, _about(frontier), frontier.profile.metadata.source)
    body += page.section("Energy against time", page.chart("frontier", "frontier"))
    points = [] if comparison is None else _rivals(comparison)
    slower = frontier.sample_plans(_SLOWER, beyond=True)
    data = page.frontier_data(frontier, along, points, slower)
    return page.document(title, body, {"frontier": data})


def timeline_page(timeline: Timeline, before: Timeline | None = None) -> str:
    """A page with a plan's timeline; above it, if given, that of maximum frequency."""
    plan = timeline.plan
    timelines, names = [timeline], ["plan"]
    if before is not None:
        timelines, names = [before, timeline], ["maximum frequency", "plan"]
    title = f"Timeline of {plan.profile.name}"
    job = plan.job
    words = job_in_words(
        job.schedule, job.stages, job.chunks, job.microbatches, job.stages * job.num_gpus
    )
    body = page.heading(title, f"{words}, planner {plan.planner}", plan.profile.source)
    body += page.section("What runs when", page.chart("timeline", "timeline"))
    return page.document(title, body, {"timeline": page.timelines_data(timelines, names)})


def report_page(report: Report) -> str:
    """The report as one self-contained HTML page."""
    plan, frontier = report.plan, report.frontier
    title = f"Energy plan of {plan.profile.name}"
    points = [] if report.comparison is None else _rivals(report.comparison)
    points.append(page.plan_point(plan, f"this plan ({plan.planner})", planner="this_plan"))
    data: dict[str, Any] = {
        "frontier": page.frontier_data(
            frontier,
            report.along,
            points,
            frontier.sample_plans(_SLOWER, beyond=True),
            plan.target.straggler_time_s,
        ),
        "timeline": page.timelines_data(
            [report.before, report.after], ["maximum frequency", "this plan"]
        ),
    }
    parts = [
        page.heading(title, _about(frontier), plan.profile.source),
        _cards(report),
        page.section("Energy against time", page.chart("frontier", "frontier")),
        page.section("What runs when", page.chart("timeline", "timeline")),
        page.section("Stage by stage", _stage_table(report)),
    ]
    histogram = page.histogram_data(plan)
    if histogram is not None:
        data["histogram"] = histogram
        parts.append(page.section("Clocks in use", page.chart("histogram", "histogram")))
    if report.comparison is not None:
        parts.append(page.section("Planners side by side", _planner_table(report.comparison)))
    parts.append(page.section("Method and assumptions", _assumptions(report)))
    parts.append(_footer())
    return page.document(title, "\n".join(parts), data)


def _about(frontier: Frontier) -> str:
    metadata = frontier.profile.metadata
    known = [str(text) for text in (metadata.workload, metadata.gpu) if text]
    return "; ".join([*known, label_job(frontier)])


def _cards(report: Report) -> str:
    plan = report.plan
    before, after = plan.predicted.baseline, plan.predicted
    modelled = " (modelled)" if plan.profile.source == "modelled" else ""
    cards = [
        (f"{after.savings_percent:.1f}%", f"energy saved{modelled}", "good"),
        (_signed(after.slowdown_percent), "iteration time against maximum frequency", ""),
        (in_joules(after.energy_j), f"an iteration, was {in_joules(before.energy_j)}", ""),
        (
            f"{after.iteration_time_s:.5g} s",
            f"an iteration, was {before.iteration_time_s:.5g} s",
            "",
        ),
        (
            _watts(after.average_power_w),
            f"average over all GPUs, was {_watts(before.average_power_w)}",
            "",
        ),
        *_gap_cards(plan),
        *_cost_cards(plan),
    ]
    return page.cards(cards)


def _gap_cards(plan: Plan) -> list[tuple[str, str, str]]:
    """The certified gap; with a straggler, that of all energy until it has finished."""
    until = plan.predicted.until_straggler
    if until is None:
        gap, what = plan.gap, "certified gap: no plan saves more than this beyond it"
        return [(f"{100 * gap:.3f}%", what, "")]
    saved = 100 * (1 - until.energy_j / until.baseline_energy_j)
    return [
        (
            f"{saved:.1f}%",
            "energy saved until the straggler has finished, waiting included",
            "good",
        ),
        (f"{100 * until.gap:.3f}%", "certified gap, waiting included", ""),
    ]


def _cost_cards(plan: Plan) -> list[tuple[str, str, str]]:
    """Money and carbon saved, over the run where its length is known."""
    costs = plan.costs
    if costs is None:
        return []
    pair = costs.run or costs.iteration
    over = "an iteration" if costs.run is None else f"the run of {costs.iterations:,} iterations"
    before, after = pair.max_frequency, pair.plan
    cards = []
    if before.money is not None and after.money is not None:
        unit = costs.currency or "currency units"
        saved = before.money - after.money
        cards.append((f"{saved:,.5g} {unit}", f"saved over {over}, of {before.money:,.5g}", "good"))
    if before.carbon_g is not None and after.carbon_g is not None:
        saved = (before.carbon_g - after.carbon_g) / 1000
        was = before.carbon_g / 1000
        cards.append((f"{saved:,.4g} kg CO2", f"saved over {over}, of {was:,.4g} kg", "good"))
    if costs.run is not None:
        saved = before.energy_kwh - after.energy_kwh
        what = f"saved over {over}, of {before.energy_kwh:,.5g} kWh"
        cards.append((f"{saved:,.5g} kWh", what, "good"))
    return cards


def _stage_table(report: Report) -> str:
    rows = []
    gpus = report.after.num_gpus
    for before, after in zip(report.before.stages, report.after.stages, strict=True):
        was = j_from_fj(before.computation_fj + before.blocking_fj)
        now = j_from_fj(after.computation_fj + after.blocking_fj)
        clocks = [
            (timed.frequency_mhz, timed.time_ns)
            for timed in report.after.operations
            if timed.operation.stage == after.stage and timed.frequency_mhz
        ]
        busy = sum(time for _, time in clocks)
        mean = sum(mhz * time for mhz, time in clocks) / busy if busy else 0.0
        span = report.after.sync_time_ns
        rows.append(
            [
                f"stage {after.stage}",
                in_joules(was),
                in_joules(now),
                f"{100 * (1 - now / was):.1f}" if was else "–",
                f"{100 * before.blocked_ns / max(1, report.before.sync_time_ns):.1f}",
                f"{100 * after.blocked_ns / max(1, span):.1f}",
                f"{mean:.0f}" if busy else "–",
                str(len(after.clock_changes) - 1),
            ]
        )
    headers = [
        "",
        "energy before",
        "energy now",
        "saved (%)",
        "waited before (%)",
        "waits now (%)",
        "mean clock (MHz)",
        "clock changes",
    ]
    note = f"<p class='about'>Energies over {counted(gpus, 'GPU')} a stage.</p>"
    return note + page.table(headers, rows)


def _planner_table(comparison: Comparison) -> str:
    rows = [
        [
            _entry_name(entry.planner, entry.point),
            entry.plan.job.schedule,
            f"{entry.plan.iteration_time:.6g}",
            _signed(entry.slowdown_percent).rstrip("%"),
            f"{entry.plan.energy:.6g}",
            f"{entry.savings_percent:.2f}",
            f"{100 * entry.plan.gap:.3f}",
        ]
        for entry in comparison.entries
    ]
    headers = ["", "schedule", "time (s)", "slower (%)", "energy (J)", "saved (%)", "gap (%)"]
    return page.table(headers, rows)


def _assumptions(report: Report) -> str:
    plan, frontier = report.plan, report.frontier
    reference = plan.profile
    source = {
        "measured": "The profile was measured: its times and energies are readings of a GPU.",
        "modelled": "The profile is modelled, not measured: figures say what the model of this GPU "
        "predicts. Profile a real GPU before relying on them.",
        None: "The profile does not say whether it was measured or modelled.",
    }[reference.source]
    powers = sorted(set(plan.job.blocking_power_w))
    waiting = " to ".join(dict.fromkeys(f"{power:g}" for power in (powers[0], powers[-1])))
    why = {
        "profile": "from the profile",
        "argument": "as given",
        "default": "a default, for the profile does not say",
    }[plan.job.blocking_power_source]
    items = [
        source,
        f"Profile {reference.name}, SHA-256 {reference.sha256}.",
        *_rate_notes(plan),
        *(f"Derived from it: {words}." for words in frontier.profile.adjustments.in_words()),
        f"A GPU that waits draws {waiting} W ({why}); waiting counts until the iteration ends.",
        "Energy is that of the GPUs in one iteration: of every operation at its clock and of "
        "waiting. Host, network and cooling are not in it.",
        "The curve is the exact optimum of the relaxed problem, in which an operation may mix "
        "neighbouring clocks: no plan lies below it. The certified gap is this plan's distance "
        f"from {'it' if plan.predicted.bound == 'relaxation' else 'a bound that CP-SAT proved'} "
        "at its own deadline.",
        *_conditions(plan),
    ]
    return page.notes(items)


def _conditions(plan: Plan) -> list[str]:
    """What a plan takes for granted of times and clocks."""
    latency, robust = plan.job.switch_latency_s, plan.predicted.robustness
    clocks = (
        f"Every clock comes {1000 * latency:g} ms after it is asked for; time and energy are those "
        "of the replay with that."
        if latency
        else "Clocks change at once; `envplan solve --switch-latency` plans for slow ones."
    )
    times = "Times repeat exactly; `envplan simulate --noise` replays the plan where they vary."
    if robust is not None:
        times = (
            "The iteration ends in time with a probability of at least "
            f"{robust.percent_at_least}: {robust.held_runs} of {robust.runs} noisy "
            "replays did."
            if robust.iterations is None
            else f"The run of {robust.iterations} iterations ends in time with a probability of at "
            f"least {robust.percent_at_least}, as {robust.runs} noisy replays show."
        )
    return [clocks, times]


def _rate_notes(plan: Plan) -> list[str]:
    """Which rates money and carbon were reckoned with."""
    if plan.costs is None:
        return []
    notes = []
    unit = plan.costs.currency or "currency units"
    for what, rate, per in (
        ("Price", plan.costs.price, unit),
        ("Carbon", plan.costs.carbon, "g CO2"),
    ):
        if rate is None:
            continue
        values = sorted(set(rate.per_kwh))
        shown = " to ".join(dict.fromkeys(f"{value:g}" for value in (values[0], values[-1])))
        changing = "" if rate.is_fixed else ", changing with time"
        notes.append(f"{what}: {shown} {per} per kWh{changing}.")
    return notes


def _footer() -> str:
    from envplan import __version__

    return f"<footer>envplan {html.escape(__version__)}</footer>"


def _rivals(comparison: Comparison) -> list[dict[str, Any]]:
    """The points of other planners, and of ours on other schedules; maximum frequency and our
    plans on this one are on every chart anyway."""
    shown = []
    for entry in comparison.entries:
        own = entry.plan.job.schedule
        elsewhere = own != comparison.frontier.pipeline.schedule
        if entry.planner == "max_frequency" or (entry.planner == "frontier" and not elsewhere):
            continue
        name = _entry_name(entry.planner, entry.point)
        point = page.plan_point(entry.plan, f"{name} (schedule {own})" if elsewhere else name)
        point["planner"] = entry.planner
        point["saved"], point["slower"] = entry.savings_percent, entry.slowdown_percent
        shown.append(point)
    return shown


def _entry_name(planner: str, point: str | None) -> str:
    name = _PLANNER_NAMES.get(planner, planner)
    return name + (f" at {point}" if point in ("T_min", "T_star") else "")


def _watts(watts: float) -> str:
    return f"{watts / 1e3:.4g} kW" if watts >= 1e4 else f"{watts:.4g} W"


def _signed(percent: float) -> str:
    text = f"{percent:+.2f}%"
    return "0.00%" if float(text[:-1]) == 0 else text
