"""Names that a user sees when completing `plan.` or `frontier.`."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

#: Names that end so are exact integers of the core. Users have s, J and W beside them.
_INTEGER_UNITS = ("_ns", "_10fj", "_10uw")
_OF_PYDANTIC = frozenset(dir(BaseModel))


def names_for_users(names: Iterable[str], inner: Iterable[str] = ()) -> list[str]:
    """Names of an object without those of pydantic, of exact integers, and of the library itself.

    Args:
        names: all names of the object.
        inner: further names that only the library uses.
    """
    hidden = frozenset(inner) | _OF_PYDANTIC
    return [
        name
        for name in names
        if name.startswith("__") or not (name in hidden or name.endswith(_INTEGER_UNITS))
    ]
