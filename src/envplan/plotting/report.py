"""Pages about plans: a report, a frontier to explore, and a timeline alone.

The report says what a plan saves, where, and on what assumptions.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from envplan._io.words import counted, signed_percent, significant
from envplan.plan.frontier_file import evenly_chosen
from envplan.plotting import page
from envplan.plotting.page import Card
from envplan.plotting.page_data import (
    ExplorerChart,
    FrontierChart,
    StageFigures,
    TimelineChart,
    entry_name,
    waits_percent,
)
from envplan.plotting.titles import modelled_suffix, with_unit
from envplan.simulation.iteration import simulate
from envplan.solve.savings import Site

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison, Entry
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

_CURRENCY: Final = "USD"
_FRONTIER: Final = page.section("Energy against time", page.chart("explorer", "explorer"))
_TIMELINE: Final = page.section("What runs when", page.chart("timeline", "timeline"))
#: The commands that prove, apply, replay and draw a plan.
_NEXT_COMMANDS: Final = ("check", "apply", "simulate", "timeline")
#: Operations in all timelines of a page, at most: about 6 MB.
_MAX_EMBEDDED_OPERATIONS: Final = 100_000
#: Fewer timelines than these say too little of a frontier.
_LEAST_TIMELINES: Final = 5


def frontier_page(
    frontier: Frontier,
    along: Sequence[Plan],
    comparison: Comparison | None = None,
    *,
    slower: Sequence[Plan] = (),
) -> str:
    """A page with the frontier, a time to move along it, and timeline and stages of its plan then.

    Of large jobs it shows fewer plans, and of very large ones none of their timelines.

    Args:
        frontier: the frontier.
        along: plans along it, at least one, by ascending time.
        comparison: planners to show beside it.
        slower: plans beyond T_star to look up for stragglers.
    """
    along, slower = _as_many_as_fit(along, slower)
    chart = FrontierChart.of(frontier, along, slower=slower, comparison=comparison)
    timelines = []
    if len(along) * len(frontier.pipeline.operations) <= _MAX_EMBEDDED_OPERATIONS:
        timelines = [simulate(plan, frontier.profile) for plan in (*along, *slower)]
    data = {"explorer": ExplorerChart.of(chart, timelines).to_dict()}
    body = [page.chart("explorer", "explorer")]
    return page.job_page("Frontier of {}", frontier, body, data)


def _as_many_as_fit(
    along: Sequence[Plan], slower: Sequence[Plan]
) -> tuple[Sequence[Plan], Sequence[Plan]]:
    """Evenly chosen plans, so few that a page has room for their timelines; all if for too few."""
    num_operations = sum(len(stage) for stage in along[0].stages)
    total = len(along) + len(slower)
    share = _MAX_EMBEDDED_OPERATIONS / max(1, num_operations * total)
    if share >= 1 or share * total < _LEAST_TIMELINES:
        return along, slower
    num_slower = min(len(slower), int(share * len(slower)))
    num_along = max(2, int(share * total) - num_slower)
    return evenly_chosen(along, num_along), evenly_chosen(slower, num_slower)


def timeline_page(timeline: Timeline, before: Timeline | None = None) -> str:
    """A page with a plan's timeline; above it, if given, that of maximum frequency."""
    timelines = {"plan": timeline}
    if before is not None:
        timelines = {"maximum frequency": before, "plan": timeline}
    data = {"timeline": TimelineChart.of(timelines).to_dict()}
    return page.job_page("Timeline of {}", timeline, [_TIMELINE], data, timeline.plan.planner)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a report shows of a plan.

    Attributes:
        plan: the plan it is about; money and carbon are those of its costs.
        plan_file: where the plan is.
        frontier: of the plan's pipeline and profile.
        along: plans along the frontier, at least one, by ascending time.
        slower: plans beyond T_star to look up for stragglers.
        timeline: of the plan.
        baseline: the timeline of maximum frequency.
        comparison: other planners' plans; None where nobody asked.
        notes: what else to know about the plan, in sentences.
    """

    plan: Plan
    plan_file: Path
    frontier: Frontier
    along: Sequence[Plan]
    slower: Sequence[Plan] = ()
    timeline: Timeline
    baseline: Timeline
    comparison: Comparison | None = None
    notes: Sequence[str] = ()


def report_page(report: Report) -> str:
    """The report as one self-contained HTML page."""
    frontier_chart = FrontierChart.of(
        report.frontier,
        report.along,
        slower=report.slower,
        comparison=report.comparison,
        this_plan=report.plan,
    )
    timeline_chart = TimelineChart.of(
        {"maximum frequency": report.baseline, "this plan": report.timeline}
    )
    explorer = ExplorerChart(frontier_chart)
    data = {"explorer": explorer.to_dict(), "timeline": timeline_chart.to_dict()}
    return page.job_page("Energy plan of {}", report.frontier, list(_sections(report)), data)


def _sections(report: Report) -> Iterator[str]:
    """HTML of the sections of a report."""
    yield page.cards([*_money_cards(report.plan), *_plan_cards(report.plan)])
    yield _FRONTIER
    yield _TIMELINE
    yield page.section("Stage by stage", _stage_table(report.baseline, report.timeline))
    if report.comparison is not None:
        yield page.section("Planners side by side", _planner_table(report.comparison))
    file = shlex.quote(report.plan_file.as_posix())
    commands = [f"envplan {command} {file}" for command in _NEXT_COMMANDS]
    yield page.section("Use this plan", page.commands(commands))
    yield page.section("Method and assumptions", page.notes(list(_assumptions(report))))
    yield f"<footer>envplan {html.escape(version('envplan'))}</footer>"


def _plan_cards(plan: Plan) -> Iterator[Card]:
    """Energy, time and power of an iteration, against maximum frequency, and the certified gap."""
    predicted, baseline = plan.predicted, plan.predicted.baseline
    modelled = modelled_suffix(plan.profile.source)
    yield Card(f"{predicted.savings_percent:.1f}%", f"energy saved{modelled}", is_good=True)
    yield Card(
        f"{signed_percent(predicted.slowdown_percent)}%",
        "iteration time against maximum frequency",
    )
    yield Card(
        with_unit(predicted.energy_j, "J"),
        f"an iteration, was {with_unit(baseline.energy_j, 'J')}",
    )
    yield Card(
        f"{significant(predicted.iteration_time_s)} s",
        f"an iteration, was {significant(baseline.iteration_time_s)} s",
    )
    yield Card(
        with_unit(predicted.average_power_w, "W"),
        f"average over all GPUs, was {with_unit(baseline.average_power_w, 'W')}",
    )
    until = predicted.until_straggler
    if until is None:
        gap = "certified gap: no plan saves more than this beyond it"
        yield Card(f"{100 * plan.gap:.3f}%", gap)
    else:
        # All energy counts until the straggler has finished.
        saved_percent = 100 * (1 - until.energy_j / until.baseline_energy_j)
        yield Card(
            f"{saved_percent:.1f}%",
            "energy saved until the straggler has finished, waiting included",
            is_good=True,
        )
        yield Card(f"{100 * until.gap:.3f}%", "certified gap, waiting included")


def _money_cards(plan: Plan) -> Iterator[Card]:
    """Money and carbon saved: over the run where its length is known, and in a year."""
    yield from _run_cards(plan)
    yield from _year_cards(plan)


def _run_cards(plan: Plan) -> Iterator[Card]:
    """Money, carbon and energy saved over the run, if its length is known."""
    costs = plan.costs
    if costs is None or costs.run is None:
        return
    baseline, planned = costs.run.max_frequency, costs.run.plan
    over_run = f"saved over the run of {costs.iterations:,} iterations, of"
    if baseline.money is not None and planned.money is not None:
        saved = baseline.money - planned.money
        currency = costs.currency or _CURRENCY
        yield _savings_card(saved, currency, f"{over_run} {significant(baseline.money)}")
    if baseline.carbon_g is not None and planned.carbon_g is not None:
        saved = (baseline.carbon_g - planned.carbon_g) / 1e3
        yield _savings_card(saved, "kg CO2", f"{over_run} {significant(baseline.carbon_g / 1e3)}")
    saved = baseline.energy_kwh - planned.energy_kwh
    yield _savings_card(saved, "kWh", f"{over_run} {significant(baseline.energy_kwh)}")


def _year_cards(plan: Plan) -> Iterator[Card]:
    """Money, carbon and energy saved in a year on GPUs that always train."""
    costs = plan.costs
    site = Site() if costs is None else Site.of_run(costs)
    saved = site.year(plan).saved
    currency = (costs.currency if costs else None) or _CURRENCY
    gpus = counted(plan.job.num_gpus * plan.job.stages, "GPU")
    is_assumed = costs is None or costs.price is None
    assumed = " (assumed; say `--price`)" if is_assumed else ""
    money = f"saved in a year of {gpus} that always train, at {site.price:.4g} a kWh{assumed}"
    if site.in_words():
        money += f", {site.in_words()}"
    yield _savings_card(saved.money, currency, money)
    if saved.carbon_t is not None:
        carbon = f"saved in a year, at {site.carbon or 0:.4g} g a kWh"
        yield _savings_card(saved.carbon_t, "t CO2", carbon)
    yield _savings_card(saved.kwh, "kWh", "saved in a year")


def _savings_card(saved: float, unit: str, caption: str) -> Card:
    return Card(f"{significant(saved)} {unit}", caption, is_good=saved > 0)


class _StageRow(NamedTuple):
    """A row of the table of stages: its cells, of which names are the headers."""

    stage: str
    saved_percent: str
    energy_before: str
    energy_now: str
    waited_percent: str
    waits_percent: str
    mean_clock_mhz: str
    clock_changes: str


_STAGE_HEADERS: Final = _StageRow(
    stage="",
    saved_percent="saved (%)",
    energy_before="energy before",
    energy_now="energy now",
    waited_percent="waited before (%)",
    waits_percent="waits now (%)",
    mean_clock_mhz="mean clock (MHz)",
    clock_changes="clock changes",
)


def _stage_table(baseline: Timeline, timeline: Timeline) -> str:
    """HTML of each stage's energy, waiting and clocks, at maximum frequency and by the plan."""
    rows = []
    for before in baseline.stages:
        now = StageFigures.of(before, timeline)
        row = _StageRow(
            stage=f"stage {before.stage}",
            saved_percent=_decimals(now.saved_percent, 1),
            energy_before=with_unit(before.energy_j, "J"),
            energy_now=with_unit(now.energy_j, "J"),
            waited_percent=_decimals(waits_percent(before, baseline), 1),
            waits_percent=_decimals(now.waits_percent, 1),
            mean_clock_mhz=_decimals(now.mean_clock_mhz, 0),
            clock_changes=str(now.clock_changes),
        )
        rows.append(row)
    gpus = counted(timeline.num_gpus, "GPU")
    note = f"<p class='about'>Energies over {gpus} a stage.</p>"
    return note + page.table(_STAGE_HEADERS, rows)


def _decimals(value: float | None, decimals: int) -> str:
    """A number with so many decimals; a dash for none."""
    return "–" if value is None else f"{value:.{decimals}f}"


def _planner_table(comparison: Comparison) -> str:
    """HTML of every planner's plan beside ours."""
    headers = ("", "saved (%)", "slower (%)", "time (s)", "energy", "gap (%)", "schedule")
    return page.table(headers, [_planner_row(entry) for entry in comparison.entries])


def _planner_row(entry: Entry) -> tuple[str, ...]:
    """The cells of a planner's plan."""
    plan = entry.plan
    return (
        entry_name(plan.planner, entry.point),
        f"{entry.savings_percent:.2f}",
        signed_percent(entry.slowdown_percent),
        significant(plan.iteration_time),
        with_unit(plan.energy, "J"),
        f"{100 * plan.gap:.3f}",
        plan.job.schedule,
    )


#: By what the profile says of its energies.
_SOURCES: Final = {
    "measured": "The profile was measured: its times and energies are readings of a GPU.",
    "identified": "The profile's times were measured on GPUs; its energies were identified from "
    "measured iterations, not read operation by operation.",
    "modelled": "The profile is modelled, not measured: figures say what the model of this GPU "
    "predicts. Profile a real GPU before relying on them.",
    None: "The profile does not say whether it was measured or modelled.",
}
_BLOCKING_POWER_SOURCES: Final = {
    "profile": "from the profile",
    "argument": "as given",
    "default": "a default, for the profile does not say",
}
#: What the lower bound of a plan is, by what it follows from.
_BOUNDS: Final = {
    "relaxation": "it",
    "late-clocks": "it, raised by what late and held clocks cost at least,",
    "cp-sat": "a bound that CP-SAT proved",
}


def _assumptions(report: Report) -> Iterator[str]:
    """Sentences on the source of the figures, and on what they take for granted."""
    job, reference, profile = report.plan.job, report.plan.profile, report.frontier.profile
    yield _SOURCES[profile.metadata.energies_are]
    yield f"Profile {reference.name}, SHA-256 {reference.sha256}."
    for words in profile.adjustments.in_words():
        yield f"Derived from it: {words}."
    yield (
        f"A GPU that waits draws {_range_text(job.blocking_power_w)} W "
        f"({_BLOCKING_POWER_SOURCES[job.blocking_power_source]}); waiting counts until the "
        "iteration ends."
    )
    yield (
        "Energy is that of the GPUs in one iteration: of every operation at its clock and of "
        "waiting. Host, network and cooling are not in it."
    )
    bound = _BOUNDS[report.plan.predicted.bound]
    yield (
        "The curve is the exact optimum of the relaxed problem, in which an operation may mix "
        "neighbouring clocks: no plan lies below it. The certified gap is this plan's distance "
        f"from {bound} at its own deadline."
    )
    for note in report.notes:
        yield f"{note[:1].upper()}{note[1:]}."
    if not job.switch_latency_s:
        yield "Clocks change at once; `envplan solve --switch-latency` plans for slow ones."
    if report.plan.predicted.robustness is None:
        yield "Times repeat exactly; `envplan simulate --noise` replays the plan where they vary."


def _range_text(values: Sequence[float]) -> str:
    """A range such as "60 to 90", or "70" where all are alike."""
    low, high = f"{min(values):g}", f"{max(values):g}"
    return low if low == high else f"{low} to {high}"
