"""What `simulate` and `compare` share: a trace, how it is replayed, and what energy costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.options import RateOptions
from envplan.cli.serving.service import ServiceOptions
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER, PERCENT, TIME, WHOLE
from envplan.serving.settings import READY, Settings

if TYPE_CHECKING:
    from envplan.serving.costs import FleetCosts, FleetRates
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation
    from envplan.serving.trace import Trace


@dataclass(frozen=True)
class Replays:
    """A trace replayed under some policies.

    Attributes:
        profile: with the SLOs that were to be met.
        trace: what was replayed.
        simulations: one for each policy.
    """

    profile: ServingProfile
    trace: Trace
    simulations: Sequence[Simulation]

    @property
    def title(self) -> str:
        """For tables and pictures: what was replayed, and which of it is not measured."""
        shaped = (self.trace.made or "").startswith("real-shaped")
        title = self.trace.name + (" (real-shaped)" if shaped else "")
        title += f" on {self.profile.name}"
        if self.profile.source not in (None, "measured"):
            title += f" ({self.profile.source})"
        return title


class Names(tuple[str, ...]):
    """Names that one option lists. Typer takes a plain tuple for an option with several values."""


def _ready(text: str, name: str) -> Names:
    names = Names(word.strip() for word in text.split(","))
    if not all(step in READY for step in names):
        raise InputError(
            f"{name} must name some of {', '.join(READY)}, as in vm,weights, not {text}"
        )
    return names


@cmd.options(
    """
    Most used:
      --trace TRACE  Trace CSV, plain or gzipped: Azure's files as they are, or timestamp and class
          or token counts. Or a built-in one: azure-2023-code, azure-2023-conversation (an hour
          each, real), coding-week, conversation-week (real-shaped).
      --plot [FILE]  Draw what happens over time, or write a page: .png, .svg, .pdf or .html;
          without a name: serving-week.png.
    Job:
      --load-factor X  X times the trace's requests; default: 1.
    Fleet:
      --gpus N  GPUs of the fleet.
      --pools N  Pools of policy DynamoLLM, at most.
      --epoch TIME  Between two looks ahead, as in 30min or 30 (minutes); default: 30min.
      --slo-quantile PCT  Share of SLOs that fleets are sized for; default: 99.95.
      --headroom PCT  Room above what is needed; default: 10.
      --squash TIME  A first token so much too late is given up; default: 60s.
    Forecast:
      --past TIME  So much of the trace is what the first fleet is sized by, and is not replayed;
          default: that fleet is sized by the trace's peak, with hindsight.
      --mispredicted PCT  Requests whose output is predicted one length too short or too long;
          default: 5.
      --underestimated PCT  Of these, the share that is predicted too short; default: 50.
      --seed N  Of what is drawn.
    Start-up and clocks:
      --ready NAME[,NAME...]  What is ready before an instance is needed: vm (machines are booted,
          90 s less), weights (on their disks, 180 s less), snapshot (of the engine's state, 138 s
          less).
      --clock-delay TIME  A clock comes so long after it is asked for, as in 30ms or 30
          (milliseconds); default: 30ms.
    Money:
      --start TIME  When the trace begins, for files of rates over time.
    """,
    load_factor=NUMBER.within(1e-6, 100),
    pools=COUNT.within(1, 9),
    epoch=TIME.plainly("min").within(1, 6e7),
    slo_quantile=PERCENT.within(0.01, 99.9999),
    headroom=PERCENT.within(0, 1e4),
    past=TIME.plainly("min"),
    mispredicted=PERCENT.within(0, 100),
    underestimated=PERCENT.within(0, 100),
    seed=WHOLE.within(0, 2**63 - 1),
    ready=_ready,
    clock_delay=TIME.plainly("ms"),
    start=None,
)
class ReplayOptions(RateOptions):
    """A trace, how its replay is run, and what energy costs meanwhile."""

    trace: str = "azure-2023-conversation"
    plot: Path | None = None
    load_factor: float = 1.0
    gpus: int = Settings.gpus
    pools: int = Settings.pools
    epoch: float = Settings.epoch
    slo_quantile: float = Settings.slo_quantile
    headroom: float = Settings.headroom
    squash: float = Settings.squash
    past: float = Settings.past
    mispredicted: float = Settings.mispredicted
    underestimated: float = Settings.underestimated
    seed: int = Settings.seed
    ready: Names = Names()
    clock_delay: float = Settings.clock_delay
    start: str | None = None

    def settings(self) -> Settings:
        """How a replay is run."""
        return Settings(
            gpus=self.gpus,
            pools=self.pools,
            epoch=self.epoch,
            slo_quantile=self.slo_quantile,
            headroom=self.headroom,
            squash=self.squash,
            past=self.past,
            mispredicted=self.mispredicted,
            underestimated=self.underestimated,
            seed=self.seed,
            ready=self.ready,
            clock_delay=self.clock_delay,
        )

    @cached_property
    def fleet_rates(self) -> FleetRates:
        """What a kWh costs over the trace, as far as it is given."""
        from envplan.serving.costs import FleetRates

        rates = self.rates(start=self.start, repeats=True)
        return FleetRates(
            price=rates.get("price"), carbon=rates.get("carbon"), overheads=self.overheads()
        )

    def run(
        self,
        service: ServiceOptions,
        policies: Sequence[str],
        left_out: Callable[[str], None] | None = None,
    ) -> Replays:
        """Replay the trace under some policies.

        It warns of requests that no fleet could answer in time.

        Args:
            service: the profile, with SLOs.
            policies: their names.
            left_out: as compare_policies.
        """
        from envplan.serving.policies import compare_policies
        from envplan.serving.trace import Trace

        profile = service.known
        trace = Trace.open(self.trace)
        _ = self.fleet_rates  # what is wrong with them is said before hours are replayed
        if self.load_factor != 1:
            trace = trace.scaled(self.load_factor, self.seed)
        with ui.Working(f"policies on {trace.name}") as work:
            simulations = compare_policies(
                profile,
                trace,
                self.settings(),
                policies=policies,
                progress=work.counted,
                left_out=left_out,
            )
        self._warn_of_hopeless(simulations[0])
        return Replays(profile, trace, simulations)

    def _warn_of_hopeless(self, result: Simulation) -> None:
        """Warn if more requests than the fleet may miss would be late on any fleet."""
        allowed = 1 - self.slo_quantile / 100
        if result.hopeless > allowed * result.requests:
            percent = 100 * result.hopeless / result.requests
            ui.warn(
                f"{result.hopeless} of {result.requests} requests ({percent:.3g}%) miss their SLOs "
                "on any fleet: their prompts alone take longer than the time to the first token; "
                "fleets are sized for the others. Longer SLOs: --slo-scale, --slo"
            )

    def draw(self, replays: Replays) -> None:
        """Draw what --plot asks for."""
        from envplan.plotting.serving import comparison_page, over_time_figure

        simulations, title = replays.simulations, replays.title
        ui.draw(
            self.plot,
            lambda: over_time_figure(simulations, title),
            lambda: comparison_page(simulations, title, replays.profile.source),
        )

    def costs_of(self, simulation: Simulation) -> dict[str, float]:
        """What a simulation costs by the rates that are given: by currency, and carbon_g."""
        costs: FleetCosts = self.fleet_rates.costs_of(simulation)
        shown = {self.currency or "money": costs.money, "carbon_g": costs.carbon_g}
        return {name: value for name, value in shown.items() if value is not None}

    def document(self, simulation: Simulation) -> dict[str, Any]:
        """A simulation for --json."""
        return simulation.to_dict() | self.costs_of(simulation)
