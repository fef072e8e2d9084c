"""Groups of options that several commands take: each a frozen dataclass whose fields are options.

A command that has a group as a parameter has all its options, and receives what was given as one
value.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.given import options_given, refuse, refuse_both, require_with
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import (
    JOB,
    MONEY,
    MOST_USED,
    OUTPUT,
    Chunks,
    Force,
    MicrobatchGroup,
    MovedProfile,
)
from envplan.cli.types import InputFile, Numbers, either, numbers, quantity
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES
from envplan.pipeline.operations import EXTRAS
from envplan.quantities import COUNT, NUMBER, PERCENT, POWER, TIME

if TYPE_CHECKING:
    from envplan.costs import Overheads, Run
    from envplan.costs.rates import Kind, Rate

DEFAULT_PROFILE: Final = "profile.csv"
_MANY: Final = COUNT.within(1, 10**18)
#: What takes minutes to plan.
_MANY_OPERATIONS: Final = 2**17
#: What a DAG file says instead of options.
_SHAPE: Final = (
    "schedule", "microbatches", "pp", "vp", "microbatch_group", "p2p_latency", "activation_slots",
    "extra",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A plan, and how to come by its profile."""

    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file."), InputFile()] = Path(
        "plan.json"
    )
    profile: MovedProfile = None
    force: Force = False

    def load(self) -> tuple[envplan.Plan, envplan.Profile]:
        """The plan, and the profile that it was made from.

        Raises:
            InputError: one of the two cannot be read, or the profile would be replaced.
        """
        from envplan.plan import find_profile

        plan = envplan.Plan.load(self.plan)
        profile = find_profile(plan.profile, self.plan, self.profile)
        invocation().will_read(profile.path, profile.sidecar)
        return plan, profile


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How many GPUs run a stage, and how many replicas there are."""

    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            "--gpus-per-stage",
            metavar="N",
            parser=quantity(COUNT),
            help=(
                "GPUs that run each stage together (tensor parallel); default: what the "
                "profile or plan says, else 1."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    cp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="Context-parallel size, by which a stage has further GPUs; default: as --tp.",
            rich_help_panel=JOB,
        ),
    ] = None
    dp: Annotated[
        int | None,
        typer.Option(
            "--dp",
            "--replicas",
            metavar="N",
            parser=quantity(COUNT),
            help="Data-parallel replicas of the pipeline; default: as --tp.",
            rich_help_panel=JOB,
        ),
    ] = None


def complete_profiles(incomplete: str) -> list[str]:
    """Names of built-in profiles, and of CSV files and folders, that begin so."""
    from envplan.profile import builtin_paths

    there = sorted(glob.iglob(f"{glob.escape(incomplete)}*"))  # noqa: PTH207  (of any folder)
    folders = [f"{path}/" for path in there if Path(path).is_dir()]
    files = [path for path in there if path.endswith(".csv")]
    return folders + files + [name for name in builtin_paths() if name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class JobOptions(ParallelOptions):
    """The training job: a profile and how the pipeline runs it."""

    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help="Profile CSV, or the name of a built-in profile (envplan profiles lists them).",
            autocompletion=complete_profiles,
        ),
        InputFile(),
    ] = DEFAULT_PROFILE
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m",
            "--microbatches",
            metavar="M",
            parser=quantity(COUNT),
            help="Microbatches per iteration; default: what the profile's sidecar says.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{either(SCHEDULES)}; default: what the profile's sidecar says, else 1f1b.",
            rich_help_panel=JOB,
        ),
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(
            "-s",
            "--pp",
            "--stages",
            metavar="N",
            parser=quantity(COUNT),
            help=(
                "Pipeline stages (ranks of a pipeline); default: the profile's stages over --vp."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    vp: Chunks = None
    microbatch_group: MicrobatchGroup = None
    p2p_latency: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help=(
                "How long a transfer between stages takes, as in 2ms or 0.002 (seconds); "
                "default: what the profile's sidecar says, else 0."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    dag: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run the operations of this DAG file instead of a schedule.",
            rich_help_panel=JOB,
        ),
        InputFile(),
    ] = None
    activation_slots: Annotated[
        Numbers | None,
        typer.Option(
            metavar="N[,N...]",
            parser=numbers("8 or 8,7,6,5", least=0),
            help=(
                "Microbatches whose activations fit into a stage's memory, one number for "
                "all stages or one for each: caps how far schedule envpipe runs ahead."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Keep the noise of measured rows; default: where it is clear, it is taken out.",
            show_default=False,
            rich_help_panel=JOB,
        ),
    ] = False
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Activations are recomputed: add each stage's forward to its backward.",
            rich_help_panel=JOB,
        ),
    ] = False
    extra: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help=(
                "Give the schedule operations beside forwards and backwards, as far as the "
                f"profile has rows for them: {', '.join(EXTRAS)}."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    one_clock: Annotated[
        bool,
        typer.Option(
            "--one-clock",
            help="Give every operation one clock, though the profile splits some into parts.",
            rich_help_panel=JOB,
        ),
    ] = False
    parts_within: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            parser=quantity(PERCENT),
            help=(
                "Leave out clocks by part that save at most PCT percent of an operation's "
                "energy on others no slower; default: 0.2, 0 leaves nothing out."
            ),
            rich_help_panel=JOB,
        ),
    ] = None
    blocking_power: Annotated[
        float | None,
        typer.Option(
            metavar="W",
            parser=quantity(POWER),
            help="Power of a GPU that waits; default: the profile's blocking rows, else 70.",
            rich_help_panel=JOB,
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            metavar="N",
            parser=quantity(COUNT),
            help="Cores to use; default: all there are. Answers do not depend on it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None

    def load(self) -> tuple[envplan.Profile, envplan.Pipeline]:
        """The profile and the pipeline.

        Raises:
            InputError: there is no such profile or pipeline, or options contradict each other.
        """
        from envplan.replay.cores import use_cores

        use_cores(self.jobs)
        profile = envplan.Profile.open(self.profile, raw=self.raw)
        self._warn_of_contradictions(profile)
        if self.dag is None:
            pipeline = self._from_schedule(profile)
        else:
            refuse_both(["--dag", *options_given(self, *_SHAPE)])
            pipeline = envplan.Pipeline.from_dag_file(self.dag)
        if (count := len(pipeline.operations)) > _MANY_OPERATIONS:
            ui.warn(
                f"{count} operations: planning may take hours and gigabytes; plans of long "
                "iterations repeat, so some microbatches for each stage tell nearly as much"
            )
        return self.fitted(profile, pipeline), pipeline

    def fitted(self, profile: envplan.Profile, pipeline: envplan.Pipeline) -> envplan.Profile:
        """A profile with the operations of a pipeline, made of parts as the options say.

        Raises:
            InputError: it lacks some, or options contradict the profile.
        """
        from envplan.profile import ByParts

        parted = profile.has_parts and not self.one_clock
        asked = ByParts.from_options(self.parts_within, self.blocking_power) if parted else None
        needed = {op.instruction for op in pipeline.operations}
        return profile.fitted(needed, recompute=self.recompute, by_parts=asked)

    def trace(
        self,
        loaded: tuple[envplan.Profile, envplan.Pipeline] | None = None,
        replicas: int | None = None,
        **how: bool,
    ) -> envplan.Frontier:
        """The frontier, with a sign of how far it is if it takes long.

        Args:
            loaded: what it is of; None: as load says.
            replicas: None: as the options or the sidecar say.
            how: full and whole, as for trace_frontier.

        Raises:
            InputError: as for load, the profile does not fit the pipeline, or it would be replaced.
        """
        profile, pipeline = loaded or self.load()
        invocation().will_read(profile.path, profile.sidecar)
        known = profile.metadata
        with progress(f"Tracing the frontier of {profile.name}") as work:
            return envplan.trace_frontier(
                pipeline,
                profile,
                blocking_power=self.blocking_power,
                gpus_per_stage=known.gpus_per_stage_with(self.tp, self.cp),
                replicas=replicas or self.dp or known.job.replicas,
                progress=work.frontier_step,
                **how,
            )

    def _warn_of_contradictions(self, profile: envplan.Profile) -> None:
        known = profile.metadata
        timed = "its times and energies are those of"
        shared_out = f"its {profile.num_stages} model stages are shared out anew, not as with"
        gpus = known.gpus_per_stage_with(self.tp, self.cp)
        for name, asked, made, so in (
            ("--tp", self.tp, known.tensor_parallel, timed),
            ("GPUs of a stage:", gpus, known.job.gpus_per_stage, timed),
            ("--pp", self.pp, known.job.stages, shared_out),
        ):
            if asked is not None and made not in (None, asked):
                made_so = f"{profile.path or profile.name} was made with {name} {made}, not {asked}"
                ui.warn(f"{made_so}: {so} {name} {made}")
                return

    def _from_schedule(self, profile: envplan.Profile) -> envplan.Pipeline:
        from envplan.profile.job import parse_extras, pipeline_of_job

        schedule = self.schedule or profile.metadata.schedule or "1f1b"
        if schedule != "envpipe":
            slots = options_given(self, "activation_slots")
            refuse(slots, f"goes with schedule envpipe, not {schedule}")

        def ahead(microbatches: int) -> tuple[int, ...]:
            timed = profile.fitted(("backward",), recompute=self.recompute)
            return envplan.forwards_ahead(timed, microbatches, self.activation_slots)

        return pipeline_of_job(
            profile,
            schedule=self.schedule,
            num_stages=self.pp,
            num_microbatches=self.microbatches,
            chunks=self.vp,
            p2p_latency=self.p2p_latency,
            extras=parse_extras(self.extra, profile),
            microbatch_group=self.microbatch_group,
            forwards_ahead=ahead,
        )


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """What a kWh costs, and what is used and paid beside the energy of GPUs."""

    price: Annotated[
        str | None,
        typer.Option(
            metavar="P|FILE",
            help=(
                "Price of a kWh, or a CSV with hour,price or time,price if it changes with time."
            ),
            rich_help_panel=MONEY,
        ),
        InputFile(),
    ] = None
    carbon: Annotated[
        str | None,
        typer.Option(
            metavar="G|FILE",
            help="gCO2 of a kWh, or a CSV with hour,carbon or time,carbon.",
            rich_help_panel=MONEY,
        ),
        InputFile(),
    ] = None
    currency: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What to call the units of --price; default: USD.",
            rich_help_panel=MONEY,
        ),
    ] = None
    pue: Annotated[
        float,
        typer.Option(
            metavar="X",
            parser=quantity(NUMBER.within(1, 100)),
            help="Power usage effectiveness of the site, from 1 up; default: 1.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 1.0
    host_power: Annotated[
        float,
        typer.Option(
            metavar="W",
            parser=quantity(POWER),
            help="What the host draws for each of its GPUs; default: 0.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 0.0
    gpu_hour: Annotated[
        float,
        typer.Option(
            metavar="P",
            parser=quantity(NUMBER),
            help=(
                "What an hour of a GPU costs besides energy: slower plans take more of "
                "them. Default: 0."
            ),
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 0.0
    embodied: Annotated[
        float,
        typer.Option(
            metavar="KG",
            parser=quantity(NUMBER),
            help="CO2 of making one GPU, kg; goes with --carbon. Default: 0.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 0.0
    lifetime: Annotated[
        float,
        typer.Option(
            metavar="YEARS",
            parser=quantity(NUMBER),
            help="Years that --embodied is spread over; default: 5.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        require_with(self, "embodied", "carbon")

    def overheads(self) -> Overheads:
        """What is counted beside the energy of GPUs."""
        from envplan.costs import Overheads

        return Overheads.of(**{name: getattr(self, name) for name in Overheads.model_fields})

    def rates(self, **how: Any) -> dict[str, Rate]:
        """Price and carbon of a kWh, as far as they are given. As read_rate."""
        from envplan.costs.rate_file import read_rate

        kinds: tuple[Kind, ...] = ("price", "carbon")
        asked = ((kind, getattr(self, kind)) for kind in kinds)
        return {kind: read_rate(rate, kind, **how) for kind, rate in asked if rate}


@dataclass(frozen=True, kw_only=True)
class CostOptions(RateOptions):
    """What a run costs: rates, and how much work it is."""

    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Iterations of the training run, as in 100k.",
            rich_help_panel=MONEY,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Instead of --iterations: tokens of the run, as in 300e9 or 15T.",
            rich_help_panel=MONEY,
        ),
    ] = None
    tokens_per_iteration: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Tokens of an iteration over all replicas; default: from the profile's sidecar.",
            rich_help_panel=MONEY,
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help=(
                "When the run starts, as in 2026-12-01T00:00, for files with times; "
                "default: when they do."
            ),
            rich_help_panel=MONEY,
        ),
    ] = None
    repeat_rates: Annotated[
        bool,
        typer.Option(
            "--repeat-rates",
            help="Let the files begin again where the run outlasts them.",
            rich_help_panel=MONEY,
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = ("price", "carbon")
        work = ("iterations", "tokens")
        require_with(self, "currency", "price")
        require_with(self, "gpu_hour", "price")
        require_with(self, "pue", *rates, *work)
        require_with(self, "host_power", *rates, *work)
        require_with(self, "tokens_per_iteration", "tokens")
        require_with(self, "start", *rates)
        require_with(self, "repeat_rates", *rates)
        refuse_both(options_given(self, *work))

    def run(self, frontier: envplan.Frontier | None = None, **aim: Any) -> Run | None:
        """The run whose costs are wanted; None where no costs are.

        Args:
            frontier: what says how many tokens an iteration has; None: an option must.
            aim: what further says which plan is best, as for Run.

        Raises:
            InputError: a rate cannot be read, or nothing says how many tokens an iteration has.
        """
        from envplan.costs import Run
        from envplan.plan.costs import tokens_per_iteration

        if not options_given(self, "price", "carbon", "iterations", "tokens"):
            return None
        iterations, each = self.iterations, self.tokens_per_iteration
        if self.tokens is not None:
            if each is None and frontier is not None:
                each = tokens_per_iteration(frontier)
            if each is None:
                raise InputError("--tokens needs --tokens-per-iteration here")
            iterations = -(-self.tokens // each)
        return Run.of(
            **self.rates(start=self.start, repeats=self.repeat_rates),
            iterations=iterations,
            currency=self.currency,
            tokens=self.tokens,
            overheads=self.overheads(),
            **aim,
        )
