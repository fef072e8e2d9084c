"""Remarks for users about a frequency plan, in sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan._io.words import counted, exact_seconds
from envplan.clocks import parse_clock_requests
from envplan.enforce.formats import ZEUS, Format

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan, StageClocks
    from envplan.plan import Plan

__all__ = ["remarks"]

_MAX_LISTED_CLOCKS: Final = 8


def remarks(
    plan: Plan, applied: FrequencyPlan, format_: Format, file: Path, *, forced: bool
) -> list[str]:
    """The remarks about a frequency plan, a sentence each.

    Args:
        plan: that was applied.
        applied: the frequency plan made of it.
        format_: that the frequency plan is written in.
        file: its name.
        forced: the profile has changed since the plan was made.
    """
    gpus = [applied.clocks_of(stage) for stage in range(applied.layout.stages)]
    notes = list(dict.fromkeys(map(_source_note, gpus)))
    if forced:
        notes.append(
            "the profile HAS CHANGED since the plan was made; times and energies are those of now"
        )
    if applied.iteration_time_s > applied.deadline_s:
        notes.append(
            f"the iteration takes longer than the plan's deadline, "
            f"{exact_seconds(applied.deadline_s)} s: plan again"
        )
    notes += _raised_notes(applied)
    notes += _ladder_notes(applied, format_)
    notes += _config_notes(plan, format_)
    if format_ is ZEUS:
        notes.append("a list for every stage: have Zeus's server read it as a PointSolution3D")
        if file.suffix != ".py":
            notes.append("Zeus's server reads only files that end in .py")
    return notes


def _ladder_notes(applied: FrequencyPlan, format_: Format) -> list[str]:
    if applied.ladder is None:
        return []
    if format_.has_ladder:
        return [f"{counted(len(applied.ladder), 'slower plan')} in the ladder for stragglers"]
    return [f"the plan's ladder is left out: {format_.name} has no place for it"]


def _config_notes(plan: Plan, format_: Format) -> list[str]:
    notes = []
    configs = {operation.config for stage in plan.stages for operation in stage} - {""}
    configs_by_part = {config for config in configs if parse_clock_requests(config)}
    if configs_by_part:
        notes.append("parts of operations have clocks of their own, which hook_parts asks for")
    if configs - configs_by_part:
        if format_.has_configs:
            note = "every operation's config is in the frequency plan, for the training code to set"
        else:
            note = f"the plan's configs are left out: {format_.name} has no place for them"
        notes.append(note)
    return notes


def _source_note(clocks: StageClocks) -> str:
    if not clocks.supported_clocks_mhz:
        return "no operation of this profile has a clock to set"
    low, high = clocks.supported_clocks_mhz[0], clocks.supported_clocks_mhz[-1]
    span = f"{len(clocks.supported_clocks_mhz)} clocks from {low} to {high} MHz"
    gpu = clocks.gpu or "the GPU, which nobody named,"
    notes = {
        "modelled": f"checked against the {span} of {gpu}",
        "given": f"checked against the {span} given",
        "nvml": f"checked against the {span} that {gpu} supports here",
        "profile": f"the clocks of {gpu} are not known; checked against the profile's own {span} "
        "only: --backend nvml asks the GPU, --gpu or --clocks say more",
    }
    return notes[clocks.clocks_source]


def _raised_notes(applied: FrequencyPlan) -> list[str]:
    notes = [
        f"stage {raised.stage} {raised.instruction}: {raised.planned_mhz} MHz is not supported; "
        f"{raised.applied_mhz} MHz instead, for {raised.operations} of its operations"
        for raised in applied.raised
    ]
    if len(notes) > _MAX_LISTED_CLOCKS:
        num_unlisted = len(notes) - _MAX_LISTED_CLOCKS
        notes = notes[:_MAX_LISTED_CLOCKS]
        notes.append(f"{num_unlisted} more clocks are not supported; --json lists them")
    if not all(raised.profiled for raised in applied.raised):
        notes.append("clocks that the profile does not have count with time and energy as planned")
    return notes
