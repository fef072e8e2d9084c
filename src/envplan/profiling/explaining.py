"""Errors of a user's own code, said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
