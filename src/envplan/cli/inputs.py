"""Options that several commands share, and what they make: a profile, a pipeline, a frontier."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan._files import check_writable, same_file
from envplan.errors import EnvplanError, InputError, shown

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.pipeline import Pipeline
    from envplan.profile import Profile

DEFAULT_PROFILE = "profile.csv"

ProfileArgument = Annotated[
    str,
    typer.Argument(
        metavar="[PROFILE]",
        help="Profile CSV, or the name of a built-in profile (envplan profiles lists them).",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        "-m",
        metavar="M",
        help="Microbatches per iteration; default: what the profile's sidecar says.",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="1f1b, gpipe, interleaved, envpipe, looped-bfs, interleaved-zb, zb-h1, zb-v or "
        "dualpipe-v; default: what the profile's sidecar says, else 1f1b.",
    ),
]
ChunksOption = Annotated[
    int | None,
    typer.Option(
        metavar="V",
        help="Model chunks per pipeline stage, for interleaved, looped-bfs and interleaved-zb; the "
        "profile has a stage for each. zb-v and dualpipe-v always have 2.",
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--p2p-latency", metavar="S", help="Seconds a transfer between stages takes; default 0."
    ),
]
DagOption = Annotated[
    Path | None,
    typer.Option(
        "--dag", metavar="FILE", help="Run the operations of this DAG file instead of a schedule."
    ),
]
BlockingPowerOption = Annotated[
    float | None,
    typer.Option(
        metavar="W",
        help="Power of a GPU that waits; default: the profile's blocking rows, else 70.",
    ),
]
GpusOption = Annotated[
    int,
    typer.Option("--gpus-per-stage", metavar="N", help="GPUs that run each stage together."),
]
ReplicasOption = Annotated[
    int, typer.Option(metavar="N", help="Data-parallel replicas of the pipeline.")
]
SlotsOption = Annotated[
    str | None,
    typer.Option(
        "--activation-slots",
        metavar="N[,N...]",
        help="Microbatches whose activations fit into a stage's memory, one number for all stages "
        "or one for each: caps how far schedule envpipe runs ahead.",
    ),
]
ReconfigureOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="With planner envpipe: balanced (the default) or greedy.",
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="Activations are recomputed: add each stage's forward to its backward.",
    ),
]
ExtraOption = Annotated[
    str | None,
    typer.Option(
        "--extra",
        metavar="NAME[,NAME...]",
        help="Give the schedule operations beside forwards and backwards, as far as the profile "
        "has rows for them: load, all_reduce, optimizer.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors; files are still written.")
]


@dataclass(frozen=True)
class JobOptions:
    """What the options of a command say about the job, as given."""

    profile: str
    microbatches: int | None
    schedule: str | None
    chunks: int | None
    p2p_latency: float | None
    dag: Path | None
    blocking_power: float | None
    gpus_per_stage: int
    replicas: int
    activation_slots: str | None = None
    recompute: bool = False
    extra: str | None = None

    def load(self) -> tuple[Profile, Pipeline]:
        """The profile and the pipeline.

        Raises:
            InputError: there is no such profile or pipeline, or options contradict each other.
        """
        if self.blocking_power is not None:
            finite(self.blocking_power, "--blocking-power")
        for option, count in (
            ("--microbatches", self.microbatches),
            ("--chunks", self.chunks),
            ("--gpus-per-stage", self.gpus_per_stage),
            ("--replicas", self.replicas),
        ):
            if count is not None:
                at_least(count, option, 1)
        profile = open_profile(self.profile)
        pipeline = self._from_dag() if self.dag else self._from_schedule(profile)
        needed = {op.instruction for op in pipeline.operations}
        return profile.fitted(needed, recompute=self.recompute), pipeline

    def trace(self, *, quiet: bool) -> Frontier:
        """The frontier, with a progress bar if it takes long and somebody is watching.

        Raises:
            InputError: as for load, or the profile does not fit the pipeline.
        """
        profile, pipeline = self.load()
        from envplan.cli.output import progress_bar
        from envplan.frontier import trace_frontier

        with progress_bar("Tracing the frontier", quiet=quiet) as progress:
            return trace_frontier(
                pipeline,
                profile,
                blocking_power=self.blocking_power,
                gpus_per_stage=self.gpus_per_stage,
                replicas=self.replicas,
                progress=progress,
            )

    def _from_dag(self) -> Pipeline:
        from envplan.pipeline import Pipeline

        scheduling = {
            "--schedule": self.schedule,
            "--microbatches": self.microbatches,
            "--chunks": self.chunks,
            "--p2p-latency": self.p2p_latency,
            "--activation-slots": self.activation_slots,
            "--extra": self.extra,
        }
        for option, value in scheduling.items():
            if value is not None:
                raise InputError(f"--dag and {option} exclude each other; the DAG file says it all")
        assert self.dag is not None
        return Pipeline.from_dag_file(self.dag)

    def _from_schedule(self, profile: Profile) -> Pipeline:
        from envplan.pipeline import Pipeline, traits
        from envplan.pipeline.extras import parse_extras

        schedule = self.schedule or profile.metadata.schedule or "1f1b"
        if not self.schedule and schedule == "1f1b" and (self.chunks or 1) > 1:
            schedule = "interleaved"  # 1F1B with chunks
        chunks = self.chunks or traits(schedule).chunks
        if profile.num_stages % chunks:
            given = f"--chunks {chunks}"
            usual = f"schedule {schedule} runs {chunks} chunks on each pipeline stage; {chunks}"
            raise InputError(
                f"{given if self.chunks else usual} does not divide the {profile.num_stages} "
                f"stages of profile {profile.name}"
            )
        microbatches = self.microbatches or profile.metadata.num_microbatches
        if microbatches is None:
            raise InputError(
                "how many microbatches has an iteration? Give --microbatches M (profile "
                f"{profile.name} does not say)"
            )
        return Pipeline(
            schedule,
            num_stages=profile.num_stages // chunks,
            num_microbatches=microbatches,
            num_chunks=chunks,
            p2p_latency=self.p2p_latency or 0.0,
            forwards_ahead=self._forwards_ahead(profile, schedule, chunks, microbatches),
            extras=parse_extras(self.extra, profile),
        )

    def _forwards_ahead(
        self, profile: Profile, schedule: str, chunks: int, microbatches: int
    ) -> tuple[int, ...] | None:
        slots = parse_slots(self.activation_slots)
        if schedule != "envpipe":
            if slots is not None:
                raise InputError(f"--activation-slots goes with schedule envpipe, not {schedule}")
            return None
        if chunks > 1:
            return None  # the schedule itself says why it cannot
        from envplan.planners import forwards_ahead

        timed = profile.fitted(("backward",), recompute=self.recompute)
        return forwards_ahead(timed, microbatches, slots)


def parse_slots(text: str | None) -> int | list[int] | None:
    """The numbers that --activation-slots gives.

    Raises:
        InputError: it is no number, and no list of them.
    """
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--activation-slots must be a number, or one for each stage as in 8,7,6,5, not {text}"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


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


def at_least(count: int, option: str, least: int, most: int = 2**31 - 1) -> int:
    """`count`, which an option gave.

    Raises:
        InputError: it is below `least` or above `most`.
    """
    if count < least:
        raise InputError(f"{option} must be at least {least}, not {shown(count)}")
    if count > most:
        raise InputError(f"{option} must be at most {most}, not {shown(count)}")
    return count


def finite(
    value: float, option: str, *, least: float = 0.0, most: float = sys.float_info.max
) -> float:
    """`value`, which an option gave.

    Raises:
        InputError: it is not finite, below `least` or above `most`.
    """
    if not math.isfinite(value) or value < least:
        raise InputError(f"{option} must be a number from {least:g} up, not {value:g}")
    if value > most:
        raise InputError(f"{option} must be at most {most:g}, not {value:g}")
    return value


def check_outputs(
    *outputs: Path | None, inputs: Iterable[tuple[str, str | Path | None]] = ()
) -> None:
    """Refuse outputs that cannot or must not be written, before any work is done for them.

    Args:
        inputs: files that are read, each after what it is, as in "the plan".

    Raises:
        InputError: one cannot be written, is an input, or is named twice.
    """
    for what, file in inputs:
        refuse_replacing(what, file, *outputs)
    seen: set[Path] = set()
    for output in outputs:
        if output is None:
            continue
        check_writable(output)
        place = output.resolve()
        if place in seen and not output.is_char_device():
            raise InputError("is named for two outputs; choose another file", path=output)
        seen.add(place)


def refuse_overwriting(profile: Profile, *outputs: Path | None) -> None:
    """Keep a slip of the hand from replacing the profile by what is made from it.

    Raises:
        InputError: an output is the profile's own file or its sidecar.
    """
    refuse_replacing("the profile", profile.path, *outputs)
    refuse_replacing("the profile's sidecar", profile.sidecar, *outputs)


def refuse_replacing(what: str, file: str | Path | None, *outputs: Path | None) -> None:
    """Keep a file that a command reads from being replaced by what it writes.

    Args:
        what: the file in words.

    Raises:
        InputError: an output is that file.
    """
    for output in outputs:
        if file is not None and output is not None and same_file(file, output):
            raise InputError(f"is {what} itself; choose another output file", path=output)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors of input from within name this file, unless they name another."""
    try:
        yield
    except EnvplanError as error:
        if isinstance(error, InputError) and error.path is not None:
            raise
        raise InputError(str(error), path=file) from error
