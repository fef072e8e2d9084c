"""`envplan simulate`: replay a plan, on one pipeline or on a cluster with stragglers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import envplan
from envplan._io.words import counted
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.costs import cost_columns, cost_rows, replay_cost_notes
from envplan.cli.options import CostOptions, ParallelOptions, PlanOptions
from envplan.cli.report import draw_timeline
from envplan.errors import InputError, naming
from envplan.quantities import NUMBER, WHOLE

if TYPE_CHECKING:
    from envplan._io.documents import Model
    from envplan.costs import Run
    from envplan.costs.model import Spent
    from envplan.simulation.iteration import Conditions
    from envplan.simulation.replicas import ReplicaPlans

_PERCENTS = (5, 25, 50, 75, 95, 99)


def parse_replica(text: str, option: str) -> tuple[str, int]:
    """What --replica-profile takes: a profile and how many replicas it is for.

    Raises:
        InputError: the count is not a number from 1 up.
    """
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, 1
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count)):
        raise InputError(
            f"{option} must be PROFILE or PROFILE:COUNT with a COUNT from 1 up, not {text}"
        )
    return name, int(count)


def _straggler(text: str, name: str) -> tuple[int | None, float]:
    """A replica, if one is named, and its slowdown, from 1.2 or 3:1.2."""
    replica, colon, factor = text.rpartition(":")
    who = int(WHOLE.parse(replica, name)) if colon else None
    return who, NUMBER.within(1, 1e6).parse(factor, name)


@cmd.options(
    """
    Cluster:
      --straggler [REPLICA:]FACTOR  A replica takes FACTOR times the plan's time; may be given
          more than once.
      --straggler-trace FILE  Stragglers of several iterations: CSV with
          iteration,replica,slowdown.
      --strong-scaling R,R,...  The same global batch on so many replicas, with fewer microbatches
          each.
    """,
    strong_scaling=cmd.numbers("32,64,128"),
    straggler=_straggler,
)
class ClusterOptions(ParallelOptions):
    """Replicas of the plan together, some of which may straggle."""

    straggler: list[Any] | None = None
    straggler_trace: Path | None = None
    strong_scaling: cmd.Numbers | None = None

    def __post_init__(self) -> None:
        """Raises: InputError: both options for stragglers are given."""
        cmd.refuse_both(cmd.given(self, "straggler straggler_trace"))

    def reports(
        self, plan: envplan.Plan, profile: envplan.Profile, conditions: Conditions, *, force: bool
    ) -> list[envplan.ClusterReport]:
        """The cluster, and then its further shapes; none where no option asks for it.

        Stragglers without a replica are the lowest that are free.

        Raises:
            InputError: a replica straggles twice, or as for simulate_cluster.
        """
        if not cmd.given(self):
            return []
        replicas, slowdowns = self.dp or plan.job.replicas, dict[int, float]()
        for replica, factor in sorted(self.straggler or [], key=lambda one: one[0] is None):
            if replica in slowdowns:
                raise InputError(f"--straggler names replica {replica} twice")
            free = min({*range(len(slowdowns) + 1)} - slowdowns.keys())
            slowdowns[free if replica is None else replica] = factor
        how: dict[str, Any] = {
            "slowdowns": [slowdowns],
            "gpus_per_stage": (self.tp or 1) * (self.cp or 1) if self.tp or self.cp else None,
            "conditions": conditions,
            "force": force,
        }
        if self.straggler_trace is not None:
            how["slowdowns"] = envplan.read_slowdowns(self.straggler_trace, replicas)
        with ui.Working("Tracing the frontier") as work:
            how["progress"] = work.walked
            reports = [envplan.simulate_cluster(plan, profile, replicas=replicas, **how)]
        if self.strong_scaling:
            how["global_batch"] = plan.job.microbatches * replicas
            reports += envplan.strong_scaling(plan, profile, self.strong_scaling, **how)
        return reports


@cmd.takes(
    """
    Noise:
      --seed N  Noise of another seed is other noise.
      --runs N  With --noise: replay N times, for percentiles.
    Cluster:
      --sync-time TIME  Everybody waits until so much time has passed, as in 16.5 (seconds).
    Most used:
      --trace FILE  Write a Chrome trace, for ui.perfetto.dev or chrome://tracing: .json.
      --plot [FILE]  Draw the timeline: .png, .svg, .pdf or .html; without a name: timeline.png.
    Job:
      --replica PLAN  Further replicas follow this plan, and all wait for the slowest. May be given
          more than once.
      --replica-profile PROFILE[:COUNT]  COUNT further replicas (1) run on other hardware, by this
          profile, and are planned to end when this plan does. May be given more than once.
    """,
    seed=WHOLE.within(0, 2**63 - 1),
    replica_profile=parse_replica,
)
def simulate(
    source: PlanOptions,
    cluster: ClusterOptions,
    costs: CostOptions,
    noise: float | None = None,
    seed: int = 0,
    runs: int = 1,
    switch_latency: float | None = None,
    sync_time: float | None = None,
    replica: list[Path] | None = None,
    replica_profile: list[Any] | None = None,
    trace: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Replay a plan: what runs when, where GPUs wait, and what it all draws.

    Without noise and switch latency this is exact. With replicas or stragglers it also reckons a
    cluster, in which the other replicas switch to the plan looked up for the straggler's time.

    \b
    Example:
      envplan simulate plan.json --trace trace.json --plot
      envplan simulate plan.json --noise 2 --runs 200 --switch-latency 10
      envplan simulate plan.json --replicas 128 --straggler 1.2
      envplan simulate plan.json --price 0.25 --carbon 380 --iterations 100000
    """
    from envplan.plan import find_profile
    from envplan.simulation.iteration import Conditions
    from envplan.simulation.replicas import plan_beside

    loaded, profile = source.load()
    conditions = Conditions.of(
        noise=(noise or 0.0) / 100,
        seed=seed,
        switch_latency=switch_latency,
        runs=runs,
        sync_time=sync_time,
    )
    with naming(source.plan):
        timeline = envplan.simulate(loaded, profile, force=source.force, **dict(conditions))
    run, together, spent, kinds = costs.run(), None, None, [(loaded, profile)]
    for name, count in replica_profile or ():
        other = envplan.Profile.open(name)
        kinds.append((plan_beside(loaded, other, count), other))
    for file in replica or ():
        further = envplan.Plan.load(file)
        kinds.append((further, find_profile(further.profile, file)))
    if len(kinds) > 1:
        together = envplan.replay_replicas(kinds, conditions=conditions, force=source.force)
        together = dataclasses.replace(together, run=run)
    reports = cluster.reports(loaded, profile, conditions, force=source.force)
    if trace is not None:
        from envplan.simulation.chrome_trace import save_chrome_trace

        save_chrome_trace(timeline, trace)
    if plot is not None:
        draw_timeline(plot, timeline)
    other_clocks = switch_latency not in (None, loaded.job.switch_latency_s or 0.0)
    said = (timeline.iteration_time, timeline.energy) == (loaded.iteration_time, loaded.energy)
    notes = []
    if sync_time is not None:
        if timeline.sync_time_ns == timeline.iteration_time_ns:
            notes.append("the plan takes longer than --sync-time, so nobody waits")
    elif said and not (noise or other_clocks):
        notes.append("time and energy are exactly what the plan states")
    elif not (noise or other_clocks):
        notes.append("the plan states another time or energy; `envplan check` says which is wrong")
    if run is not None:
        from envplan.simulation.costs import spent_in_replays

        spent = spent_in_replays(run, timeline, sync_time)
        if together is None and not reports:
            notes += replay_cost_notes(run, *spent)

    def tell() -> None:
        _print(timeline, profile, reports, run, notes)
        if together is not None:
            print_replicas(together)

    ui.answer(
        lambda: {
            **_document(timeline, reports, together, run, spent, notes),
            "written": [str(output) for output in (trace, plot) if output is not None],
        },
        tell,
        then=["envplan", "apply", str(source.plan)],
    )


def _print(
    timeline: envplan.Timeline,
    profile: envplan.Profile,
    reports: Sequence[envplan.ClusterReport],
    run: Run | None,
    notes: Sequence[str],
) -> None:
    from envplan.plotting.figures import job_line

    plan, shown = timeline.plan, ui.significant
    job = job_line(timeline.pipeline, plan.job.num_gpus)
    ui.say(f"{profile.describe()}; planner {plan.planner}; {job}")
    source = plan.profile.source
    first = ", first run" if len(timeline.run_times_ns) > 1 else ""
    ui.print_columns(ui.titled(ui.ITERATION, source) + first, _stages(timeline))
    on_path = [timeline.pipeline.operations[i].stage for i in timeline.critical_path]
    turns = [str(stage) for stage, _ in groupby(on_path)]
    path = " ".join(turns) if len(turns) <= 24 else f"{len(turns) - 1} changes of stage"
    waits = timeline.sync_time_ns > timeline.iteration_time_ns
    until = f", waited for until {shown(timeline.sync_time)} s" if waits else ""
    ui.say(
        f"iteration time {shown(timeline.iteration_time)} s{until}",
        f"energy {shown(timeline.energy)} J = computation {shown(timeline.computation_energy)} J + "
        f"blocking {shown(timeline.blocking_energy)} J",
        f"power {shown(timeline.average_power)} W on average, "
        f"{shown(timeline.peak_power)} W at the peak",
        f"critical path: {len(on_path)} operations, by stage {path}",
    )
    if first:
        times, energies = timeline.percentiles(_PERCENTS)
        columns = {
            "percent of runs": _PERCENTS,
            "iteration time at most (s)": times,
            "energy at most (J)": energies,
        }
        ui.print_columns(f"{len(timeline.run_times_ns)} runs", columns)
    _print_clusters(reports, source, run)
    ui.say(*ui.describe_configs(plan), *notes)


def _stages(timeline: envplan.Timeline) -> dict[str, Any]:
    """What each stage does, by column."""
    stages = timeline.stages
    gaps = [use["bubbles"] for use in stages]

    def of(name: str) -> list[Any]:
        return [use[name] for use in stages]

    return {
        "stage": of("stage"),
        "busy (s)": of("busy_s"),
        "blocked (s)": of("blocked_s"),
        "busy (%)": [f"{100 * busy / timeline.sync_time:.1f}" for busy in of("busy_s")],
        "computation (J)": of("computation_energy_j"),
        "blocking (J)": of("blocking_energy_j"),
        "bubbles": list(map(len, gaps)),
        "usable": [sum(gap["usable"] for gap in some) for some in gaps],
        "most stretch (s)": [
            max((gap["could_stretch_s"] for gap in some), default=0.0) for some in gaps
        ],
        "clock changes": [len(changes) - 1 for changes in of("clock_changes")],
    }


def _print_clusters(
    reports: Sequence[envplan.ClusterReport], source: str | None, run: Run | None
) -> None:
    if not reports:
        return
    title = ui.titled(f"Cluster, {counted(len(reports[0].iterations), 'iteration')}", source)
    if len(reports) > 1:
        title += "; the first row is the plan, others are planned anew for the same global batch"
    headers = (
        *("GPUs", "replicas", "microbatches", "time (s)", "max frequency (J)", "plan (J)"),
        *("with look-up (J)", "intrinsic saved (%)", "extrinsic saved (%)", "total saved (%)"),
    )
    rows = [
        [
            *(one.num_gpus, one.replicas, one.num_microbatches),
            *map(ui.significant, (one.time, one.baseline_energy, one.plan_energy, one.energy)),
            *map(one.percent, (one.intrinsic_savings, one.extrinsic_savings)),
            one.percent(one.baseline_energy - one.energy),
        ]
        for one in reports
    ]
    ui.print_table(title, headers, rows, words=0)
    if run is not None:
        title, spent = cost_columns(run, [one.costs(run) for one in reports])
        gpus = [one.num_gpus for one in reports]
        ui.print_columns(ui.titled(title, source), {"GPUs": gpus, **spent}, words=0)
    iterations = reports[0].iterations
    straggling = [it for it in iterations if it["stragglers"]]
    if straggling:
        worst = max(straggling, key=lambda it: it["sync_time_s"])
        ui.say(
            f"somebody straggles in {len(straggling)} of {len(iterations)}; at worst T' is "
            f"{ui.significant(worst['sync_time_s'])} s, and the others follow the plan of "
            f"{ui.significant(worst['followed_time_s'])} s"
        )


def print_replicas(planned: ReplicaPlans) -> None:
    """A table of all kinds of replicas, and what they take together."""
    plans, waits = planned.plans, planned.waiting_energies
    columns = {
        "profile": [plan.profile.name for plan in plans],
        "replicas": [plan.job.replicas for plan in plans],
        "time (s)": [plan.iteration_time for plan in plans],
        "energy (J)": [plan.energy for plan in plans],
        "waiting (J)": waits,
        "together (J)": [plan.energy + wait for plan, wait in zip(plans, waits, strict=True)],
    }
    ui.print_columns(ui.titled(ui.ITERATION, *(plan.profile.source for plan in plans)), columns)
    ui.say(
        f"all end at {ui.significant(planned.sync_time)} s and use "
        f"{ui.significant(planned.energy)} J, {planned.savings_percent:.2f}% less than "
        f"{ui.significant(planned.baseline_energy)} J in {ui.significant(planned.baseline_time)} s "
        "at maximum frequency"
    )
    if planned.gap is not None:
        ui.say(f"certified gap of all together {100 * planned.gap:.3f}%")
    if planned.costs is not None and planned.run is not None:
        what = "the run" if planned.run.iterations else "an iteration"
        for row in cost_rows(planned.costs, planned.run.currency, "g"):
            plan, before = ui.significant(row.plan), ui.significant(row.max_frequency)
            ui.say(f"{row.name} of {what}: {plan}, before {before}")


def _document(
    timeline: envplan.Timeline,
    reports: Sequence[envplan.ClusterReport],
    together: ReplicaPlans | None,
    run: Run | None,
    spent: tuple[Spent, Spent | None] | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    document: dict[str, Any] = timeline.to_dict()
    if len(timeline.run_times_ns) > 1:
        times, energies = timeline.percentiles(_PERCENTS)
        document["runs"] = {
            "count": len(timeline.run_times_ns),
            "percents": list(_PERCENTS),
            "iteration_time_s": times,
            "energy_j": energies,
        }
    if together is not None:
        document["replicas"] = together.to_dict()
    if spent is not None:
        document["costs"] = _cost_document(spent)
    if reports:
        document["cluster"] = [
            report.to_dict() | ({"costs": _cost_document(report.costs(run))} if run else {})
            for report in reports
        ]
    return document | {"notes": list(notes)}


def _cost_document(spent: tuple[Model, Model | None]) -> dict[str, Any]:
    named = zip(("iteration", "run"), spent, strict=True)
    return {name: one.model_dump(exclude_none=True) for name, one in named if one is not None}
