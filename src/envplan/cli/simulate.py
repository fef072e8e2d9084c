"""`envplan simulate`: replay a plan, on one pipeline or on a cluster with stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan._io.words import counted, significant
from envplan.cli import output as ui
from envplan.cli.cluster import ClusterOptions, print_clusters
from envplan.cli.cost_options import CostOptions
from envplan.cli.costs import cost_rows, replay_cost_notes
from envplan.cli.describe import ITERATION_TITLE, describe_configs, describe_machine, modelled_title
from envplan.cli.job_options import PlanOptions
from envplan.cli.report import draw_timeline
from envplan.cli.shared import (
    CLUSTER,
    JOB,
    MOST_USED,
    NOISE,
    AskOption,
    NoiseOption,
    ReplicaGroup,
    SwitchLatency,
    parse_replica_group,
)
from envplan.cli.tables import (
    Column,
    number_column,
    percent_column,
    text_column,
    value_column,
)
from envplan.cli.types import (
    OPTIONAL_FILE,
    InputFile,
    OutputFile,
    parser_of,
    quantity,
)
from envplan.errors import InputError, naming
from envplan.quantities import COUNT, TIME, WHOLE

if TYPE_CHECKING:
    from envplan.costs import Run, RunComparison, RunCosts
    from envplan.simulation.between_iterations import BetweenIterations
    from envplan.simulation.conditions import Conditions
    from envplan.simulation.replicas import ReplicaPlans

_PERCENTS: Final = (5, 25, 50, 75, 95, 99)
_MOST_STAGES_SHOWN: Final = 24


def simulate(
    source: PlanOptions,
    cluster: ClusterOptions,
    costs: CostOptions,
    *,
    noise: NoiseOption = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(WHOLE.within(0, 2**63 - 1)),
            help="Noise of another seed is other noise.",
            rich_help_panel=NOISE,
        ),
    ] = 0,
    runs: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="With --noise: replay N times, for percentiles.",
            rich_help_panel=NOISE,
        ),
    ] = 1,
    switch_latency: SwitchLatency = None,
    ask: AskOption = None,
    between: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help=(
                "An optimizer and the like run for so long between iterations at the highest "
                "clocks, as in 300ms: say what these clocks save and cost."
            ),
            rich_help_panel=JOB,
        ),
    ] = None,
    sync_time: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="Everybody waits until so much time has passed, as in 16.5 (seconds).",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    replica: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PLAN",
            help=(
                "Further replicas follow this plan, and all wait for the slowest. May be given "
                "more than once."
            ),
            rich_help_panel=JOB,
        ),
        InputFile(),
    ] = None,
    replica_profile: Annotated[
        list[ReplicaGroup] | None,
        typer.Option(
            metavar="PROFILE[:COUNT]",
            parser=parser_of(parse_replica_group),
            help=(
                "COUNT further replicas (1) run on other hardware, by this profile, and are "
                "planned to end when this plan does. May be given more than once."
            ),
            rich_help_panel=JOB,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=OutputFile(".json"),
            help="Write a Chrome trace, for ui.perfetto.dev or chrome://tracing: .json.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", ".html", bare="timeline.png"),
            help="Draw the timeline: .png, .svg, .pdf or .html; without a name: timeline.png.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
) -> None:
    """Replay a plan: what runs when, where GPUs wait, and what it all draws.

    Without noise and switch latency this is exact. With replicas or stragglers it also reckons a
    cluster, in which the other replicas switch to the plan looked up for the straggler's time.

    \b
    Example:
      envplan simulate plan.json --trace trace.json --plot
      envplan simulate plan.json --noise 2 --runs 200 --switch-latency 10ms
      envplan simulate plan.json --replicas 128 --straggler 1.2
      envplan simulate plan.json --price 0.25 --carbon 380 --iterations 100000
    """
    from envplan.simulation.between_iterations import between_iterations
    from envplan.simulation.conditions import Conditions
    from envplan.simulation.costs import price_replays

    plan, profile = source.load()
    if ask is not None and switch_latency is None and not plan.job.machine.latency_ns:
        raise InputError("--ask needs --switch-latency: the plan is made for clocks at once")
    conditions = Conditions.of(
        noise=(noise or 0.0) / 100,
        seed=seed,
        switch_latency=switch_latency,
        ask=ask,
        runs=runs,
        sync_time=sync_time,
    )
    with naming(source.plan):
        timeline = envplan.simulate(plan, profile, force=source.force, **dict(conditions))
        tail = between_iterations(timeline, profile, between)
    run = costs.run()
    others = _other_kinds(plan, replica_profile or (), replica or ())
    together = None
    if others:
        kinds = [(plan, profile), *others]
        replayed = envplan.replay_replicas(kinds, conditions=conditions, force=source.force)
        together = replace(replayed, run=run)
    simulation = Simulation(
        timeline=timeline,
        conditions=conditions,
        reports=cluster.reports(plan, profile, conditions, force=source.force),
        together=together,
        run=run,
        costs=None if run is None else price_replays(run, timeline, sync_time),
        measured_latency_s=profile.measured_latency_s,
        between=tail,
    )
    if trace is not None:
        from envplan.simulation.chrome_trace import save_chrome_trace

        save_chrome_trace(timeline, trace)
    if plot is not None:
        draw_timeline(plot, timeline)
    written = [str(file) for file in (trace, plot) if file is not None]
    ui.answer(
        lambda: _document(simulation) | {"written": written},
        lambda: _print(simulation, profile),
        next_command=["envplan", "apply", str(source.plan)],
    )


def _other_kinds(
    plan: envplan.Plan, groups: Sequence[ReplicaGroup], plan_files: Sequence[Path]
) -> list[tuple[envplan.Plan, envplan.Profile]]:
    """Plan and profile of each further kind of replicas.

    Args:
        plan: the one that groups without a plan of their own are planned beside.
        groups: replicas on other hardware.
        plan_files: plans of replicas that have one.

    Raises:
        InputError: a file cannot be read, or a profile does not fit the plan.
    """
    from envplan.plan import find_profile
    from envplan.simulation.replicas import plan_beside

    kinds = []
    for group in groups:
        profile = envplan.Profile.open(group.profile)
        kinds.append((plan_beside(plan, profile, group.replicas), profile))
    for file in plan_files:
        other = envplan.Plan.load(file)
        kinds.append((other, find_profile(other.profile, file)))
    return kinds


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All that came of one call.

    Attributes:
        conditions: what the plan was replayed under.
        reports: the cluster and its further shapes; empty where none was asked for.
        together: the plan's replicas and those of other kinds; None where there are no others.
        run: whose costs are wanted; None where they are not.
        costs: what an iteration costs and what the run does.
        measured_latency_s: how late clocks come by the profile's sidecar; None: it does not say.
        between: what runs between iterations; None where nothing is known of it.
    """

    timeline: envplan.Timeline
    conditions: Conditions
    reports: Sequence[envplan.ClusterReport]
    together: ReplicaPlans | None
    run: Run | None
    costs: RunCosts | None
    measured_latency_s: float | None
    between: BetweenIterations | None

    @property
    def notes(self) -> list[str]:
        """Whether the plan states what came of the replay, and what it costs."""
        notes = self._clock_notes() + self._comparison_notes() + self._cost_notes()
        if self.between is not None:
            notes.append(_between_in_words(self.between))
        return notes

    def _clock_notes(self) -> list[str]:
        replay = self.timeline.replay
        if not replay.machine.latency_ns:
            if self.measured_latency_s is None or self.conditions.switch_latency is not None:
                return []
            late_ms = f"{1e3 * self.measured_latency_s:.3g}"
            return [
                f"clocks come at once here, and {late_ms} ms late on the profile's GPU, as it was "
                f"measured; --switch-latency {late_ms}ms replays that"
            ]
        num_requests = int((replay.requests_ns >= 0).sum())
        return [
            f"{describe_machine(replay.machine)}: {replay.num_late_requests} of "
            f"{counted(num_requests, 'clock change')} come after their operation has begun"
        ]

    def _comparison_notes(self) -> list[str]:
        timeline, plan = self.timeline, self.timeline.plan
        if self.conditions.sync_time is not None:
            if timeline.sync_time_ns > timeline.iteration_time_ns:
                return []
            return ["the plan takes longer than --sync-time, so nobody waits"]
        other_clocks = self.conditions.machine(plan.job) != plan.job.machine
        if self.conditions.noise or other_clocks:
            return []
        if (timeline.iteration_time, timeline.energy) == (plan.iteration_time, plan.energy):
            return ["time and energy are exactly what the plan states"]
        return ["the plan states another time or energy; `envplan check` says which is wrong"]

    def _cost_notes(self) -> list[str]:
        if self.run is None or self.costs is None or self.together is not None or self.reports:
            return []
        return replay_cost_notes(self.run, self.costs)


def _between_in_words(between: BetweenIterations) -> str:
    """What the highest clocks between iterations save and cost, as a sentence."""
    slow, fast = between.at_last_clocks, between.at_highest_clocks
    lowest_mhz, highest_mhz = min(between.last_clocks_mhz), max(between.last_clocks_mhz)
    clocks = f"{lowest_mhz} MHz"
    if lowest_mhz != highest_mhz:
        clocks = f"{lowest_mhz} to {highest_mhz} MHz"
    if between.instructions:
        what = f"{' and '.join(between.instructions)}, by the profile's rows"
    else:
        what = "modelled as scaling with the clock as each stage's last operation does"
    at_highest = f"{significant(fast.time_s)} s and {significant(fast.energy_j)} J at the highest"
    if not between.gets_own_clocks:
        return (
            f"between iterations ({what}): {at_highest} clocks; that is too short for clocks of "
            "its own, so the shim sets none"
        )
    at_last = f"{significant(slow.time_s)} s and {significant(slow.energy_j)} J"
    extra_j = between.extra_energy_j
    more_or_less = "more" if extra_j >= 0 else "less"
    return (
        f"between iterations ({what}): {at_last} at the last operations' clocks ({clocks}), "
        f"{at_highest}, which the shim sets: {significant(between.time_saved_s)} s sooner for "
        f"{significant(abs(extra_j))} J {more_or_less} an iteration"
    )


def _print(simulation: Simulation, profile: envplan.Profile) -> None:
    from envplan.plotting.titles import job_line

    timeline, plan = simulation.timeline, simulation.timeline.plan
    source = plan.profile.source
    several_runs = len(timeline.run_times_ns) > 1
    job = job_line(timeline.pipeline, plan.job.num_gpus)
    ui.say(f"{profile.describe()}; planner {plan.planner}; {job}")
    first = ", first run" if several_runs else ""
    ui.show_table(modelled_title(ITERATION_TITLE, source) + first, _stage_columns(timeline))
    ui.say(*_totals(timeline))
    if several_runs:
        _print_runs(timeline)
    print_clusters(simulation.reports, source, simulation.run)
    ui.say(*describe_configs(plan), *simulation.notes)
    if simulation.together is not None:
        print_replicas(simulation.together)


def _totals(timeline: envplan.Timeline) -> list[str]:
    """Time, energy, power and critical path of the iteration, a line each."""
    shown = significant
    until = ""
    if timeline.sync_time_ns > timeline.iteration_time_ns:
        until = f", waited for until {shown(timeline.sync_time)} s"
    return [
        f"iteration time {shown(timeline.iteration_time)} s{until}",
        f"energy {shown(timeline.energy)} J = computation {shown(timeline.computation_energy)} J + "
        f"blocking {shown(timeline.blocking_energy)} J",
        f"power {shown(timeline.average_power)} W on average, "
        f"{shown(timeline.peak_power)} W at the peak",
        _critical_path(timeline),
    ]


def _critical_path(timeline: envplan.Timeline) -> str:
    """How long the critical path is, and through which stages it goes."""
    stage_of_each = [timeline.pipeline.operations[i].stage for i in timeline.critical_path]
    stages = [str(stage) for stage, _ in groupby(stage_of_each)]
    path = " ".join(stages)
    if len(stages) > _MOST_STAGES_SHOWN:
        path = f"{len(stages) - 1} changes of stage"
    return f"critical path: {len(stage_of_each)} operations, by stage {path}"


def _print_runs(timeline: envplan.Timeline) -> None:
    percentiles = timeline.percentiles(_PERCENTS)
    columns = [
        text_column("percent of runs", _PERCENTS),
        number_column("iteration time at most (s)", percentiles.iteration_time_s),
        number_column("energy at most (J)", percentiles.energy_j),
    ]
    ui.show_table(f"{len(timeline.run_times_ns)} runs", columns)


def _stage_columns(timeline: envplan.Timeline) -> list[Column]:
    """Print what each stage does."""
    stages = timeline.stages
    busy_percents = []
    num_usable = []
    longest_stretches_s = []
    for stage in stages:
        busy_percents.append(100 * stage.busy_s / timeline.sync_time)
        num_usable.append(sum(bubble.usable for bubble in stage.bubbles))
        stretches_s = (bubble.could_stretch_s for bubble in stage.bubbles)
        longest_stretches_s.append(max(stretches_s, default=0.0))
    return [
        text_column("stage", [stage.stage for stage in stages]),
        number_column("busy (s)", [stage.busy_s for stage in stages]),
        number_column("blocked (s)", [stage.blocked_s for stage in stages]),
        percent_column("busy (%)", busy_percents, decimals=1),
        number_column("computation (J)", [stage.computation_energy_j for stage in stages]),
        number_column("blocking (J)", [stage.blocking_energy_j for stage in stages]),
        value_column("bubbles", [len(stage.bubbles) for stage in stages]),
        value_column("usable", num_usable),
        number_column("most stretch (s)", longest_stretches_s),
        value_column("clock changes", [len(stage.clock_changes) - 1 for stage in stages]),
    ]


def print_replicas(planned: ReplicaPlans) -> None:
    """A table of all kinds of replicas, and what they take together."""
    kinds = planned.kinds
    columns = [
        text_column("profile", [kind.profile_name for kind in kinds]),
        value_column("replicas", [kind.num_replicas for kind in kinds]),
        number_column("time (s)", [kind.iteration_time_s for kind in kinds]),
        number_column("energy (J)", [kind.energy_j for kind in kinds]),
        number_column("waiting (J)", [kind.waiting_energy_j for kind in kinds]),
        number_column("together (J)", [kind.energy_j + kind.waiting_energy_j for kind in kinds]),
    ]
    sources = [plan.profile.source for plan in planned.plans]
    ui.show_table(modelled_title(ITERATION_TITLE, *sources), columns)
    ui.say(
        f"all end at {significant(planned.sync_time)} s and use "
        f"{significant(planned.energy)} J, {planned.savings_percent:.2f}% less than "
        f"{significant(planned.baseline_energy)} J in {significant(planned.baseline_time)} s "
        "at maximum frequency"
    )
    if planned.gap is not None:
        ui.say(f"certified gap of all together {100 * planned.gap:.3f}%")
    if planned.costs is not None and planned.run is not None:
        what = "the run" if planned.run.iterations else "an iteration"
        for row in cost_rows(planned.costs, planned.run.currency, "g"):
            plan, before = significant(row.plan), significant(row.max_frequency)
            ui.say(f"{row.name} of {what}: {plan}, before {before}")


def _document(simulation: Simulation) -> dict[str, object]:
    timeline, run, costs = simulation.timeline, simulation.run, simulation.costs
    document: dict[str, object] = timeline.to_dict()
    if len(timeline.run_times_ns) > 1:
        percentiles = timeline.percentiles(_PERCENTS)
        document["runs"] = {
            "count": len(timeline.run_times_ns),
            "percents": list(_PERCENTS),
            "iteration_time_s": percentiles.iteration_time_s,
            "energy_j": percentiles.energy_j,
        }
    if simulation.together is not None:
        document["replicas"] = simulation.together.to_dict()
    if simulation.between is not None:
        document["between_iterations"] = simulation.between.to_dict()
    if costs is not None:
        document["costs"] = _cost_document(costs)
    if simulation.reports:
        document["cluster"] = [_report_document(report, run) for report in simulation.reports]
    document["notes"] = simulation.notes
    return document


def _report_document(report: envplan.ClusterReport, run: Run | None) -> dict[str, object]:
    document = report.to_dict()
    if run is not None:
        document["costs"] = _cost_document(report.costs(run))
    return document


def _cost_document(costs: RunCosts | RunComparison) -> dict[str, object]:
    """The costs of an iteration, and of the run where there is one."""
    document: dict[str, object] = {"iteration": costs.iteration.model_dump(exclude_none=True)}
    if costs.run is not None:
        document["run"] = costs.run.model_dump(exclude_none=True)
    return document
