"""The options that name a job: its profile, its pipeline and its GPUs; or a plan, which has them.

Each group is a frozen dataclass whose fields are options. A command that has a group as a parameter
has all its options, and receives what was given as one value.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.given import options_given, refuse, refuse_both
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import (
    JOB,
    MOST_USED,
    OUTPUT,
    Chunks,
    Force,
    MicrobatchGroup,
    MovedProfile,
)
from envplan.cli.types import InputFile, Numbers, completing, either, numbers, quantity
from envplan.pipeline import SCHEDULES
from envplan.pipeline.operations import EXTRAS
from envplan.quantities import COUNT, PERCENT, POWER, TIME

if TYPE_CHECKING:
    from envplan.planners.job import JobSpec

DEFAULT_PROFILE: Final = "profile.csv"
#: Operations that take minutes to plan.
_MANY_OPERATIONS: Final = 2**17
#: Options for what a DAG file says itself.
_SHAPE: Final = (
    "schedule", "microbatches", "pp", "vp", "microbatch_group", "p2p_latency", "activation_slots",
    "extra",
)  # fmt: skip


class LoadedJob(NamedTuple):
    """A pipeline, and a profile with all its operations."""

    profile: envplan.Profile
    pipeline: envplan.Pipeline


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

    paths = sorted(glob.iglob(f"{glob.escape(incomplete)}*"))  # noqa: PTH207  (of any folder)
    folders = [f"{path}/" for path in paths if Path(path).is_dir()]
    files = [path for path in paths if path.endswith(".csv")]
    names = [name for name in builtin_paths() if name.startswith(incomplete)]
    return folders + files + names


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
            autocompletion=completing(SCHEDULES),
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
            parser=numbers("8 or 8,7,6,5", lowest=0),
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

    def load(self) -> LoadedJob:
        """The profile and the pipeline.

        Raises:
            InputError: there is no such profile or pipeline, or options contradict each other.
        """
        from envplan.replay.cores import use_cores

        use_cores(self.jobs)
        profile = envplan.Profile.open(self.profile, raw=self.raw)
        self._warn_of_contradictions(profile)
        if self.dag is None:
            pipeline = self._pipeline_of_schedule(profile)
        else:
            refuse_both(["--dag", *options_given(self, *_SHAPE)])
            pipeline = envplan.Pipeline.from_dag_file(self.dag)
        num_operations = len(pipeline.operations)
        if num_operations > _MANY_OPERATIONS:
            ui.warn(
                f"{num_operations} operations: planning may take hours and gigabytes; plans of "
                "long iterations repeat, so some microbatches for each stage tell nearly as much"
            )
        return LoadedJob(self.fitted(profile, pipeline), pipeline)

    def fitted(self, profile: envplan.Profile, pipeline: envplan.Pipeline) -> envplan.Profile:
        """A profile with the operations of a pipeline, composed of parts as the options say.

        Raises:
            InputError: the profile lacks some, or options contradict it.
        """
        return self._spec(profile).fitted(profile, pipeline)

    def trace(
        self,
        job: LoadedJob | None = None,
        *,
        replicas: int | None = None,
        full: bool = False,
        whole: bool = True,
    ) -> envplan.Frontier:
        """The frontier, with a sign of how far it is if it takes long.

        Args:
            job: whose frontier; None: that of the options.
            replicas: None: as the options or the sidecar say.
            full: go on beyond T_star, to T_max.
            whole: trace all of it now; otherwise what is wanted is traced when it is wanted.

        Raises:
            InputError: as for load, the profile does not fit the pipeline, or it would be replaced.
        """
        profile, pipeline = job or self.load()
        invocation().will_read(profile.path, profile.sidecar)
        spec = self._spec(profile, replicas)
        with progress(f"Tracing the frontier of {profile.name}") as work:
            return spec.trace_fitted(
                profile, pipeline, full=full, whole=whole, progress=work.frontier_step
            )

    def _warn_of_contradictions(self, profile: envplan.Profile) -> None:
        """Warn of the first size that the options and the profile's sidecar state differently."""
        metadata = profile.metadata
        gpus = metadata.gpus_per_stage_with(self.tp, self.cp)
        timed = "its times and energies are those of"
        shared_out = f"its {profile.num_stages} model stages are shared out anew, not as with"
        sizes = (
            ("--tp", self.tp, metadata.tensor_parallel, timed),
            ("GPUs of a stage:", gpus, metadata.job.gpus_per_stage, timed),
            ("--pp", self.pp, metadata.job.stages, shared_out),
        )
        for name, wanted, stated, consequence in sizes:
            if wanted is None or stated is None or wanted == stated:
                continue
            ui.warn(
                f"{profile.path or profile.name} was made with {name} {stated}, not {wanted}: "
                f"{consequence} {name} {stated}"
            )
            return

    def _pipeline_of_schedule(self, profile: envplan.Profile) -> envplan.Pipeline:
        schedule = self.schedule or profile.metadata.schedule or "1f1b"
        if schedule != "envpipe":
            slots = options_given(self, "activation_slots")
            refuse(slots, f"goes with schedule envpipe, not {schedule}")
        return self._spec(profile).pipeline(profile)

    def _spec(self, profile: envplan.Profile, replicas: int | None = None) -> JobSpec:
        """The job as the library takes it.

        Args:
            profile: its sidecar says what the options do not.
            replicas: None: as the options or the sidecar say.
        """
        from envplan.planners.job import JobSpec

        metadata = profile.metadata
        return JobSpec(
            schedule=self.schedule,
            num_stages=self.pp,
            num_microbatches=self.microbatches,
            chunks=self.vp,
            microbatch_group=self.microbatch_group,
            p2p_latency_s=self.p2p_latency,
            extra=self.extra,
            activation_slots=self.activation_slots,
            recompute=self.recompute,
            one_clock=self.one_clock,
            parts_within_percent=self.parts_within,
            blocking_power_w=self.blocking_power,
            gpus_per_stage=metadata.gpus_per_stage_with(self.tp, self.cp),
            replicas=replicas or self.dp or metadata.job.replicas,
        )
