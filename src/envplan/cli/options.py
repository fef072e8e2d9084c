"""The options that commands share, each declared once, and the groups that commands take them in.

A group is a dataclass: a command that has it as a parameter has all its options, and receives what
was given as one value. See command.py for how that works, and for options of one command alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from envplan.cli.command import (
    CLOCKS,
    JOB,
    MONEY,
    MOST,
    NOISE,
    OUTPUT,
    TARGET,
    Numbers,
    numbers,
    one_of,
    option,
)
from envplan.errors import InputError
from envplan.quantities import COUNT, ENERGY, LONG_TIME, PERCENT, POWER, TIME, WHOLE

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.costs.rates import Kind, Rate
    from envplan.pipeline import Pipeline
    from envplan.profile import Profile
    from envplan.solve import Frontier

DEFAULT_PROFILE = "profile.csv"
_MANY = COUNT.within(1, 10**18)
_MS = TIME.plainly("ms")

Microbatches = Annotated[
    int | None,
    option(
        "-m, --microbatches M",
        MOST,
        "Microbatches per iteration; default: what the profile's sidecar says.",
        COUNT,
    ),
]
Stages = Annotated[
    int | None,
    option(
        "-s, --pp, --stages N",
        JOB,
        "Pipeline stages (ranks of a pipeline); default: the profile's stages over --vp.",
        COUNT,
    ),
]
Chunks = Annotated[
    int | None,
    option(
        "--vp, --chunks N",
        JOB,
        "Model chunks per pipeline stage, for interleaved, looped-bfs and interleaved-zb; the "
        "profile has a stage for each. Default: 1; zb-v and dualpipe-v always have 2.",
        COUNT,
    ),
]
TensorParallel = Annotated[
    int | None,
    option(
        "--tp, --gpus-per-stage N",
        JOB,
        "GPUs that run each stage together (tensor parallel); default: what the profile or "
        "plan says, else 1.",
        COUNT,
    ),
]
ContextParallel = Annotated[
    int | None,
    option(
        "--cp N", JOB, "Context-parallel size, by which a stage has further GPUs; default 1.", COUNT
    ),
]
DataParallel = Annotated[
    int | None,
    option(
        "--dp, --replicas N",
        JOB,
        "Data-parallel replicas of the pipeline; default: what the plan says, else 1.",
        COUNT,
    ),
]
Latency = Annotated[
    float | None,
    option(
        "--p2p-latency TIME",
        JOB,
        "How long a transfer between stages takes, as in 2ms or 0.002 (seconds); default 0.",
        TIME,
    ),
]
SwitchLatency = Annotated[
    float | None,
    option(
        "--switch-latency TIME",
        CLOCKS,
        "A clock comes so long after it is asked for, as in 20ms or 20 (milliseconds).",
        _MS,
    ),
]
MinDwell = Annotated[
    float | None,
    option(
        "--min-dwell TIME",
        CLOCKS,
        "No stage asks for another clock within TIME, as in 100ms or 100 (milliseconds).",
        _MS,
    ),
]
Noise = Annotated[
    float | None,
    option(
        "--noise PCT",
        NOISE,
        "Standard deviation of times; with --robust, default: the profile's column time_std.",
        PERCENT,
    ),
]
Reconfigure = Annotated[
    str | None,
    option("--reconfigure HOW", TARGET, "With planner envpipe: balanced (the default) or greedy."),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
ProfileOption = Annotated[
    str | None,
    option(
        "--profile PROFILE", OUTPUT, "The profile that the file was made from, if it has moved."
    ),
]
ForceOption = Annotated[
    bool, option("--force", OUTPUT, "Go on though the profile has changed since.")
]
JsonOption = Annotated[bool, option("--json", OUTPUT, "Print JSON instead of a table.")]
QuietOption = Annotated[
    bool, option("-q, --quiet", OUTPUT, "Print nothing but errors; files are still written.")
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a command answers."""

    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A plan, and how to come by its profile."""

    plan: PlanArgument = Path("plan.json")
    profile: ProfileOption = None
    force: ForceOption = False


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The training job: a profile and how the pipeline runs it."""

    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help="Profile CSV, or the name of a built-in profile (envplan profiles lists them).",
        ),
    ] = DEFAULT_PROFILE
    microbatches: Microbatches = None
    schedule: Annotated[
        str | None,
        option(
            "--schedule NAME",
            JOB,
            "1f1b, gpipe, interleaved, envpipe, looped-bfs, interleaved-zb, zb-h1, zb-v or "
            "dualpipe-v; default: what the profile's sidecar says, else 1f1b.",
        ),
    ] = None
    pp: Stages = None
    vp: Chunks = None
    tp: TensorParallel = None
    cp: ContextParallel = None
    dp: DataParallel = None
    p2p_latency: Latency = None
    dag: Annotated[
        Path | None,
        option("--dag FILE", JOB, "Run the operations of this DAG file instead of a schedule."),
    ] = None
    activation_slots: Annotated[
        Numbers | None,
        option(
            "--activation-slots N[,N...]",
            JOB,
            "Microbatches whose activations fit into a stage's memory, one number for all stages "
            "or one for each: caps how far schedule envpipe runs ahead.",
            numbers("8 or 8,7,6,5", least=0),
        ),
    ] = None
    recompute: Annotated[
        bool,
        option(
            "--recompute",
            JOB,
            "Activations are recomputed: add each stage's forward to its backward.",
        ),
    ] = False
    extra: Annotated[
        str | None,
        option(
            "--extra NAME[,NAME...]",
            JOB,
            "Give the schedule operations beside forwards and backwards, as far as the "
            "profile has rows for them: load, all_reduce, optimizer.",
        ),
    ] = None
    blocking_power: Annotated[
        float | None,
        option(
            "--blocking-power W",
            JOB,
            "Power of a GPU that waits; default: the profile's blocking rows, else 70.",
            POWER,
        ),
    ] = None

    def load(self) -> tuple[Profile, Pipeline]:
        """The profile and the pipeline.

        Raises:
            InputError: there is no such profile or pipeline, or options contradict each other.
        """
        profile = open_profile(self.profile)
        self._warn_of_contradictions(profile)
        pipeline = self._from_dag() if self.dag else self._from_schedule(profile)
        needed = {op.instruction for op in pipeline.operations}
        return profile.fitted(needed, recompute=self.recompute), pipeline

    def trace(self, *, quiet: bool, whole: bool = True) -> Frontier:
        """The frontier, with a progress bar if it takes long and somebody is watching.

        Args:
            whole: now, not only what is asked for later.

        Raises:
            InputError: as for load, or the profile does not fit the pipeline.
        """
        profile, pipeline = self.load()
        return self.trace_with(
            profile, pipeline, self.replicas(profile), quiet=quiet, whole=whole
        )

    def trace_with(
        self,
        profile: Profile,
        pipeline: Pipeline,
        replicas: int,
        *,
        quiet: bool,
        full: bool = False,
        whole: bool = True,
    ) -> Frontier:
        """The frontier of a pipeline with a profile, for so many replicas. As trace."""
        from envplan.cli.output import progress_bar
        from envplan.solve import trace_frontier

        with progress_bar(f"Tracing the frontier of {profile.name}", quiet=quiet) as progress:
            return trace_frontier(
                pipeline,
                profile,
                blocking_power=self.blocking_power,
                gpus_per_stage=self.gpus_per_stage(profile),
                replicas=replicas,
                full=full,
                whole=whole,
                progress=progress,
            )

    def gpus_per_stage(self, profile: Profile) -> int:
        """GPUs of a stage: as given, else as the profile's sidecar says."""
        if self.tp is None and self.cp is None:
            return profile.metadata.gpus_per_stage
        return (self.tp or profile.metadata.tensor_parallel or 1) * (self.cp or 1)

    @property
    def slots(self) -> int | list[int] | None:
        """--activation-slots: one number for all stages, or one for each."""
        slots = self.activation_slots
        return slots[0] if slots is not None and len(slots) == 1 else slots

    def replicas(self, profile: Profile) -> int:
        """Replicas of the pipeline: as given, else as the profile's sidecar says."""
        return self.dp or profile.metadata.job.replicas

    def _warn_of_contradictions(self, profile: Profile) -> None:
        from envplan.cli.output import warn

        known = profile.metadata.tensor_parallel
        if self.tp is not None and known not in (None, self.tp):
            warn(
                f"profile {profile.name} was made with --tp {known}, not {self.tp}: its times and "
                f"energies are those of --tp {known}"
            )

    def _from_dag(self) -> Pipeline:
        from envplan.pipeline import Pipeline

        scheduling = {
            "--schedule": self.schedule,
            "--microbatches": self.microbatches,
            "--pp": self.pp,
            "--vp": self.vp,
            "--p2p-latency": self.p2p_latency,
            "--activation-slots": self.activation_slots,
            "--extra": self.extra,
        }
        for name, value in scheduling.items():
            if value is not None:
                raise InputError(f"--dag and {name} exclude each other; the DAG file says it all")
        assert self.dag is not None
        return Pipeline.from_dag_file(self.dag)

    def _from_schedule(self, profile: Profile) -> Pipeline:
        from envplan.pipeline.described import described_pipeline
        from envplan.pipeline.extras import parse_extras

        schedule = self.schedule or profile.metadata.schedule or "1f1b"
        if self.activation_slots is not None and schedule != "envpipe":
            raise InputError(f"--activation-slots goes with schedule envpipe, not {schedule}")
        return described_pipeline(
            profile,
            schedule=self.schedule,
            num_stages=self.pp,
            num_microbatches=self.microbatches,
            chunks=self.vp,
            p2p_latency=self.p2p_latency,
            extras=parse_extras(self.extra, profile),
            forwards_ahead=lambda microbatches: self._forwards_ahead(profile, microbatches),
        )

    def _forwards_ahead(self, profile: Profile, microbatches: int) -> tuple[int, ...]:
        from envplan.planners import forwards_ahead

        timed = profile.fitted(("backward",), recompute=self.recompute)
        return forwards_ahead(timed, microbatches, self.slots)


def open_profile(path_or_name: str) -> Profile:
    """The profile at a path or of a built-in name.

    Raises:
        InputError: there is none; says how to come by one.
    """
    from envplan.profile import Profile

    if path_or_name == DEFAULT_PROFILE and not Path(DEFAULT_PROFILE).exists():
        raise InputError(
            "no such file here; give the path of a profile, or the name of a built-in one "
            "(`envplan profiles` lists them)",
            path=DEFAULT_PROFILE,
        )
    return Profile.open(path_or_name)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a plan is for; without any, no slowdown."""

    target_time: Annotated[
        float | None,
        option(
            "--target-time TIME",
            MOST,
            "Least energy with an iteration of at most TIME, as in 14.2 (seconds) or 900ms.",
            TIME,
        ),
    ] = None
    slowdown: Annotated[
        float | None,
        option("--slowdown PCT", MOST, "Least energy at most PCT percent above T_min.", PERCENT),
    ] = None
    min_energy: Annotated[bool, option("--min-energy", MOST, "Least energy of all, at T_star.")] = (
        False
    )
    energy_budget: Annotated[
        float | None,
        option(
            "--energy-budget J",
            TARGET,
            "Shortest iteration of at most J joules over all GPUs.",
            ENERGY,
        ),
    ] = None
    power_cap: Annotated[
        float | None,
        option(
            "--power-cap W",
            TARGET,
            "Shortest iteration of at most W watts over all GPUs, on average.",
            POWER,
        ),
    ] = None
    peak_power_cap: Annotated[
        float | None,
        option(
            "--peak-power-cap W",
            TARGET,
            "Shortest iteration of never more than W watts over all GPUs; with --target-time, "
            "--slowdown or --min-energy: least energy.",
            POWER,
        ),
    ] = None
    straggler_time: Annotated[
        float | None,
        option(
            "--straggler-time TIME",
            TARGET,
            "Some replica takes so long anyway: use what time that leaves, up to T_max.",
            TIME,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Who plans, and how hard it tries."""

    polish: Annotated[
        float,
        option(
            "--polish TIME",
            TARGET,
            "Time to spend on improving the plan with CP-SAT, as in 30s.",
            TIME,
        ),
    ] = 0.0
    ladder: Annotated[
        int,
        option(
            "--ladder N",
            TARGET,
            "Put up to N slower plans, up to T_max, into the file for when a straggler appears.",
            WHOLE,
        ),
    ] = 0
    planner: Annotated[
        str,
        option(
            "--planner NAME",
            TARGET,
            "frontier, max_frequency, zeus_global, zeus_per_stage or envpipe; envpipe brings "
            "its own schedule unless one is named.",
        ),
    ] = "frontier"
    clocks_file: Annotated[
        Path | None,
        option(
            "--clocks FILE",
            TARGET,
            "Choose nothing: take the clocks from FILE (freqs_pipeline_*.py of Perseus and Zeus, a "
            "frequency plan, or a CSV) and say what they cost and what is lost.",
        ),
    ] = None
    reconfigure: Reconfigure = None
    explain: Annotated[
        bool, option("--explain", TARGET, "With planner envpipe: print each of its iterations.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ClockOptions:
    """How late clocks follow and how much times vary; seconds and percent."""

    switch_latency: SwitchLatency = None
    min_dwell: MinDwell = None
    robust: Annotated[
        float | None,
        option(
            "--robust PCT",
            NOISE,
            "Hold the target with a probability of PCT percent, though times vary.",
            PERCENT,
        ),
    ] = None
    noise: Noise = None


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """What a kWh costs."""

    price: Annotated[
        str | None,
        option(
            "--price P|FILE",
            MONEY,
            "Price of a kWh, or a CSV with hour,price or time,price if it changes with time.",
        ),
    ] = None
    carbon: Annotated[
        str | None,
        option(
            "--carbon G|FILE", MONEY, "gCO2 of a kWh, or a CSV with hour,carbon or time,carbon."
        ),
    ] = None
    currency: Annotated[
        str | None, option("--currency NAME", MONEY, "What to call the units of --price.")
    ] = None

    @property
    def files(self) -> list[tuple[str, str | None]]:
        """What may be files to read, each after what it is."""
        return [("the file of prices", self.price), ("the file of carbon", self.carbon)]


@dataclass(frozen=True, kw_only=True)
class CostOptions(RateOptions):
    """What a run costs: rates, and how much work it is."""

    iterations: Annotated[
        int | None,
        option("--iterations N", MONEY, "Iterations of the training run, as in 100k.", _MANY),
    ] = None
    tokens: Annotated[
        int | None,
        option(
            "--tokens N",
            MONEY,
            "Instead of --iterations: tokens of the run, as in 300e9 or 15T.",
            _MANY,
        ),
    ] = None
    tokens_per_iteration: Annotated[
        int | None,
        option(
            "--tokens-per-iteration N",
            MONEY,
            "Tokens of an iteration over all replicas; default: from the profile's sidecar.",
            _MANY,
        ),
    ] = None
    start: Annotated[
        str | None,
        option(
            "--start TIME",
            MONEY,
            "When the run starts, as in 2026-12-01T00:00, for files with times; default: when "
            "they do.",
        ),
    ] = None
    repeat_rates: Annotated[
        bool,
        option("--repeat-rates", MONEY, "Let the files begin again where the run outlasts them."),
    ] = False

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        rates = self.price or self.carbon
        for name, value, needed, other in (
            ("--currency", self.currency, "--price", self.price),
            ("--tokens-per-iteration", self.tokens_per_iteration, "--tokens", self.tokens),
            ("--start", self.start, "--price or --carbon", rates),
            ("--repeat-rates", self.repeat_rates, "--price or --carbon", rates),
        ):
            if value and not other:
                raise InputError(f"{name} goes with {needed}")
        if self.iterations is not None and self.tokens is not None:
            raise InputError("--iterations and --tokens exclude each other; give one of them")

    @property
    def given(self) -> bool:
        """Whether anything is to be computed."""
        return any((self.price, self.carbon, self.iterations, self.tokens))

    def run(self, frontier: Frontier | None) -> Run:
        """The run whose costs are wanted.

        Args:
            frontier: what says how many tokens an iteration has; None: an option must.

        Raises:
            InputError: a rate cannot be read, or nothing says how many tokens an iteration has.
        """
        from envplan.costs import Run

        return Run.of(
            iterations=self._iterations(frontier),
            price=self._rate(self.price, "price"),
            carbon=self._rate(self.carbon, "carbon"),
            currency=self.currency,
            tokens=self.tokens,
            **self._aim(),
        )

    def _aim(self) -> dict[str, Any]:
        """What further says which plan is best."""
        return {}

    def _rate(self, given: str | None, kind: Kind) -> Rate | None:
        from envplan.costs import read_rate

        if given is None:
            return None
        return read_rate(given, kind, start=self.start, repeats=self.repeat_rates)

    def _iterations(self, frontier: Frontier | None) -> int | None:
        from envplan.costs import tokens_per_iteration

        if self.tokens is None:
            return self.iterations
        each = self.tokens_per_iteration
        if each is None:
            if frontier is None:
                raise InputError("--tokens needs --tokens-per-iteration here")
            each = tokens_per_iteration(frontier)
        return -(-self.tokens // each)


@dataclass(frozen=True, kw_only=True)
class RunOptions(CostOptions):
    """The costs of a run that may have to be over in time."""

    deadline: Annotated[
        float | None,
        option(
            "--deadline TIME",
            MONEY,
            "The cheapest plan whose run is over within TIME, as in 14d, 36h or 1d12h.",
            LONG_TIME,
        ),
    ] = None
    minimize: Annotated[
        Literal["energy", "money", "carbon"] | None,
        option(
            "--minimize WHAT",
            MONEY,
            "With --deadline: money, carbon or energy; default: the first of these that is known.",
            one_of("money", "carbon", "energy"),
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimize and self.deadline is None:
            raise InputError("--minimize goes with --deadline")
        if self.deadline is not None and self.iterations is None and self.tokens is None:
            raise InputError("--deadline needs to know the work: give --iterations or --tokens")

    def _aim(self) -> dict[str, Any]:
        return {"deadline_s": self.deadline, "minimize": self.minimize}
