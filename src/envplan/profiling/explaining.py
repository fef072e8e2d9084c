"""Errors of a user's own code, said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envplan.errors import EnvplanError, InputError


@contextmanager
def explained(failed: str, too_large: str = "") -> Iterator[None]:
    """Turn whatever a user's code raises, SystemExit too, into an InputError.

    Args:
        failed: what to say, before the exception's own words.
        too_large: what to say if memory ran out; "": as for others.
    """
    try:
        yield
    except EnvplanError:
        raise
    except (Exception, SystemExit) as error:
        # torch's error is known by its name, because torch may not be there to import.
        ran_out_of_memory = (
            isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        )
        if ran_out_of_memory and too_large:
            raise InputError(too_large) from None
        words = " ".join(str(error).split())  # they may have many lines
        told = f"{type(error).__name__}: {words}" if words else type(error).__name__
        raise InputError(f"{failed}: {told}") from error
