"""`envplan simulate`: replay a plan, on one pipeline or on a cluster with stragglers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envplan.cli.command import PLOT_TYPES, Numbers, file_of, numbers, options, takes
from envplan.cli.costs import cost_columns, replay_cost_notes
from envplan.cli.inputs import check_outputs, naming
from envplan.cli.options import CostOptions, OutputOptions, ParallelOptions, PlanOptions
from envplan.cli.plan_file import load_plan
from envplan.cli.replicas import load_replicas, print_replicas
from envplan.cli.timeline import draw
from envplan.errors import InputError
from envplan.quantities import WHOLE

if TYPE_CHECKING:
    from envplan.cluster import ClusterReport, Slowdowns
    from envplan.costs import Run, Spent
    from envplan.plan import Plan
    from envplan.profile import Profile
    from envplan.replicas import ReplicaPlans
    from envplan.simulation import Conditions, Timeline

_PERCENTS = (5, 25, 50, 75, 95, 99)
_CLUSTER = "Cluster"


@options(
    """
    Cluster:
      --straggler [REPLICA:]FACTOR  A replica takes FACTOR times the plan's time; may be given
          more than once.
      --straggler-trace FILE  Stragglers of several iterations: CSV with
          iteration,replica,slowdown.
      --strong-scaling R,R,...  The same global batch on so many replicas, with fewer microbatches
          each.
    """,
    strong_scaling=numbers("32,64,128"),
)
class ClusterOptions(ParallelOptions):
    """Replicas of the plan together, some of which may straggle."""

    straggler: list[str] | None = None
    straggler_trace: Path | None = None
    strong_scaling: Numbers | None = None

    def __post_init__(self) -> None:
        """Raises: InputError: both options for stragglers are given."""
        if self.straggler and self.straggler_trace:
            raise InputError(
                "--straggler and --straggler-trace exclude each other; give one of them"
            )

    @property
    def given(self) -> str | None:
        """The first option given, None without any."""
        options = {
            "--dp": self.dp,
            "--tp": self.tp,
            "--cp": self.cp,
            "--straggler": self.straggler,
            "--straggler-trace": self.straggler_trace,
            "--strong-scaling": self.strong_scaling,
        }
        return next((name for name, value in options.items() if value), None)

    def reports(
        self, plan: Plan, profile: Profile, conditions: Conditions, *, force: bool, quiet: bool
    ) -> list[ClusterReport]:
        """The cluster, and then its further shapes; none where no option asks for it."""
        if self.given is None:
            return []
        from envplan.cli.output import progress_bar
        from envplan.cluster import read_slowdowns, simulate_cluster, strong_scaling

        replicas = self.dp or plan.job.replicas
        gpus = (self.tp or 1) * (self.cp or 1) if self.tp or self.cp else None
        slowdowns: Sequence[Slowdowns] = [_parse_stragglers(self.straggler or ())]
        if self.straggler_trace is not None:
            slowdowns = read_slowdowns(self.straggler_trace, replicas)
        asked: dict[str, Any] = {
            "slowdowns": slowdowns,
            "gpus_per_stage": gpus,
            "conditions": conditions,
            "force": force,
        }
        with progress_bar("Tracing the frontier", quiet=quiet) as progress:
            first = simulate_cluster(plan, profile, replicas=replicas, progress=progress, **asked)
        if not self.strong_scaling:
            return [first]
        batch = plan.job.microbatches * replicas
        return [
            first,
            *strong_scaling(plan, profile, self.strong_scaling, global_batch=batch, **asked),
        ]


@takes(
    """
    Noise:
      --seed N  Noise of another seed is other noise.
      --runs N  With --noise: replay N times, for percentiles.
    Cluster:
      --sync-time TIME  Everybody waits until so much time has passed, as in 16.5 (seconds).
    Most used:
      --trace FILE  Write a Chrome trace (JSON), for ui.perfetto.dev or chrome://tracing.
      --plot [FILE]  Draw the timeline: .png, .svg, .pdf or .html; without a name: timeline.png.
    Job:
      --replica PLAN  Further replicas follow this plan, and all wait for the slowest. May be given
          more than once.
      --replica-profile PROFILE[:COUNT]  COUNT further replicas (1) run on other hardware, by this
          profile, and are planned to end when this plan does. May be given more than once.
    """,
    seed=WHOLE.within(0, 2**63 - 1),
    trace=file_of((".json",), "a plan goes before --trace"),
    plot=file_of(PLOT_TYPES, "a plan goes before --plot", "timeline.png"),
)
def simulate(
    source: PlanOptions,
    cluster: ClusterOptions,
    costs: CostOptions,
    show: OutputOptions,
    noise: float | None = None,
    seed: int = 0,
    runs: int = 1,
    switch_latency: float | None = None,
    sync_time: float | None = None,
    replica: list[Path] | None = None,
    replica_profile: list[str] | None = None,
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
    from envplan.simulation import Conditions
    from envplan.simulation import simulate as replay

    read = [("the trace of stragglers", cluster.straggler_trace), *costs.files]
    check_outputs(trace, plot, inputs=read)
    if (noise or 0.0) > 100:
        raise InputError(f"--noise must be at most 100 percent, not {noise:g}")

    loaded, profile = load_plan(source, trace, plot)
    conditions = Conditions.of(
        noise=(noise or 0.0) / 100,
        seed=seed,
        switch_latency=switch_latency,
        runs=runs,
        sync_time=sync_time,
    )
    with naming(source.plan):
        timeline = replay(loaded, profile, force=source.force, **dict(conditions))
    together = None
    if replica or replica_profile:
        together = load_replicas(
            (loaded, profile),
            replica or [],
            replica_profile or [],
            conditions=conditions,
            force=source.force,
        )
    run = costs.run(None) if costs.given else None
    if together is not None:
        together = replace(together, run=run)
    reports = cluster.reports(loaded, profile, conditions, force=source.force, quiet=show.quiet)
    if trace is not None:
        from envplan.chrome_trace import save_chrome_trace

        save_chrome_trace(timeline, trace)
    if plot is not None:
        draw(timeline, plot)
    planned_s = loaded.job.switch_latency_s or 0.0
    other_clocks = switch_latency not in (None, planned_s)
    notes = _notes(timeline, sync_time, disturbed=bool(noise) or other_clocks)
    spent = None
    if run is not None:
        from envplan.costs.spending import spent_in_replays

        spent = spent_in_replays(run, timeline, sync_time)
        if together is None and not reports:
            notes += replay_cost_notes(run, spent)

    def tell() -> None:
        _print(timeline, profile, reports, run, notes)
        if together is not None:
            print_replicas(together)

    from envplan.cli.output import answer

    answer(
        show,
        lambda: {
            **_document(timeline, reports, together, run, spent, notes),
            "written": [str(output) for output in (trace, plot) if output is not None],
        },
        tell,
        written=[trace, plot],
        then=["envplan", "apply", str(source.plan)],
    )


def _cost_document(report: ClusterReport, run: Run) -> dict[str, Any]:
    iteration, whole = report.costs(run)
    pairs = {"iteration": iteration, "run": whole}
    return {n: pair.model_dump(exclude_none=True) for n, pair in pairs.items() if pair is not None}


def _parse_stragglers(texts: Sequence[str]) -> dict[int, float]:
    """Slowdown by replica; those without a replica get the lowest that are free."""
    from envplan.cluster import check_slowdown

    named: dict[int, float] = {}
    unnamed: list[float] = []
    for text in texts:
        replica, colon, factor = text.rpartition(":")
        try:
            slowdown = check_slowdown(float(factor))
            number = int(replica) if colon else None
        except (ValueError, InputError):
            raise InputError(
                "--straggler must be a slowdown above 0, such as 1.2, or 3:1.2 for replica 3, "
                f"not {text}"
            ) from None
        if number is None:
            unnamed.append(slowdown)
        elif number in named:
            raise InputError(f"--straggler names replica {number} twice")
        else:
            named[number] = slowdown
    free = (number for number in range(len(texts)) if number not in named)
    return named | dict(zip(free, unnamed, strict=False))


def _notes(timeline: Timeline, sync_time: float | None, *, disturbed: bool) -> list[str]:
    plan = timeline.plan
    if sync_time is not None:
        late = timeline.sync_time_ns > timeline.iteration_time_ns
        return [] if late else ["the plan takes longer than --sync-time, so nobody waits"]
    if disturbed:
        return []
    if (timeline.iteration_time, timeline.energy) == (plan.iteration_time, plan.energy):
        return ["time and energy are exactly what the plan states"]
    return ["the plan states another time or energy; `envplan check` says which is wrong"]


def _print(
    timeline: Timeline,
    profile: Profile,
    reports: Sequence[ClusterReport],
    run: Run | None,
    notes: Sequence[str],
) -> None:
    from envplan.cli.output import (
        ITERATION,
        describe_configs,
        describe_profile,
        print_columns,
        say,
        significant,
        titled,
    )
    from envplan.plotting.figures import job_line

    plan = timeline.plan
    job = job_line(timeline.pipeline, plan.job.num_gpus)
    say(f"{describe_profile(profile)}; planner {plan.planner}; {job}")
    source = plan.profile.source
    first = ", first run" if len(timeline.run_times_ns) > 1 else ""
    print_columns(titled(ITERATION, source) + first, _stages(timeline))
    until = ""
    if timeline.sync_time_ns > timeline.iteration_time_ns:
        until = f", waited for until {significant(timeline.sync_time)} s"
    say(f"iteration time {significant(timeline.iteration_time)} s{until}")
    say(
        f"energy {significant(timeline.energy)} J = computation "
        f"{significant(timeline.computation_energy)} J + blocking "
        f"{significant(timeline.blocking_energy)} J"
    )
    say(
        f"power {significant(timeline.average_power)} W on average, "
        f"{significant(timeline.peak_power)} W at the peak"
    )
    say(f"critical path: {_path_in_words(timeline)}")
    if len(timeline.run_times_ns) > 1:
        _print_percentiles(timeline)
    _print_clusters(reports, source, run)
    for note in (*describe_configs(plan), *notes):
        say(note)


def _stages(timeline: Timeline) -> dict[str, list[str]]:
    """What each stage does, by column."""
    from envplan.cli.output import column
    from envplan.units import j_from_fj, s_from_ns

    stages = timeline.stages
    of_stage = [[b for b in timeline.bubbles if b.stage == use.stage] for use in stages]
    stretch = [s_from_ns(max((b.stretch_ns for b in bs), default=0)) for bs in of_stage]
    return {
        "stage": [str(use.stage) for use in stages],
        "busy (s)": column([s_from_ns(use.busy_ns) for use in stages]),
        "blocked (s)": column([s_from_ns(use.blocked_ns) for use in stages]),
        "busy (%)": [f"{100 * use.busy_ns / timeline.sync_time_ns:.1f}" for use in stages],
        "computation (J)": column([j_from_fj(use.computation_fj) for use in stages]),
        "blocking (J)": column([j_from_fj(use.blocking_fj) for use in stages]),
        "bubbles": [str(len(bubbles)) for bubbles in of_stage],
        "usable": [str(sum(bubble.usable for bubble in bubbles)) for bubbles in of_stage],
        "most stretch (s)": column(stretch),
        "clock changes": [str(len(use.clock_changes) - 1) for use in stages],
    }


def _path_in_words(timeline: Timeline) -> str:
    """The critical path by the stages it goes through."""
    stages = [timeline.operations[index].operation.stage for index in timeline.critical_path]
    turns = [stage for k, stage in enumerate(stages) if k == 0 or stage != stages[k - 1]]
    shown = " ".join(map(str, turns)) if len(turns) <= 24 else f"{len(turns) - 1} changes of stage"
    return f"{len(stages)} operations, by stage {shown}"


def _print_percentiles(timeline: Timeline) -> None:
    from envplan.cli.output import column, print_columns

    times, energies = timeline.percentiles(_PERCENTS)
    columns = {
        "percent of runs": list(map(str, _PERCENTS)),
        "iteration time at most (s)": column(times),
        "energy at most (J)": column(energies),
    }
    print_columns(f"{len(timeline.run_times_ns)} runs", columns)


def _print_clusters(reports: Sequence[ClusterReport], source: str | None, run: Run | None) -> None:
    if not reports:
        return
    from envplan.cli.output import print_columns, say, significant, titled

    count = len(reports[0].iterations)
    title = titled(f"Cluster, {count} iteration{'s' if count > 1 else ''}", source)
    if len(reports) > 1:
        title += "; the first row is the plan, others are planned anew for the same global batch"
    columns: dict[str, Callable[[ClusterReport], str]] = {
        "GPUs": lambda one: str(one.num_gpus),
        "replicas": lambda one: str(one.replicas),
        "microbatches": lambda one: str(one.num_microbatches),
        "time (s)": lambda one: significant(one.time),
        "max frequency (J)": lambda one: significant(one.baseline_energy),
        "plan (J)": lambda one: significant(one.plan_energy),
        "with look-up (J)": lambda one: significant(one.energy),
        "intrinsic saved (%)": lambda one: f"{one.percent(one.intrinsic_savings):.2f}",
        "extrinsic saved (%)": lambda one: f"{one.percent(one.extrinsic_savings):.2f}",
        "total saved (%)": lambda one: f"{one.percent(one.baseline_energy - one.energy):.2f}",
    }
    cells = {name: [shown(one) for one in reports] for name, shown in columns.items()}
    print_columns(title, cells, words=0)
    if run is not None:
        title, spent = cost_columns(run, [one.costs(run) for one in reports])
        print_columns(titled(title, source), {"GPUs": cells["GPUs"], **spent}, words=0)
    straggling = [it for it in reports[0].iterations if it.stragglers]
    if straggling:
        worst = max(straggling, key=lambda it: it.sync_time_ns)
        times = [worst.sync_time_ns / 1e9, worst.followed_time_ns / 1e9]
        say(
            f"somebody straggles in {len(straggling)} of {count}; at worst T' is "
            f"{significant(times[0])} s, and the others follow the plan of "
            f"{significant(times[1])} s"
        )
    for note in reports[0].notes:
        say(note)


def _document(
    timeline: Timeline,
    reports: Sequence[ClusterReport],
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
        document["costs"] = {
            name: one.model_dump(exclude_none=True)
            for name, one in zip(("iteration", "run"), spent, strict=True)
            if one is not None
        }
    if reports:
        document["cluster"] = [
            report.to_dict() | ({} if run is None else {"costs": _cost_document(report, run)})
            for report in reports
        ]
    document["notes"] = [*notes, *(note for report in reports[:1] for note in report.notes)]
    return document
