"""Options for a world that is not as exact as a plan: clocks that follow late, times that vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from envplan.cli.inputs import finite
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.frontier import Frontier
    from envplan.plan import Plan

SwitchLatencyOption = Annotated[
    float | None,
    typer.Option(
        "--switch-latency",
        metavar="MS",
        help="A clock comes MS milliseconds after it is asked for; the target holds all the same.",
    ),
]
MinDwellOption = Annotated[
    float | None,
    typer.Option(
        "--min-dwell",
        metavar="MS",
        help="No stage asks for another clock within MS milliseconds.",
    ),
]
RobustOption = Annotated[
    float | None,
    typer.Option(
        "--robust",
        metavar="PCT",
        help="Hold the target with a probability of PCT percent, though times vary.",
    ),
]
NoiseOption = Annotated[
    float | None,
    typer.Option(
        "--noise",
        metavar="PCT",
        help="With --robust: standard deviation of times; default: the profile's column time_std.",
    ),
]


class Clocks(TypedDict):
    """How slowly clocks change, s."""

    switch_latency: float
    min_dwell: float


@dataclass(frozen=True)
class ConditionOptions:
    """What the options of a command say about clocks and noise, as given; ms and percent."""

    switch_latency: float | None
    min_dwell: float | None
    robust: float | None
    noise: float | None

    @property
    def given(self) -> str | None:
        """The first option given, None without any."""
        values = {
            "--switch-latency": self.switch_latency,
            "--min-dwell": self.min_dwell,
            "--robust": self.robust,
        }
        return next((option for option, value in values.items() if value is not None), None)

    def check(self, planner: str, others: Mapping[str, bool]) -> None:
        """That they go together, and with other options.

        Args:
            others: options that none of these goes with, and whether they are given.

        Raises:
            InputError: two do not, or a number is out of range.
        """
        for option, value in (
            ("--switch-latency", self.switch_latency),
            ("--min-dwell", self.min_dwell),
            ("--robust", self.robust),
            ("--noise", self.noise),
        ):
            if value is not None:
                finite(value, option)
        if self.noise is not None and self.robust is None:
            raise InputError("--noise goes with --robust PCT")
        if self.given is None:
            return
        if self.robust is not None and self.min_dwell is not None:
            raise InputError("--min-dwell and --robust exclude each other; give one of them")
        if planner != "frontier":
            raise InputError(f"{self.given} goes with --planner frontier, not {planner}")
        for other, is_given in others.items():
            if is_given:
                raise InputError(f"{self.given} and {other} exclude each other; give one of them")

    @property
    def clocks(self) -> Clocks:
        """How slowly clocks change, as Frontier.plan takes it."""
        return {
            "switch_latency": (self.switch_latency or 0.0) / 1000,
            "min_dwell": (self.min_dwell or 0.0) / 1000,
        }

    def robust_plan(
        self, frontier: Frontier, option: str | None, value: float, *, quiet: bool
    ) -> Plan:
        """The plan that holds the target that an option gave, though times vary.

        Raises:
            NoAnswerError: there is none.
            InputError: a number is out of range, or the profile does not say how times vary.
        """
        from envplan.cli.output import progress_bar

        assert self.robust is not None
        with progress_bar("Replaying with noise", quiet=quiet) as progress:
            return frontier.robust_plan(
                self.robust / 100,
                value if option == "--target-time" else None,
                slowdown=value / 100 if option == "--slowdown" else None,
                noise=None if self.noise is None else self.noise / 100,
                switch_latency=self.clocks["switch_latency"],
                progress=progress,
            )

    def cheapest_plan(self, frontier: Frontier, run: Run, polish: float) -> Plan:
        """The cheapest plan by a run's deadline, with clocks and times as they are.

        Raises:
            NoAnswerError: there is none.
            InputError: a number is out of range, or a rate ends before the run.
        """
        return run.cheapest_plan(
            frontier,
            polish=polish,
            probability=None if self.robust is None else self.robust / 100,
            noise=None if self.noise is None else self.noise / 100,
            **self.clocks,
        )


def condition_notes(frontier: Frontier, plan: Plan) -> list[str]:
    """What a plan was made to bear, and what that costs."""
    from envplan.cli.output import exact_seconds, significant

    notes = []
    job, sure = plan.job, plan.predicted.robustness
    if job.switch_latency_s is not None:
        notes.append(
            f"every clock comes {job.switch_latency_s * 1000:g} ms after it is asked for; time and "
            "energy are those of the replay with that"
        )
    if job.min_dwell_s is not None:
        notes.append(f"no stage asks for another clock within {job.min_dwell_s * 1000:g} ms")
    if plan.target.kind == "no-slowdown" and plan.target.deadline_s > frontier.min_time:
        notes.append(
            "T_min needs clocks that change at once; the least time found with these is "
            f"{exact_seconds(plan.target.deadline_s)} s"
        )
    if sure is not None:
        asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
        noise = "as the profile's time_std" if sure.noise is None else f"of {100 * sure.noise:g}%"
        plain = _for_exact_times(frontier, plan, asked)
        what = (
            f"{sure.held_runs} of {sure.runs} replays end by {exact_seconds(asked)} s"
            if sure.iterations is None
            else f"{sure.iterations} iterations end by the deadline, as {sure.runs} replays show"
        )
        notes += [
            f"with noise {noise} {what}: a probability of at least "
            f"{sure.percent_at_least} ({100 * sure.confidence:g}% confidence)",
        ]
        if plain is not None:
            notes.append(
                f"that costs {significant(plan.energy - plain, 4)} J "
                f"({100 * (plan.energy / plain - 1):.2f}%) more than a plan for exact times"
            )
    return notes


def _for_exact_times(frontier: Frontier, plan: Plan, time: float) -> float | None:
    """J of the plan for the same time and clocks without noise, where one is found."""
    from envplan.frontier.switching import NoPlanInTimeError

    try:
        return frontier.plan(time, switch_latency=plan.job.switch_latency_s or 0.0).energy
    except NoPlanInTimeError:
        return None
