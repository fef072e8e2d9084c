"""The options that commands share, each declared once, and the groups that commands take them in.

A group is a dataclass: a command that has it as a parameter has all its options, and receives what
was given as one value. See command.py for how that works.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import envplan
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.progress import progress
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER

if TYPE_CHECKING:
    from envplan.costs import Overheads, Run
    from envplan.costs.rates import Kind, Rate

DEFAULT_PROFILE = "profile.csv"
_MANY = COUNT.within(1, 10**18)
#: What takes minutes to plan.
_MANY_OPERATIONS = 2**17


@cmd.options(
    """
    Arguments:
      PLAN  A plan file.
    """,
)
class PlanOptions:
    """A plan, and how to come by its profile."""

    plan: Path = Path("plan.json")
    profile: str | None = None
    force: bool = False

    def load(self) -> tuple[envplan.Plan, envplan.Profile]:
        """The plan, and the profile that it was made from.

        Raises:
            InputError: one of the two cannot be read, or the profile would be replaced.
        """
        from envplan.plan import find_profile

        plan = envplan.Plan.load(self.plan)
        profile = find_profile(plan.profile, self.plan, self.profile)
        cmd.refuse_overwriting(profile.path, profile.sidecar)
        return plan, profile


@cmd.options()
class ParallelOptions:
    """How many GPUs run a stage, and how many replicas there are."""

    tp: int | None = None
    cp: int | None = None
    dp: int | None = None


def complete_profiles(incomplete: str) -> list[str]:
    """Names of built-in profiles, and of CSV files and folders, that begin so."""
    from envplan.profile import builtin_paths

    there = sorted(glob.iglob(f"{glob.escape(incomplete)}*"))  # noqa: PTH207  (of any folder)
    folders = [f"{path}/" for path in there if Path(path).is_dir()]
    files = [path for path in there if path.endswith(".csv")]
    return folders + files + [name for name in builtin_paths() if name.startswith(incomplete)]


@cmd.options(
    """
    Job:
      --schedule NAME  1f1b, gpipe, interleaved, envpipe, looped-bfs, interleaved-zb, zb-h1, zb-v
          or dualpipe-v; default: what the profile's sidecar says, else 1f1b.
      --dag FILE  Run the operations of this DAG file instead of a schedule.
      --activation-slots N[,N...]  Microbatches whose activations fit into a stage's memory, one
          number for all stages or one for each: caps how far schedule envpipe runs ahead.
      --raw  Keep the noise of measured rows; default: where it is clear, it is taken out.
      --recompute  Activations are recomputed: add each stage's forward to its backward.
      --extra NAME[,NAME...]  Give the schedule operations beside forwards and backwards, as far
          as the profile has rows for them: load, all_reduce, reduce_scatter, optimizer,
          all_gather.
      --one-clock  Give every operation one clock, though the profile splits some into parts.
      --parts-within PCT  Leave out clocks by part that save at most PCT percent of an operation's
          energy on others no slower; default: 0.2, 0 leaves nothing out.
      --blocking-power W  Power of a GPU that waits; default: the profile's blocking rows, else
          70.
    """,
    activation_slots=cmd.numbers("8 or 8,7,6,5", least=0),
)
class JobOptions(ParallelOptions):
    """The training job: a profile and how the pipeline runs it."""

    profile: str = cmd.argument(
        "PROFILE",
        "Profile CSV, or the name of a built-in profile (envplan profiles lists them).",
        DEFAULT_PROFILE,
        autocompletion=complete_profiles,
    )
    microbatches: int | None = None
    schedule: str | None = None
    pp: int | None = None
    vp: int | None = None
    microbatch_group: int | None = None
    p2p_latency: float | None = None
    dag: Path | None = None
    activation_slots: cmd.Numbers | None = None
    raw: bool = False
    recompute: bool = False
    extra: str | None = None
    one_clock: bool = False
    parts_within: float | None = None
    blocking_power: float | None = None
    jobs: int | None = None

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
            shape = "schedule microbatches pp vp microbatch_group p2p_latency activation_slots"
            cmd.refuse_both(["--dag", *cmd.given(self, f"{shape} extra")])
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
        asked = ByParts.asked(self.parts_within, self.blocking_power) if parted else None
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
        cmd.refuse_overwriting(profile.path, profile.sidecar)
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
        from envplan.profile.described import described_pipeline, parse_extras

        schedule = self.schedule or profile.metadata.schedule or "1f1b"
        if schedule != "envpipe":
            slots = cmd.given(self, "activation_slots")
            cmd.refuse(slots, f"goes with schedule envpipe, not {schedule}")

        def ahead(microbatches: int) -> tuple[int, ...]:
            timed = profile.fitted(("backward",), recompute=self.recompute)
            return envplan.forwards_ahead(timed, microbatches, self.activation_slots)

        return described_pipeline(
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


@cmd.options(
    """
    Money:
      --price P|FILE  Price of a kWh, or a CSV with hour,price or time,price if it changes with
          time.
      --carbon G|FILE  gCO2 of a kWh, or a CSV with hour,carbon or time,carbon.
      --currency NAME  What to call the units of --price; default: USD.
      --pue X  Power usage effectiveness of the site, from 1 up; default: 1.
      --host-power W  What the host draws for each of its GPUs; default: 0.
      --gpu-hour P  What an hour of a GPU costs besides energy: slower plans take more of
          them. Default: 0.
      --embodied KG  CO2 of making one GPU, kg; goes with --carbon. Default: 0.
      --lifetime YEARS  Years that --embodied is spread over; default: 5.
    """,
    pue=NUMBER.within(1, 100),
    gpu_hour=NUMBER,
    embodied=NUMBER,
    lifetime=NUMBER,
)
class RateOptions:
    """What a kWh costs, and what is used and paid beside the energy of GPUs."""

    price: str | None = None
    carbon: str | None = None
    currency: str | None = None
    pue: float = 1.0
    host_power: float = 0.0
    gpu_hour: float = 0.0
    embodied: float = 0.0
    lifetime: float = 5.0

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        cmd.needs(self, embodied="carbon")

    def overheads(self) -> Overheads:
        """What is counted beside the energy of GPUs."""
        from envplan.costs import Overheads

        return Overheads.of(**{name: getattr(self, name) for name in Overheads.model_fields})

    def rates(self, **how: Any) -> dict[str, Rate]:
        """Price and carbon of a kWh, as far as they are given. As read_rate."""
        from envplan.costs.rates import read_rate

        kinds: tuple[Kind, ...] = ("price", "carbon")
        asked = ((kind, getattr(self, kind)) for kind in kinds)
        return {kind: read_rate(rate, kind, **how) for kind, rate in asked if rate}


@cmd.options(
    """
    Money:
      --iterations N  Iterations of the training run, as in 100k.
      --tokens N  Instead of --iterations: tokens of the run, as in 300e9 or 15T.
      --tokens-per-iteration N  Tokens of an iteration over all replicas; default: from the
          profile's sidecar.
      --start TIME  When the run starts, as in 2026-12-01T00:00, for files with times; default:
          when they do.
      --repeat-rates  Let the files begin again where the run outlasts them.
    """,
    iterations=_MANY,
    tokens=_MANY,
    tokens_per_iteration=_MANY,
    start=None,
)
class CostOptions(RateOptions):
    """What a run costs: rates, and how much work it is."""

    iterations: int | None = None
    tokens: int | None = None
    tokens_per_iteration: int | None = None
    start: str | None = None
    repeat_rates: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        cmd.needs(
            self,
            currency="price",
            gpu_hour="price",
            pue="price carbon iterations tokens",
            host_power="price carbon iterations tokens",
            tokens_per_iteration="tokens",
            start="price carbon",
            repeat_rates="price carbon",
        )
        cmd.refuse_both(cmd.given(self, "iterations tokens"))

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

        if not cmd.given(self, "price carbon iterations tokens"):
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
