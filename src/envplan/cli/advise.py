"""`envplan advise`: every schedule that a job could run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan._io.words import significant
from envplan.cli import output as ui
from envplan.cli.describe import describe_job, modelled_title
from envplan.cli.given import as_typed
from envplan.cli.job_options import JobOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import Column, percent_column, text_column, value_column
from envplan.cli.types import quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, MEMORY

if TYPE_CHECKING:
    from envplan.planners import Advice

#: Schedules of each ranking that are planned, and not only bounded.
_PLANNED_OF_EACH: Final = 3


def advise(
    job: JobOptions,
    best: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help=f"How many to plan of each ranking; default: {_PLANNED_OF_EACH}.",
            rich_help_panel=MOST_USED,
            show_default=False,
        ),
    ] = _PLANNED_OF_EACH,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            parser=quantity(MEMORY),
            help="Leave out what needs more of a GPU's memory; default: 92% of the GPU's, where "
            "the profile says what its stages take.",
            rich_help_panel=MOST_USED,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Find the schedule that suits a job best.

    All that fit the profile run the same batch on the same GPUs. They are ranked by energy in the
    time of the job's own plan without slowdown, and by time at its energy. With twice the chunks a
    GPU holds twice as much of the model; activations in flight are counted by each schedule's
    order, and what does not fit is left out (see --memory).

    \b
    Example:
      envplan advise a40-gpt3-1.3b-4stage --microbatches 32
      envplan advise --schedule gpipe --best 5 --json
    """
    if job.dag is not None:
        raise InputError("advise compares schedules; leave --dag out")
    own_job = job if job.schedule == "envpipe" else replace(job, activation_slots=None)
    frontier = own_job.trace()
    memory_gb = _usable_memory_gb(frontier.profile) if memory is None else memory
    with progress("schedules") as work:
        rows = envplan.advise(
            frontier,
            activation_slots=job.activation_slots,
            best=best,
            memory_gb=memory_gb,
            progress=work.items,
        )
    ui.answer(
        lambda: {
            "schema": "envplan/advice/v1",
            "profile": rows[0].frontier.profile.name,
            "source": frontier.profile.metadata.source,
            "t_min_s": frontier.min_time,
            "memory_gb": memory_gb,
            "schedules": [row.to_dict() for row in rows],
        },
        lambda: _print_schedules(frontier, rows, memory_gb),
        next_command=["envplan", "solve", *as_typed(_thriftiest_job(job, rows))],
    )


def _thriftiest_job(job: JobOptions, rows: Sequence[Advice]) -> JobOptions:
    """The job with the schedule that saves most with as much of the model on a GPU as now.

    Args:
        job: as given.
        rows: ranked by energy.
    """
    thriftiest = next(row for row in rows if row.model_share == 1)
    name = thriftiest.frontier.pipeline.schedule
    schedule = job.schedule if thriftiest.is_job else name
    slots = job.activation_slots if name == "envpipe" else None
    return replace(job, schedule=schedule, activation_slots=slots)


def _usable_memory_gb(profile: envplan.Profile) -> float | None:
    """What a job may take of its GPU's memory, GB; None where that is not known."""
    from envplan.profiling.memory_fit import USABLE_SHARE, gpu_memory_gb

    gpu_gb = gpu_memory_gb(profile.metadata.gpu)
    return None if gpu_gb is None else USABLE_SHARE * gpu_gb


def _print_schedules(
    frontier: envplan.Frontier, rows: Sequence[Advice], memory_gb: float | None
) -> None:
    metadata = frontier.profile.metadata
    ui.say(
        describe_job(frontier),
        f"the job's plan without slowdown takes {significant(frontier.min_time)} s; the same "
        "batch on the same GPUs:",
    )
    # Without a value a schedule is not ranked by it.
    by_energy = [row for row in rows if row.saved_percent is not None]
    by_energy.sort(key=lambda row: row.saved_percent or 0.0, reverse=True)
    saved = percent_column("saved (%)", [row.saved_percent for row in by_energy])
    ui.show_table(
        modelled_title("Energy at equal time", metadata.source),
        [*_schedule_columns(by_energy), saved],
    )
    by_time = [row for row in rows if row.faster_percent is not None]
    by_time.sort(key=lambda row: row.faster_percent or 0.0, reverse=True)
    faster = percent_column("faster (%)", [row.faster_percent for row in by_time])
    ui.show_table(
        modelled_title("Time at equal energy", metadata.source),
        [*_schedule_columns(by_time), faster],
    )
    ui.say("saved: of the energy of the job's schedule at maximum frequency")
    ui.say(*_memory_notes(rows, memory_gb))
    if metadata.energies_in_words:
        ui.say(f"the profile's energies are {metadata.energies_in_words}")
    adjustments: set[str] = set()
    for row in rows:
        adjustments.update(row.frontier.profile.adjustments.in_words())
    # What the job's own profile is adjusted by, the first line says.
    for words in sorted(adjustments.difference(frontier.profile.adjustments.in_words())):
        ui.say(f"split backwards: {words}")


def _memory_notes(rows: Sequence[Advice], memory_gb: float | None) -> Iterator[str]:
    """What is known of the memory that the schedules take."""
    own_gb = next(row.memory_gb for row in rows if row.is_job)
    if own_gb is None:
        yield "memory is not looked at: the profile does not say what its stages take"
        return
    if memory_gb is None:
        yield "nothing is left out for memory: say how much a GPU has with --memory GB"
        return
    yield f"schedules that need more than {memory_gb:.0f} GB of a GPU are left out, by estimate"
    if own_gb > memory_gb:
        yield f"warning: the job itself needs {own_gb:.0f} GB"


def _schedule_columns(rows: Sequence[Advice]) -> list[Column]:
    pipelines = [row.frontier.pipeline for row in rows]
    names = []
    for row in rows:
        job_mark = " (the job)" if row.is_job else ""
        names.append(f"{row.frontier.pipeline.schedule}{job_mark}")
    shapes = [f"{pipeline.num_stages} x {pipeline.num_chunks}" for pipeline in pipelines]
    memory = []
    if all(row.memory_gb is not None for row in rows):
        memory = [value_column("memory (GB)", [f"{row.memory_gb:.0f}" for row in rows])]
    return [
        text_column("schedule", names),
        value_column("stages x chunks", shapes),
        value_column("microbatches", [pipeline.num_microbatches for pipeline in pipelines]),
        value_column("replicas", [row.frontier.replicas for row in rows]),
        value_column("model on a GPU", [f"x{row.model_share:g}" for row in rows]),
        *memory,
    ]
