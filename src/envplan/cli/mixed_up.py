"""Files given to the wrong command: what such a file is, and which command takes it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from envplan.errors import EnvplanError, InputError

__all__ = ["mixed_up_or_none"]


class _Taken(NamedTuple):
    """The kinds of files that a command's argument may be, as `check` calls them, and in words."""

    kinds: frozenset[str]
    words: str


_PROFILE: Final = _Taken(frozenset({"profile"}), "a profile")
# A frequency plan is told of by the reader of plans itself.
_PLAN: Final = _Taken(frozenset({"plan", "frequency plan"}), "a plan")
_TAKEN: Final[dict[str, _Taken]] = {
    "solve": _PROFILE,
    "frontier": _PROFILE,
    "compare": _PROFILE,
    "smooth": _PROFILE,
    "advise": _PROFILE,
    "savings": _PROFILE,
    "apply": _PLAN,
    "simulate": _PLAN,
    "timeline": _PLAN,
    "report": _PLAN,
    "preflight": _Taken(frozenset({"frequency plan"}), "a frequency plan"),
    "schedule": _Taken(frozenset({"DAG", "Chrome trace", "schedule"}), "a schedule"),
    "refine": _Taken(_PLAN.kinds | {"run log"}, "a plan and a run log"),
    "sweep": _Taken(frozenset({"sweep configuration"}), "a sweep's configuration"),
    "site": _Taken(frozenset({"jobs of a site"}), "a TOML file of jobs or a folder"),
}
#: The command that a file of a kind usually goes to.
_USUAL_COMMAND: Final = {
    "plan": "apply",
    "frequency plan": "check",
    "profile": "solve",
    "site plan": "check",
    "order": "check",
    "sweep configuration": "sweep",
    "jobs of a site": "site",
    "serving profile": "serving solve",
    "list of request classes": "serving solve --classes",
    "serving plan": "serving apply",
}
#: Options without a value, after which an argument may stand.
_FLAGS: Final = frozenset({"--json", "--quiet", "-q", "--force"})


def mixed_up_or_none(error: EnvplanError, words: Sequence[str]) -> str | None:
    """What to say where a command fails because its argument is a file for another one.

    Args:
        error: that the command has failed with.
        words: of the command line.

    Returns:
        A line; None where the argument is of the right kind, or of none that is known.
    """
    if not isinstance(error, InputError) or error.path is None or not words:
        return None
    command, path = words[0], error.path
    taken = _TAKEN.get(command)
    if taken is None or not _is_argument(path, words):
        return None
    from envplan.check.files import kind_of_file

    kind = kind_of_file(Path(path))
    if kind is None or kind in taken.kinds:
        return None
    message = f"{path}: is a {kind}; {command} takes {taken.words}"
    usual_command = _USUAL_COMMAND.get(kind)
    if usual_command is not None:
        message += f": did you mean envplan {usual_command} {shlex.quote(path)}?"
    return message


def _is_argument(path: str, words: Sequence[str]) -> bool:
    """Whether a path stands for itself, and nowhere after an option."""
    is_argument = False
    for before, word in pairwise(words):
        if word == path:
            if before.startswith("-") and before not in _FLAGS:
                return False
            is_argument = True
    return is_argument
