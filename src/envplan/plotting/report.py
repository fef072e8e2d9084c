"""The report: one page that says what a plan saves, where, and on what assumptions."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envplan._words import counted, signed_percent, significant
from envplan.plotting import page
from envplan.plotting.figures import in_joules, in_watts, job_line, source_words, workload_title
from envplan.plotting.frontier import LOOKS, brief_share, plans_along
from envplan.units import j_from_fj

if TYPE_CHECKING:
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.profile import Profile
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

__all__ = ["Report", "frontier_page", "report_page", "timeline_page"]

#: Plans beyond T_star, for the straggler that one can move along the chart.
_SLOWER: Final = 12
#: Of larger jobs there are none: they take a further trace.
_MOST_FOR_SLOWER: Final = 8000
_CURRENCY: Final = "USD"


@dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
        plan: the plan it is about.
        file: where the plan is.
        frontier: of the plan's pipeline and profile.
        along: plans along the frontier, at least one, by ascending time.
        before, after: timelines of maximum frequency everywhere and of the plan.
        comparison: other planners' plans; None where nobody asked.

    Money and carbon are those of `plan.costs`.
    """

    plan: Plan
    file: Path
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
    name = _name(frontier.profile, frontier.pipeline, frontier.num_gpus)
    body = _heading(f"Frontier of {name}", frontier)
    body += page.section("Energy against time", page.chart("frontier", "frontier"))
    return page.document(name, body, {"frontier": _frontier_data(frontier, along, comparison)})


def timeline_page(timeline: Timeline, before: Timeline | None = None) -> str:
    """A page with a plan's timeline; above it, if given, that of maximum frequency."""
    timelines, names = [timeline], ["plan"]
    if before is not None:
        timelines, names = [before, timeline], ["maximum frequency", "plan"]
    profile, pipeline, gpus = timeline.profile, timeline.pipeline, timeline.num_gpus
    name = _name(profile, pipeline, gpus)
    about = f"{job_line(pipeline, gpus)}; planner {timeline.plan.planner}; profile {profile.name}"
    body = page.heading(f"Timeline of {name}", about, source_words(profile))
    body += page.section("What runs when", page.chart("timeline", "timeline"))
    return page.document(name, body, {"timeline": page.timelines_data(timelines, names)})


def report_page(report: Report) -> str:
    """The report as one self-contained HTML page."""
    plan, frontier = report.plan, report.frontier
    name = _name(frontier.profile, frontier.pipeline, frontier.num_gpus)
    own = page.plan_point(plan, f"this plan ({plan.planner})", planner="this_plan")
    data: dict[str, Any] = {
        "frontier": _frontier_data(
            frontier, report.along, report.comparison, [own], plan.target.straggler_time_s
        ),
        "timeline": page.timelines_data(
            [report.before, report.after], ["maximum frequency", "this plan"]
        ),
    }
    parts = [
        _heading(f"Energy plan of {name}", frontier),
        page.cards([*_money_cards(plan), *_plan_cards(plan), *_gap_cards(plan)]),
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
    parts.append(page.section("Use this plan", page.commands(_commands(report.file))))
    parts.append(page.section("Method and assumptions", _assumptions(report)))
    parts.append(_footer())
    return page.document(name, "\n".join(parts), data)


def _commands(file: Path) -> list[str]:
    """What to type to prove, apply and replay a plan."""
    plan = shlex.quote(file.as_posix())
    return [f"envplan {verb} {plan}" for verb in ("check", "apply", "simulate", "timeline")]


def _name(profile: Profile, pipeline: Pipeline, gpus: int) -> str:
    return workload_title(profile, gpus * pipeline.num_stages)


def _heading(title: str, frontier: Frontier) -> str:
    profile = frontier.profile
    about = f"{job_line(frontier.pipeline, frontier.num_gpus)}; profile {profile.name}"
    return page.heading(title, about, source_words(profile))


def _frontier_data(
    frontier: Frontier,
    along: Sequence[Plan],
    comparison: Comparison | None,
    points: Sequence[dict[str, Any]] = (),
    straggler_time: float | None = None,
) -> dict[str, Any]:
    slower: list[Plan] = []
    if len(frontier.pipeline.operations) <= _MOST_FOR_SLOWER:
        slower = plans_along(frontier, _SLOWER, beyond=True)
    rivals: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    if comparison is not None:
        rivals, curves = _rivals(comparison), dict(comparison.curves)
        if comparison.envpipe_frontier is not comparison.frontier:
            curves["envpipe"] = page.curve_of(comparison.envpipe_frontier)
    shown = [*rivals, *points]
    return page.frontier_data(frontier, along, shown, slower, straggler_time, curves)


def _plan_cards(plan: Plan) -> list[tuple[str, str, str]]:
    before, after = plan.predicted.baseline, plan.predicted
    modelled = " (modelled)" if plan.profile.source == "modelled" else ""
    slower = f"{signed_percent(after.slowdown_percent)}%"
    was = before.iteration_time_s
    power = f"average over all GPUs, was {in_watts(before.average_power_w)}"
    return [
        (f"{after.savings_percent:.1f}%", f"energy saved{modelled}", "good"),
        (slower, "iteration time against maximum frequency", ""),
        (in_joules(after.energy_j), f"an iteration, was {in_joules(before.energy_j)}", ""),
        (f"{significant(after.iteration_time_s)} s", f"an iteration, was {significant(was)} s", ""),
        (in_watts(after.average_power_w), power, ""),
    ]


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


def _money_cards(plan: Plan) -> list[tuple[str, str, str]]:
    """Money and carbon saved: over the run where its length is known, and in a year."""
    from envplan.costs.savings import Site

    costs, cards = plan.costs, list[tuple[str, str, str]]()
    price = None if costs is None else costs.price
    unit = (costs.currency if costs else None) or _CURRENCY
    if costs is not None and costs.run is not None:
        over = f"saved over the run of {costs.iterations:,} iterations, of"
        before, after = costs.run.max_frequency, costs.run.plan
        if before.money is not None and after.money is not None:
            saved = f"{significant(before.money - after.money)} {unit}"
            cards.append((saved, f"{over} {significant(before.money)}", "good"))
        if before.carbon_g is not None and after.carbon_g is not None:
            saved = f"{significant((before.carbon_g - after.carbon_g) / 1000)} kg CO2"
            cards.append((saved, f"{over} {significant(before.carbon_g / 1000)} kg", "good"))
        saved = f"{significant(before.energy_kwh - after.energy_kwh)} kWh"
        cards.append((saved, f"{over} {significant(before.energy_kwh)} kWh", "good"))
    site = Site() if costs is None else Site.of_run(costs.of_run())
    _, year = site.year(plan)
    gpus = counted(plan.job.num_gpus * plan.job.stages, "GPU")
    assumed = " (assumed; say --price)" if price is None else ""
    money = f"saved in a year of {gpus} that always train, at {site.price:.4g} a kWh{assumed}"
    money += f", {site.in_words()}" if site.in_words() else ""
    cards.append((f"{significant(year.money)} {unit}", money, "good" if year.money > 0 else ""))
    if year.carbon_t is not None:
        saved = f"{significant(year.carbon_t)} t CO2"
        cards.append((saved, f"saved in a year, at {site.carbon:.4g} g a kWh", "good"))
    cards.append(
        (f"{significant(year.kwh)} kWh", "saved in a year", "good" if year.kwh > 0 else "")
    )
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
                f"{100 * (1 - now / was):.1f}" if was else "–",
                in_joules(was),
                in_joules(now),
                f"{100 * before.blocked_ns / max(1, report.before.sync_time_ns):.1f}",
                f"{100 * after.blocked_ns / max(1, span):.1f}",
                f"{mean:.0f}" if busy else "–",
                str(len(after.clock_changes) - 1),
            ]
        )
    headers = [
        "",
        "saved (%)",
        "energy before",
        "energy now",
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
            f"{entry.savings_percent:.2f}",
            signed_percent(entry.slowdown_percent),
            significant(entry.plan.iteration_time),
            in_joules(entry.plan.energy),
            f"{100 * entry.plan.gap:.3f}",
            entry.plan.job.schedule,
        ]
        for entry in comparison.entries
    ]
    headers = ["", "saved (%)", "slower (%)", "time (s)", "energy", "gap (%)", "schedule"]
    return page.table(headers, rows)


def _assumptions(report: Report) -> str:
    plan, frontier = report.plan, report.frontier
    reference = plan.profile
    source = {
        "measured": "The profile was measured: its times and energies are readings of a GPU.",
        "identified": "The profile's times were measured on GPUs; its energies were identified "
        "from measured iterations, not read operation by operation.",
        "modelled": "The profile is modelled, not measured: figures say what the model of this GPU "
        "predicts. Profile a real GPU before relying on them.",
        None: "The profile does not say whether it was measured or modelled.",
    }[frontier.profile.metadata.energies_are]
    brief = ["The job is large: plans along the curve are searched for more briefly than this one."]
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
        *(brief if brief_share(frontier) < 1 else []),
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
    unit = plan.costs.currency or _CURRENCY
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
    name = LOOKS[planner].name if planner in LOOKS else planner
    return name + (f" at {point}" if point in ("T_min", "T_star") else "")
