"""What commands ask of numbers and files before they do any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from envplan._files import check_writable, same_file
from envplan.errors import EnvplanError, InputError

if TYPE_CHECKING:
    from envplan.profile import Profile


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
