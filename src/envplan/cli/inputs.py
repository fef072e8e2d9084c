"""The files that commands read and write, checked before they do any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import envplan
from envplan._files import check_writable, same_file
from envplan.errors import EnvplanError, InputError

if TYPE_CHECKING:
    from envplan.cli.options import PlanOptions

#: Files that are read, each after what it is, as in "the plan".
Inputs = Iterable[tuple[str, str | Path | None]]


def check_outputs(*outputs: Path | None, inputs: Inputs = ()) -> None:
    """Refuse outputs that cannot or must not be written, before any work is done for them.

    Args:
        inputs: what is read.

    Raises:
        InputError: one cannot be written, is an input, or is named twice.
    """
    _refuse_replacing(inputs, outputs)
    seen: set[Path] = set()
    for output in outputs:
        if output is None:
            continue
        check_writable(output)
        place = output.resolve()
        if place in seen and not output.is_char_device():
            raise InputError("is named for two outputs; choose another file", path=output)
        seen.add(place)


def refuse_overwriting(profile: envplan.Profile, *outputs: Path | None) -> None:
    """Keep a slip of the hand from replacing the profile by what is made from it.

    Raises:
        InputError: an output is the profile's own file or its sidecar.
    """
    read = [("the profile", profile.path), ("the profile's sidecar", profile.sidecar)]
    _refuse_replacing(read, outputs)


def _refuse_replacing(inputs: Inputs, outputs: Iterable[Path | None]) -> None:
    for what, file in inputs:
        for output in outputs:
            if file is not None and output is not None and same_file(file, output):
                raise InputError(f"is {what} itself; choose another output file", path=output)


def load_plan(
    given: PlanOptions, *outputs: Path | None, inputs: Inputs = ()
) -> tuple[envplan.Plan, envplan.Profile]:
    """A plan and the profile that it was made from.

    Args:
        outputs: files that a command is about to write.
        inputs: what else is read.

    Raises:
        InputError: one of the two cannot be read, or as for check_outputs.
    """
    from envplan.plan import as_referenced, find_profile

    check_outputs(*outputs, inputs=[("the plan", given.plan), *inputs])
    plan = envplan.Plan.load(given.plan)
    profile = (
        find_profile(plan.profile, given.plan)
        if given.profile is None
        else envplan.Profile.open(given.profile)
    )
    profile = as_referenced(plan.profile, profile)
    refuse_overwriting(profile, *outputs)
    return plan, profile


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors of input from within name this file, unless they name another."""
    try:
        yield
    except EnvplanError as error:
        if isinstance(error, InputError) and error.path is not None:
            raise
        raise InputError(str(error), path=file) from error
