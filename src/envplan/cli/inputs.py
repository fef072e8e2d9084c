"""The files that commands read and write, checked before they do any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from envplan._files import check_writable, same_file
from envplan.cli import state
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.profile import Profile
    from envplan.serving.profile import ServingProfile


def will_write(*outputs: Path) -> None:
    """Refuse outputs that cannot or must not be written, before any work is done for them.

    Those that options name are checked before a command begins. `answer` lists all.

    Raises:
        InputError: one cannot be written, is an input, or is named twice.
    """
    for output in outputs:
        _refuse_replacing(state.inputs, output)
        check_writable(output)
        known = [path.resolve() for path in state.outputs]
        if output.resolve() in known and not output.is_char_device():
            raise InputError("is named for two outputs; choose another file", path=output)
        state.outputs.append(output)


def refuse_overwriting(profile: Profile | ServingProfile) -> None:
    """Keep a slip of the hand from replacing the profile by what is made from it.

    Raises:
        InputError: an output is the profile's own file or its sidecar.
    """
    for output in state.outputs:
        files = (("the profile", profile.path), ("the profile's sidecar", profile.sidecar))
        _refuse_replacing(files, output)


def _refuse_replacing(inputs: Iterable[tuple[str | None, str | Path | None]], output: Path) -> None:
    for what, file in inputs:
        if file is not None and same_file(file, output):
            raise InputError(f"is {what} itself; choose another output file", path=output)
