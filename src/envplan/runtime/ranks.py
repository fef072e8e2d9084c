"""Numbers that a launcher such as torchrun gives each process of a job."""

from __future__ import annotations

import os

from envplan.errors import InputError

__all__ = ["number_or_environment"]


def number_or_environment(number: int | None, variable: str) -> int:
    """A number, or if it is None that of an environment variable.

    Args:
        number: as the caller has it.
        variable: such as "RANK".

    Raises:
        InputError: neither is there.
    """
    if number is not None:
        return number
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise InputError(
            f"${variable} is not set; start training with torchrun, which sets it, or give "
            f"{variable.lower()}="
        )
    return int(text)
