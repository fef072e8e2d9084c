"""`envplan advise`: which schedule suits a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import envplan
from envplan.cli import output as ui
from envplan.cli.command import takes, typed
from envplan.cli.options import JobOptions
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.planners import Advice

#: What JSON says of a schedule.
_ROW: Final = """
    schedule=frontier.pipeline.schedule is_job stages=frontier.pipeline.num_stages
    chunks=frontier.pipeline.num_chunks microbatches=frontier.pipeline.num_microbatches
    replicas=frontier.replicas model_share
"""


@takes(
    """
    Most used:
      --best N  How many to plan of each ranking; default: 3.
    """
)
def advise(job: JobOptions, best: int = 3) -> None:
    """Find the schedule that suits a job best.

    All that fit the profile run the same batch on the same GPUs. They are ranked by energy in the
    time of the job's own plan without slowdown, and by time at its energy. With twice the chunks a
    GPU holds twice as much of the model; memory is not looked at.

    \b
    Example:
      envplan advise a40-gpt3-1.3b-4stage --microbatches 32
      envplan advise --schedule gpipe --best 5 --json
    """
    if job.dag is not None:
        raise InputError("advise compares schedules; leave --dag out")
    own = job if job.schedule == "envpipe" else replace(job, activation_slots=None)
    frontier = own.trace()
    with ui.Working("schedules") as work:
        rows = envplan.advise(
            frontier, activation_slots=job.activation_slots, best=best, progress=work.counted
        )
    ui.answer(
        lambda: {
            "schema": "envplan/advice/v1",
            "profile": rows[0].frontier.profile.name,
            "source": frontier.profile.metadata.source,
            "t_min_s": frontier.min_time,
            "schedules": [advice_document(row) for row in rows],
        },
        lambda: _print(frontier, rows),
        then=_then(rows, job),
    )


def _print(frontier: envplan.Frontier, rows: Sequence[Advice]) -> None:
    ui.say(
        ui.describe_job(frontier),
        f"the job's plan without slowdown takes {ui.significant(frontier.min_time)} s; the same "
        "batch on the same GPUs:",
    )
    headers = ("schedule", "stages x chunks", "microbatches", "replicas", "model on a GPU")
    for title, header, ranked_by in (
        ("Energy at equal time", "saved (%)", "saved_percent"),
        ("Time at equal energy", "faster (%)", "faster_percent"),
    ):
        percent = attrgetter(ranked_by)  # without a value a schedule is not ranked by it
        known = [row for row in rows if percent(row) is not None]
        known.sort(key=percent, reverse=True)
        table = [[*_shape(row), percent(row)] for row in known]
        title = ui.titled(title, frontier.profile.metadata.source)
        ui.print_table(title, (*headers, header), table)
    ui.say(
        "saved: of the energy of the job's schedule at maximum frequency; memory is not looked at"
    )
    if energies := frontier.profile.metadata.energies_are:
        ui.say(f"the profile's energies are {energies}")
    derived = {words for row in rows for words in row.frontier.profile.adjustments.in_words()}
    for words in sorted(derived.difference(frontier.profile.adjustments.in_words())):
        ui.say(f"split backwards: {words}")


def _shape(row: Advice) -> list[Any]:
    """The first columns of a schedule."""
    pipeline = row.frontier.pipeline
    return [
        pipeline.schedule + (" (the job)" if row.is_job else ""),
        f"{pipeline.num_stages} x {pipeline.num_chunks}",
        pipeline.num_microbatches,
        row.frontier.replicas,
        f"x{row.model_share:g}",
    ]


def _then(rows: Sequence[Advice], job: JobOptions) -> list[str]:
    """The command that plans what saves most with as much of the model on a GPU as now."""
    best = next(row for row in rows if row.model_share == 1)  # ranked by energy
    name = best.frontier.pipeline.schedule
    slots = job.activation_slots if name == "envpipe" else None
    job = replace(job, schedule=job.schedule if best.is_job else name, activation_slots=slots)
    return ["envplan", "solve", *typed(job)]


def better_schedule(row: Advice) -> str:
    """How much faster a schedule is, or what it saves, than the job's: at the same of the other."""
    name = row.frontier.pipeline.schedule
    parts, assumed = [], row.frontier.profile.adjustments.backward_input_share is not None
    if row.faster_percent is not None and row.faster_percent >= 0.05:
        parts.append(f"{row.faster_percent:.1f}% faster at the same savings")
    if row.saved_percent is not None:
        parts.append(f"{row.saved_percent:.1f}% saved in the same time")
    what = " order" if name == "envpipe" else " (halves of backward assumed)" if assumed else ""
    return f"{name}{what}: {', or '.join(parts)}"


def advice_document(row: Advice) -> dict[str, Any]:
    """What JSON says of a schedule."""
    points = {"at_equal_time": row.at_equal_time, "at_equal_energy": row.at_equal_energy}
    return {
        **ui.picked(row, _ROW),
        "adjustments": row.frontier.profile.adjustments.model_dump(exclude_defaults=True),
        "saved_percent": row.saved_percent,
        "faster_percent": row.faster_percent,
        **{
            name: plan and ui.picked(plan, "iteration_time_s=iteration_time energy_j=energy")
            for name, plan in points.items()
        },
    }
