"""Errors of a user's own code, said in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from envplan.errors import EnvplanError, InputError


@contextmanager
def explained(failed: str, too_large: str = "") -> Iterator[None]:
    """Whatever a user's code raises, SystemExit too, becomes an InputError.

    Args:
        failed: what to say, before the exception's own words.
        too_large: what to say if memory ran out; "": as for others.
    """
    try:
        yield
    except EnvplanError:
        raise
    except (Exception, SystemExit) as error:
        # As torch says it, without importing torch.
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if memory and too_large:
            raise InputError(too_large) from None
        said = f": {error}" if str(error) else ""
        raise InputError(f"{failed}: {type(error).__name__}{said}") from error


class Explained:
    """A workload whose failures are said in a line."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._workload, name)
        return partial(_call, name, found) if callable(found) else found


def _call(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    where = f"{name}({', '.join(map(str, arguments))}) of the workload"
    with explained(
        f"{where} fails",
        f"{where} does not fit in the GPU's memory; choose more stages or a smaller microbatch",
    ):
        return method(*arguments)
