"""`envplan solve`: one plan for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import envplan
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli import state
from envplan.cli.costs import cost_rows, costs_document, print_costs, year_of
from envplan.cli.groups import CostOptions, JobOptions
from envplan.cli.plan_notes import plan_notes
from envplan.cli.progress import progress
from envplan.cli.shared import ReplicaGroup, parse_replica_group
from envplan.cli.simulate import print_replicas
from envplan.errors import naming
from envplan.quantities import LONG_TIME, PERCENT, WHOLE

if TYPE_CHECKING:
    from envplan.planners import Planner

#: What the library calls as options do.
_ASKED: Final = """
    target_time min_energy straggler_time energy_budget power_cap peak_power_cap polish ladder
"""
#: What our planner alone can do.
_OURS: Final = """
    min_energy energy_budget power_cap peak_power_cap switch_latency min_dwell robust deadline
    polish ladder
"""


@cmd.options(
    """
    Most used:
      --target-time TIME  Least energy with an iteration of at most TIME, as in 14.2 (seconds) or
          900ms.
      --slowdown PCT  Least energy at most PCT percent above T_min.
      --min-energy  Least energy of all, at T_star.
    Target:
      --energy-budget J  Shortest iteration of at most J joules over all GPUs.
      --power-cap W  Shortest iteration of at most W watts over all GPUs, on average.
      --peak-power-cap W  Shortest iteration of never more than W watts over all GPUs; with
          --target-time, --slowdown or --min-energy: least energy.
      --straggler-time TIME  Some replica takes so long anyway: use what time that leaves, up to
          T_max.
      --polish TIME  Time to spend on improving the plan with CP-SAT, as in 30s; default: none.
      --ladder N  Put up to N slower plans, up to T_max, into the file for when a straggler
          appears.
      --planner NAME  frontier, max_frequency, zeus_global, zeus_per_stage or envpipe; envpipe
          brings its own schedule unless one is named.
      --clocks FILE  Choose nothing: take the clocks from FILE (freqs_pipeline_*.py of Perseus and
          Zeus, a frequency plan, or a CSV) and say what they cost and what is lost.
    Noise:
      --robust PCT  Hold the target with a probability of PCT percent, though times vary.
    Money:
      --deadline TIME  The cheapest plan whose run is over within TIME, as in 14d, 36h or 1d12h.
      --minimize WHAT  With --deadline: money, carbon or energy; default: the first of these that
          is known.
    """,
    ladder=WHOLE,
    robust=PERCENT.within(0.001, 99.9),
    deadline=LONG_TIME,
    minimize=cmd.one_of("money", "carbon", "energy"),
)
class AskedOptions(CostOptions):
    """What is wanted of a plan, who makes it, and what it costs; without a target, no slowdown."""

    target_time: float | None = None
    slowdown: float | None = None
    min_energy: bool = False
    energy_budget: float | None = None
    power_cap: float | None = None
    peak_power_cap: float | None = None
    straggler_time: float | None = None
    polish: float = 0.0
    ladder: int = 0
    planner: str = "frontier"
    clocks: Path | None = None
    reconfigure: str | None = None
    switch_latency: float | None = None
    min_dwell: float | None = None
    robust: float | None = None
    noise: float | None = None
    deadline: float | None = None
    minimize: Literal["energy", "money", "carbon"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cmd.refuse_both(cmd.given(self, "target_time slowdown min_energy deadline"))
        cmd.needs(self, minimize="deadline", deadline="iterations tokens")

    def request(self, frontier: envplan.Frontier) -> envplan.Request:
        """What the options ask for.

        Raises:
            InputError: two of them exclude each other, or a rate cannot be read.
        """
        percents = {"slowdown": self.slowdown, "probability": self.robust, "noise": self.noise}
        asked: dict[str, Any] = {name: getattr(self, name) for name in _ASKED.split()}
        asked |= {name: percent and percent / 100 for name, percent in percents.items()}
        return envplan.Request.from_options(
            **asked,
            switch_latency=self.switch_latency or 0.0,
            min_hold=self.min_dwell or 0.0,
            run=self.run(frontier, deadline_s=self.deadline, minimize=self.minimize),
        )

    def other_planner(self) -> Planner | None:
        """The planner that the options ask for, if it can do all else they ask for; None: ours.

        Raises:
            InputError: there is no such planner, or it cannot.
        """
        if not cmd.given(self, "planner clocks reconfigure"):
            return None
        from envplan.planners import EnvPipe, planner_named

        planner = planner_named(self.planner)
        if self.planner != EnvPipe.name:
            why = f"goes with --planner envpipe, not {self.planner}"
            cmd.refuse(cmd.given(self, "reconfigure"), why)
        cmd.refuse_both(cmd.given(self, "clocks planner"))
        timely = self.clocks is None and planner.takes_target
        takes = "--target-time or --slowdown" if timely else "no target"
        who = self.planner if self.clocks is None else "--clocks"
        cmd.refuse(
            cmd.given(self, _OURS if timely else f"target_time slowdown {_OURS}"),
            f"goes with --planner frontier; {who} takes {takes} and knows no limits, so leave one "
            "of the two out",
        )
        return EnvPipe(self.reconfigure) if self.reconfigure is not None else planner


@cmd.takes(
    """
    Most used:
      -o, --output FILE  Where the plan goes.
    Job:
      --replica-profile PROFILE[:COUNT]  Further replicas run on other hardware: COUNT of them (1)
          by this profile. May be given more than once; each kind gets a plan of its own, and all
          end together.
    """,
    replica_profile=parse_replica_group,
)
def solve(
    job: JobOptions,
    asked: AskedOptions,
    replica_profile: list[Any] | None = None,
    output: Path = Path("plan.json"),
) -> None:
    """Choose a frequency for every operation and write the plan.

    Without a target: no slowdown, the least energy at T_min. Targets and limits combine.

    \b
    Example:
      envplan solve --target-time 14.2
      envplan solve a40-gpt3-1.3b-4stage --microbatches 32 --slowdown 1 -o plan.json
      envplan solve a40-gpt3-1.3b-4stage --planner envpipe
      envplan solve --clocks freqs_pipeline_00030.py
      envplan solve --price 0.25 --iterations 100000 --deadline 21d
      envplan solve -m 8 --slowdown 2 --switch-latency 20 --min-dwell 100 --ladder 4
      envplan solve --slowdown 3 --robust 95 --noise 2 --peak-power-cap 2000
    """
    if asked.planner == "envpipe" and not job.dag and job.vp in (None, 1):
        job = replace(job, schedule=job.schedule or "envpipe")
    planner = asked.other_planner()
    if replica_profile:
        cmd.refuse(
            cmd.given(asked, "clocks"),
            "says the clocks of one kind of replica: make a plan for each, and give them to "
            "envplan simulate PLAN --replica PLAN",
        )
        _solve_replicas(job, replica_profile, asked, planner)
        return
    frontier = job.trace(whole=False)
    request = asked.request(frontier)
    with progress("Planning") as work:
        if asked.clocks is not None:
            from envplan.enforce.given_clocks import read_clocks

            shape = frontier.pipeline, frontier.profile
            clocks = read_clocks(asked.clocks, frontier.pipeline)
            with naming(asked.clocks):
                plan = envplan.plan_from_clocks(*shape, clocks, frontier=frontier)
        elif planner is None:
            plan = frontier.solve(request, progress=work.frontier_step)
        else:
            from envplan.planners import answer

            plan = answer(planner, frontier, request)
    plan.save(output)
    ui.answer(
        lambda: _document(frontier, plan, output),
        lambda: _print(frontier, plan),
        last=year_of(plan, asked),
        then=["envplan", "report", str(output)],
    )


def _print(frontier: envplan.Frontier, plan: envplan.Plan) -> None:
    ui.say(ui.describe_job(frontier))
    before, after = plan.predicted.baseline, plan.predicted
    gap, until = ("certified gap (%)", after.gap), after.until_straggler
    rows = [
        ("iteration time (s)", before.iteration_time_s, after.iteration_time_s),
        ("energy (J)", before.energy_j, after.energy_j),
    ]
    if until is not None:
        rows.append(("energy with waiting (J)", until.baseline_energy_j, until.energy_j))
        gap = ("certified gap with waiting (%)", until.gap)
    rows.append(("average power (W)", before.average_power_w, after.average_power_w))
    if plan.costs is not None:  # without the energy, which stands there in J
        costs = cost_rows(plan.costs.iteration, plan.costs.currency, "g")
        rows += [(row.name, row.max_frequency, row.plan) for row in costs[1:]]
    table = [*ui.changes(rows), [gap[0], "", f"{100 * gap[1]:.3f}", ""]]
    headers = ("", "max frequency", "plan", "change (%)")
    ui.print_table(ui.titled(ui.ITERATION, plan.profile.source), headers, table)
    print_costs(plan)
    ui.say(*plan_notes(frontier, plan), ui.describe_ends(frontier))
    if plan.ladder is not None:
        ui.say(f"{len(plan.ladder)} slower plans in the ladder for stragglers")


def _document(frontier: envplan.Frontier, plan: envplan.Plan, output: Path) -> dict[str, Any]:
    left_out: Any = {"stages": True, "schema_id": True, "ladder": True, "job": {"dag"}}
    head = plan.model_dump(by_alias=True, exclude_none=True, exclude=left_out)
    costs = {} if plan.costs is None else {"costs": costs_document(plan)}
    ends = {"t_min_s": frontier.min_time, "t_star_s": frontier.min_energy_time}
    return {"plan": str(output), **ends, "notes": plan_notes(frontier, plan), **head, **costs}


def _solve_replicas(
    job: JobOptions,
    others: Sequence[ReplicaGroup],
    asked: AskedOptions,
    planner: Planner | None,
) -> None:
    """Plan every kind of replica for a common time, write the plans and say what they do.

    Args:
        others: profiles of the other kinds, and how many replicas have each.
        planner: that plans every kind; None: our own.

    Raises:
        InputError: options contradict each other, or a profile does not fit the job.
        NoAnswerError: the slowest kind cannot meet the target, or a limit cannot be kept.
    """
    files = state.outputs
    for number in range(1, len(others) + 1):
        cmd.will_write(files[0].with_suffix(f".replica{number}{files[0].suffix}"))
    profile, pipeline = job.load()
    frontiers = [job.trace((profile, pipeline), full=True)]
    for group in others:
        other = job.fitted(envplan.Profile.open(group.profile), pipeline)
        frontiers.append(job.trace((other, pipeline), group.replicas, full=True))
    with progress("planning every kind of replica"):
        planned = envplan.plan_replicas(frontiers, asked.request(frontiers[0]), planner)
    for plan, file in zip(planned.plans, files, strict=True):
        plan.save(file)

    def tell() -> None:
        ui.say(*map(ui.describe_job, frontiers))
        print_replicas(planned)
        least = max(frontier.min_time for frontier in frontiers)
        ui.say(f"T_min of all together {ui.significant(least)} s, that of the slowest")

    ui.answer(
        lambda: {"plans": [str(file) for file in files], **planned.to_dict()},
        tell,
        then=["envplan", "apply", str(files[0])],
    )
