"""Options that `simulate` and `compare` share: a trace, its replay, and the costs of energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan._io.words import counted
from envplan.cli import output as ui
from envplan.cli.cost_options import RateOptions
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.serving.service import FLEET, FleetGpus
from envplan.cli.shared import JOB, MONEY, MOST_USED
from envplan.cli.tables import table_columns
from envplan.cli.types import (
    OPTIONAL_FILE,
    InputFile,
    OutputFile,
    either,
    one_of,
    parser_of,
    quantity,
)
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER, PERCENT, TIME, WHOLE
from envplan.serving.builtin import WEEKS, builtin_traces
from envplan.serving.classes import MAX_CLASSES, RequestClasses
from envplan.serving.settings import LENGTH_PREDICTORS, SCHEDULERS, STARTUP_STEPS_S, Settings
from envplan.serving.trace import Trace
from envplan.serving.trace_formats import TIME_UNITS
from envplan.units import duration_text

if TYPE_CHECKING:
    from pydantic import JsonValue

    from envplan.serving.costs import FleetCosts, FleetRates
    from envplan.serving.fixed_fleets import Rivals
    from envplan.serving.fleet import Fleet
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation
    from envplan.serving.split_fleet import SplitFleet

#: Keys of the JSON output beside the figures of a simulation.
_OTHER_KEYS: Final = ("schema", "trace", "profile", "carbon_g", "savings_percent", "next")

#: What --plot stands for without a name; the trace and the policy take the star's place.
_BARE_PLOT: Final = "serving-*.png"

#: Panels of `--help`.
FORECAST: Final = "Forecast"
ENGINE: Final = "Engine"
GB: Final = 1e9

Disaggregated = Annotated[
    bool,
    typer.Option(
        "--disaggregated",
        rich_help_panel=FLEET,
        help="The best fleet that never changes, of instances that run prompts and others that "
        "decode, beside the best one whose instances do both.",
    ),
]
START_UP: Final = "Start-up and clocks"
#: Fleets that never change are looked for beside policies on traces of at most so many requests.
_MOST_WITH_BASELINES: Final = 3_000_000


@dataclass(frozen=True)
class Replays:
    """A trace replayed under some policies.

    Attributes:
        profile: with the SLOs that were to be met.
        trace: what was replayed.
        simulations: one for each policy.
        rivals: the fleets that never change and are to be compared with each; none where they were
            not looked for.
    """

    profile: ServingProfile
    trace: Trace
    simulations: Sequence[Simulation]
    rivals: Sequence[Rivals]

    def rivals_document(self, number: int) -> dict[str, JsonValue]:
        """The fleets beside one of the simulations, in JSON types; nothing where there are none."""
        return self.rivals[number].to_dict() if self.rivals else {}

    @property
    def title(self) -> str:
        """For tables and pictures: what was replayed, and which of it is not measured."""
        shaped = (self.trace.provenance or "").startswith("real-shaped")
        title = _size_text(self.trace) + (" (real-shaped)" if shaped else "")
        title += f" on {self.profile.name}"
        if self.profile.source not in (None, "measured"):
            title += f" ({self.profile.source})"
        return title


def _size_text(trace: Trace) -> str:
    """The trace, and how much there is to be replayed."""
    return f"{trace.name}, {len(trace):,} requests in {duration_text(round(trace.duration_s))}"


class GivenFleet(NamedTuple):
    """A fleet that does not change, by the name that it is given by."""

    name: str
    fleet: Fleet | SplitFleet


class Names(tuple[str, ...]):
    """Names that one option lists. Typer takes a plain tuple for an option with several values."""


def _parse_ready(text: str, option: str) -> Names:
    """Names of steps of a start."""
    names = Names(name.strip() for name in text.split(","))
    if not all(name in STARTUP_STEPS_S for name in names):
        raise InputError(
            f"{option} must name some of {', '.join(STARTUP_STEPS_S)}, as in vm,weights, not {text}"
        )
    return names


def _ready_help() -> str:
    return (
        "What is ready before an instance is needed: "
        f"vm (machines are booted, {STARTUP_STEPS_S['vm']:g} s less), "
        f"weights (on their disks, {STARTUP_STEPS_S['weights']:g} s less), "
        f"snapshot (of the engine's state, {STARTUP_STEPS_S['snapshot']:g} s less)."
    )


def _trace_help() -> str:
    hours = [name for name in builtin_traces() if name not in WEEKS]
    return (
        "Trace, plain or gzipped: files of Azure, Mooncake, BurstGPT, ServeGen and vLLM as they "
        "are, or a CSV of timestamp and class or token counts. "
        f"Or a built-in one: {', '.join(hours)} (an hour each, real), {', '.join(WEEKS)} "
        "(real-shaped)."
    )


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """A trace, and how its replay is run."""

    trace: Annotated[
        str,
        typer.Option(rich_help_panel=MOST_USED, metavar="TRACE", help=_trace_help()),
        InputFile(),
    ] = "azure-2023-conversation"
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar=OPTIONAL_FILE,
            help="Draw what happens over time, or write a page: .png, .svg, .pdf or .html; without "
            "a name: serving-TRACE-POLICY.png.",
            parser=OutputFile(".png", ".svg", ".pdf", ".html", bare=_BARE_PLOT),
        ),
    ] = None
    time_unit: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=JOB,
            metavar="UNIT",
            help=f"Of numbers in the trace's timestamps: {either(tuple(TIME_UNITS))}; default: as "
            "its format has it, else s.",
            show_default=False,
            parser=one_of(*TIME_UNITS),
        ),
    ] = None
    baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            rich_help_panel=MOST_USED,
            help="Find the best fleets that never change beside each policy; default: up to "
            f"{_MOST_WITH_BASELINES / 1e6:.0f} million requests.",
            show_default=False,
        ),
    ] = None
    prefix_cache: Annotated[
        float,
        typer.Option(
            rich_help_panel=JOB,
            metavar="PCT",
            help="Of the tokens that begin a prompt as an earlier one began, the share that a "
            "prefix cache still has, for traces that say which do; default: 0.",
            show_default=False,
            parser=quantity(PERCENT.within(0, 100)),
        ),
    ] = 0.0
    load_factor: Annotated[
        float,
        typer.Option(
            rich_help_panel=JOB,
            metavar="X",
            help="X times the trace's requests; default: 1.",
            show_default=False,
            parser=quantity(NUMBER.within(1e-6, 100)),
        ),
    ] = 1.0
    gpus: FleetGpus = Settings.max_gpus
    pools: Annotated[
        int,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="N",
            help="Pools of policy DynamoLLM, at most; default: one for each class.",
            show_default=False,
            parser=quantity(COUNT.within(1, MAX_CLASSES)),
        ),
    ] = Settings.max_pools
    epoch: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="TIME",
            help="Between two looks ahead, as in 30min or 30 (minutes); default: 30min.",
            show_default=False,
            parser=quantity(TIME.plainly("min").within(1, 6e7)),
        ),
    ] = Settings.epoch_s
    slo_quantile: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="PCT",
            help="Share of SLOs that fleets are sized for; default: 99.95.",
            show_default=False,
            parser=quantity(PERCENT.within(0.01, 99.9999)),
        ),
    ] = Settings.slo_quantile_percent
    headroom: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="PCT",
            help="Room above what is needed; default: 10.",
            show_default=False,
            parser=quantity(PERCENT.within(0, 1e4)),
        ),
    ] = Settings.headroom_percent
    squash: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="TIME",
            help="A first token so much too late is given up; default: 60s.",
            show_default=False,
            parser=quantity(TIME),
        ),
    ] = Settings.squash_s
    past: Annotated[
        float,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="TIME",
            help="So much of the trace is what the first fleet is sized by, and is not replayed; "
            "default: that fleet is sized by the trace's peak, with hindsight.",
            show_default=False,
            parser=quantity(TIME.plainly("min")),
        ),
    ] = Settings.past_s
    mispredicted: Annotated[
        float,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="PCT",
            help="Requests whose output is predicted one length too short or too long; default: 5.",
            show_default=False,
            parser=quantity(PERCENT.within(0, 100)),
        ),
    ] = Settings.mispredicted_percent
    underestimated: Annotated[
        float,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="PCT",
            help="Of these, the share that is predicted too short; default: 50.",
            show_default=False,
            parser=quantity(PERCENT.within(0, 100)),
        ),
    ] = Settings.underestimated_percent
    predicted_lengths: Annotated[
        str,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="NAME",
            help="What routing and admission know of an output: the mean of its class so far "
            "(past), or its length (true).",
            parser=one_of(*LENGTH_PREDICTORS),
        ),
    ] = Settings.predicted_lengths
    length_error: Annotated[
        float,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="PCT",
            help="Error of true lengths, as in 30%; default: none.",
            show_default=False,
            parser=quantity(PERCENT.within(0, 1000)),
        ),
    ] = Settings.length_error_percent
    scheduler: Annotated[
        str,
        typer.Option(
            rich_help_panel=ENGINE,
            metavar="NAME",
            help="Which prompt of an instance runs next: the one with the nearest deadline (edf), "
            "or first come, first served (fcfs), as in vLLM.",
            parser=one_of(*SCHEDULERS),
        ),
    ] = Settings.scheduler
    chunk: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=ENGINE,
            metavar="TOKENS",
            help="Tokens of an iteration, as in 2048; default: the profile's.",
            show_default=False,
            parser=quantity(COUNT.within(1, 10**6)),
        ),
    ] = None
    kv_link: Annotated[
        float,
        typer.Option(
            rich_help_panel=ENGINE,
            metavar="GB/S",
            help="Network of a GPU, over which contexts go from prefill to decode; default: 50 "
            "(400 Gb/s).",
            show_default=False,
            parser=quantity(NUMBER.within(1e-3, 1e5)),
        ),
    ] = Settings.link_bytes_s / GB
    seed: Annotated[
        int,
        typer.Option(
            rich_help_panel=FORECAST,
            metavar="N",
            help="Of what is drawn.",
            parser=quantity(WHOLE.within(0, 2**63 - 1)),
        ),
    ] = Settings.seed
    ready: Annotated[
        Names | None,
        typer.Option(
            rich_help_panel=START_UP,
            metavar="NAME[,NAME...]",
            help=_ready_help(),
            parser=parser_of(_parse_ready),
        ),
    ] = None
    clock_delay: Annotated[
        float,
        typer.Option(
            rich_help_panel=START_UP,
            metavar="TIME",
            help="A clock comes so long after it is asked for, as in 30ms or 30 (milliseconds); "
            "default: 30ms.",
            show_default=False,
            parser=quantity(TIME.plainly("ms")),
        ),
    ] = Settings.switch_latency_s

    def settings(self) -> Settings:
        """How a replay is run."""
        return Settings(
            max_gpus=self.gpus,
            max_pools=self.pools,
            epoch_s=self.epoch,
            slo_quantile_percent=self.slo_quantile,
            headroom_percent=self.headroom,
            squash_s=self.squash,
            past_s=self.past,
            mispredicted_percent=self.mispredicted,
            underestimated_percent=self.underestimated,
            seed=self.seed,
            scheduler=self.scheduler,
            chunk_tokens=self.chunk,
            predicted_lengths=self.predicted_lengths,
            length_error_percent=self.length_error,
            link_bytes_s=self.kv_link * GB,
            ready=self.ready or (),
            switch_latency_s=self.clock_delay,
        )

    def run(
        self,
        profile: ServingProfile,
        policies: Sequence[str],
        left_out: Callable[[str], None] | None = None,
        given: GivenFleet | None = None,
    ) -> Replays:
        """Replay the trace under some policies, and on a fleet that is given.

        It warns of requests that no fleet could answer in time.

        Args:
            profile: with classes and SLOs.
            policies: their names.
            left_out: told of policies that are left out, as compare_policies does.
            given: comes last.
        """
        from envplan.serving.fixed_fleets import rivals_of
        from envplan.serving.given_fleet import require_performance
        from envplan.serving.observed_trace import observe_trace
        from envplan.serving.replay import compare_policies, replay_fixed

        trace = self._open_trace(profile.classes)
        if self.load_factor != 1:
            trace = trace.scaled(self.load_factor, self.seed)
        settings = self.settings()
        with progress(f"policies on {_size_text(trace)}") as work:
            simulations = compare_policies(
                profile,
                trace,
                settings,
                policies=policies,
                progress=work.items,
                on_omission=left_out,
            )
        observed = observe_trace(profile, trace, settings)
        if given is not None:
            require_performance(given.fleet, profile.performance)
            simulations.append(replay_fixed(given.name, given.fleet, observed, settings))
        rivals: list[Rivals] = []
        if self._with_baselines(trace):
            with progress(f"kinds of fixed fleets tried on {_size_text(trace)}") as work:
                rivals = rivals_of(observed, settings, simulations, work.items)
        self._warn_of_hopeless(simulations[0])
        for result in simulations:
            self._warn_of_too_few_gpus(result)
        _warn_of_too_long(simulations, profile)
        return Replays(profile, trace, simulations, rivals)

    def _with_baselines(self, trace: Trace) -> bool:
        """Whether fleets that never change are looked for; it says so if that takes too long."""
        if self.baselines is not None:
            return self.baselines
        if len(trace) <= _MOST_WITH_BASELINES:
            return True
        ui.warn(
            f"{len(trace):,} requests: policies are not set beside the best fleets that never "
            "change, which takes several times as long as the policies; --baselines does it"
        )
        return False

    def _open_trace(self, classes: RequestClasses) -> Trace:
        """The trace, as its prefix cache leaves it.

        It says how many requests failed, and how much a prefix cache could save.
        """
        trace = Trace.open(self.trace, self.time_unit, classes)
        if trace.num_failed:
            ui.warn(
                f"{trace.num_failed} of {len(trace) + trace.num_failed} requests of {trace.name} "
                "failed when they were recorded; they are left out, and are not counted as met"
            )
        if self.prefix_cache:
            return trace.with_prefix_cache(self.prefix_cache / 100)
        if trace.prefix_hit_share:
            percent = 100 * trace.prefix_hit_share
            ui.warn(
                f"{percent:.3g}% of the input tokens of {trace.name} begin a prompt as an earlier "
                "one began; they are replayed without a cache: --prefix-cache 100 leaves them out"
            )
        return trace

    def _warn_of_hopeless(self, result: Simulation) -> None:
        """Warn if more requests than the fleet may miss would be late on any fleet."""
        allowed = self.settings().max_late_share
        hopeless = result.requests_hopeless
        if hopeless > allowed * result.requests:
            percent = 100 * hopeless / result.requests
            ui.warn(
                f"{hopeless:,} of {result.requests:,} requests ({percent:.3g}%) miss their SLOs "
                "on any fleet: their prompts alone take longer than the time to the first token; "
                "fleets are sized for the others. Longer SLOs: --slo-scale, --slo"
            )

    def _warn_of_too_few_gpus(self, result: Simulation) -> None:
        """Warn if a policy wanted more GPUs than there are, and say what it meets without them."""
        if result.gpus_wanted:
            ui.warn(
                f"{result.policy} wants up to {result.gpus_wanted} GPUs for "
                f"{self.slo_quantile:g}% of SLOs and {self.headroom:g}% room, "
                f"{result.gpus_wanted - self.gpus} more than the {self.gpus} there are (--gpus); "
                f"with these it meets {100 * result.slo_attainment:.3f}%"
            )

    def draw(self, replays: Replays, subject: str) -> None:
        """Draw what --plot asks for.

        Args:
            replays: of the trace.
            subject: the policy, for the name of a file without one.
        """
        from envplan.plotting.serving import comparison_page, over_time_figure

        simulations, title = replays.simulations, replays.title
        path = self.plot
        if path is not None and path.name == _BARE_PLOT:
            invocation().will_not_write(path)
            path = Path(_BARE_PLOT.replace("*", f"{replays.trace.name}-{subject}"))
            invocation().will_write(path)
        ui.draw(
            path,
            lambda: over_time_figure(simulations, title),
            lambda: comparison_page(simulations, title, replays.profile.source),
        )


def _warn_of_too_long(simulations: Sequence[Simulation], profile: ServingProfile) -> None:
    """Name requests that the model, or an instance's memory, could not take."""
    too_long = simulations[0].requests_too_long
    if too_long:
        ui.warn(
            f"{counted(too_long, 'request')} longer than the {profile.max_context_tokens:.0f} "
            "tokens that the model takes: not served, and not counted among the requests"
        )
    for result in simulations:
        if result.requests_unservable:
            ui.warn(
                f"{result.policy}: {counted(result.requests_unservable, 'request')} longer than "
                "the memory of the instances that should serve them; their SLOs are missed"
            )


@dataclass(frozen=True, kw_only=True)
class FleetRateOptions(RateOptions):
    """The rates of a kWh over a trace."""

    start: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MONEY,
            metavar="TIME",
            help="When the trace begins, for files of rates over time.",
        ),
    ] = None

    def read(self) -> FleetRates:
        """The rates that are given; files begin again where the trace outlasts them.

        Raises:
            InputError: a rate cannot be read, or the currency is called as another figure is.
        """
        from envplan.serving.costs import FleetRates

        self._refuse_ambiguous_currency()
        price, carbon = self.rates(start=self.start, repeats=True)
        return FleetRates(price=price, carbon=carbon, overheads=self.overheads())

    def _refuse_ambiguous_currency(self) -> None:
        """Costs stand beside the other figures of a replay, under the currency's name."""
        from envplan.serving.simulation import FIGURES

        if self.currency in FIGURES or self.currency in _OTHER_KEYS:
            raise InputError(
                f"--currency {self.currency} is what another figure is called; choose another "
                "name, such as EUR"
            )

    def named(self, costs: FleetCosts) -> dict[str, float]:
        """Costs, as far as there are any, by the currency and carbon_g."""
        names = {self.currency or "money": costs.money, "carbon_g": costs.carbon_g}
        return {name: cost for name, cost in names.items() if cost is not None}


def print_rivals(rivals: Sequence[Rivals]) -> None:
    """A row for each policy: what it saves against fleets that never change, and how."""
    if not rivals:
        return
    rows = []
    for found in rivals:
        split = found.split
        parts = ["-"] * 3 if split is None else [f"{percent:.1f}" for percent in split]
        rows.append(
            [
                found.policy.policy,
                f"{100 * found.policy.slo_attainment:.3f}",
                *_rival_cells(found.policy, found.highest_clock),
                *_rival_cells(found.policy, found.lower_clock),
                *parts,
            ]
        )
    headers = (
        *("policy", "SLOs met (%)"),
        *("at the highest clock", "kWh", "saved (%)"),
        *("at one lower clock", "kWh ", "saved (%) "),
        *("by TP (%)", "by clock (%)", "by changes (%)"),
    )
    title = "beside the best fleets that never change and meet as many SLOs, found with hindsight"
    ui.show_table(title, table_columns(headers, rows, num_texts=1))


def _rival_cells(policy: Simulation, rival: Simulation | None) -> list[str]:
    from envplan.serving.metrics import kwh, saved_percent_text

    if rival is None:
        return ["-"] * 3
    return [rival.policy, kwh(rival.energy_j), saved_percent_text(policy, rival)]
