"""Unlike replicas together, as `envplan solve` plans and `envplan simulate` replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import envplan
from envplan.cli import output as ui
from envplan.cli.costs import cost_rows
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.replicas import ReplicaPlans
    from envplan.simulation import Conditions


def parse_replica(text: str, option: str) -> tuple[str, int]:
    """What --replica-profile takes: a profile and how many replicas it is for.

    Raises:
        InputError: the count is not a number from 1 up.
    """
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, 1
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count)):
        raise InputError(
            f"{option} must be PROFILE or PROFILE:COUNT with a COUNT from 1 up, not {text}"
        )
    return name, int(count)


def print_replicas(planned: ReplicaPlans) -> None:
    """A table of all kinds of replicas, and what they take together."""
    plans, waits = planned.plans, planned.waiting_energies
    columns = {
        "profile": [plan.profile.name for plan in plans],
        "replicas": [plan.job.replicas for plan in plans],
        "time (s)": [plan.iteration_time for plan in plans],
        "energy (J)": [plan.energy for plan in plans],
        "waiting (J)": waits,
        "together (J)": [plan.energy + wait for plan, wait in zip(plans, waits, strict=True)],
    }
    ui.print_columns(ui.titled(ui.ITERATION, *(plan.profile.source for plan in plans)), columns)
    ui.say(
        f"all end at {ui.significant(planned.sync_time)} s and use "
        f"{ui.significant(planned.energy)} J, {planned.savings_percent:.2f}% less than "
        f"{ui.significant(planned.baseline_energy)} J in {ui.significant(planned.baseline_time)} s "
        "at maximum frequency"
    )
    if planned.gap is not None:
        ui.say(f"certified gap of all together {100 * planned.gap:.3f}%")
    if planned.costs is not None and planned.run is not None:
        what = "the run" if planned.run.iterations else "an iteration"
        for name, old, new in cost_rows(planned.costs, planned.run.currency, "g"):
            ui.say(f"{name} of {what}: {ui.significant(new)}, before {ui.significant(old)}")


def load_replicas(
    first: tuple[envplan.Plan, envplan.Profile],
    files: Sequence[Path],
    profiles: Sequence[tuple[str, int]],
    *,
    conditions: Conditions,
    run: Run | None,
    force: bool,
) -> ReplicaPlans:
    """The plans of further kinds of replicas, replayed together with the first.

    Args:
        files: plans that there are.
        profiles: and how many replicas have each; their plans are made here.
        conditions: what all replicas meet.
        run: whose costs are wanted.

    Raises:
        InputError: a plan or a profile is not found or does not hold.
    """
    from envplan.plan import find_profile
    from envplan.replicas import plan_beside

    replicas = [first]
    for name, count in profiles:
        other = envplan.Profile.open(name)
        replicas.append((plan_beside(first[0], other, count), other))
    for file in files:
        plan = envplan.Plan.load(file)
        replicas.append((plan, find_profile(plan.profile, file)))
    together = envplan.replay_replicas(replicas, conditions=conditions, force=force)
    return replace(together, run=run)
