"""TOML and YAML, which people write by hand: read within the same bounds as JSON."""

from __future__ import annotations

import re
import tomllib
from typing import Final

from envplan._io.files import (
    MOST_LEVELS,
    AnyPath,
    decoded,
    read_bounded,
    refuse_depth,
    refuse_much,
)
from envplan.errors import InputError

MAX_TOML_BYTES: Final = 2**20
MAX_YAML_BYTES: Final = 2**17

#: A key of so many names takes tomllib a time that grows with their square.
_DEEP_KEY: Final = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")


def read_toml(path: AnyPath) -> dict[str, object]:
    """The tables in a TOML file.

    Raises:
        InputError: the file cannot be read, is too large or is not TOML; says line and column.
    """
    text = decoded(read_bounded(path, MAX_TOML_BYTES), path)
    refuse_much(text, path, "TOML")
    if _DEEP_KEY.search(text):
        raise InputError("is not valid TOML: nested too deeply", path=path)
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise InputError("is not valid TOML: nested too deeply", path=path) from None
    except ValueError as error:
        raise InputError(f"is not valid TOML: {error}", path=path) from None
    refuse_depth(document, path, "TOML")
    return document


def parse_yaml(text: str, path: AnyPath) -> object:
    """The value in a text of YAML.

    Raises:
        InputError: it is not YAML, says the line; is too large; or PyYAML is not installed.
    """
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        problem = "is not JSON; YAML needs PyYAML: pip install 'envplan[yaml]'"
        raise InputError(problem, path=path) from None
    if len(text) > MAX_YAML_BYTES:
        problem = f"is larger than {MAX_YAML_BYTES // 2**10} KiB, the most that is read as YAML"
        raise InputError(problem, path=path)
    refuse_much(text, path, "YAML")
    if _depth(text) > MOST_LEVELS:
        raise InputError("is neither JSON nor YAML: nested too deeply", path=path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "cannot be parsed"
        line = mark and mark.line + 1
        problem = f"is neither JSON nor YAML: {reason}"
        raise InputError(problem, path=path, line=line) from None
    except RecursionError:
        raise InputError("is neither JSON nor YAML: nested too deeply", path=path) from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        # PyYAML makes numbers and dates of what looks like them, and lets their errors through.
        reason = " ".join(str(error).split())[:100]
        raise InputError(f"is neither JSON nor YAML: {reason}", path=path) from None


def _depth(text: str) -> int:
    """The most brackets that are open at once, as if none stood in a text or a comment.

    PyYAML would take a time that grows with the square of it.
    """
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
