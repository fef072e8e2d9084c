"""Logs of envplan's packages, on stderr: `envplan -v`, or the environment variable ENVPLAN_LOG."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from envplan.cli.types import either
from envplan.errors import InputError

_VARIABLE: Final = "ENVPLAN_LOG"
_LEVELS: Final = ("debug", "info", "warning", "error")


def log_level(*, verbose: bool) -> str | None:
    """The least level that is shown: what ENVPLAN_LOG says, else info with -v; None: no log.

    Raises:
        InputError: ENVPLAN_LOG is no level.
    """
    level = os.environ.get(_VARIABLE, "").lower()
    if not level:
        return "info" if verbose else None
    if level not in _LEVELS:
        raise InputError(f"{_VARIABLE} must be {either(_LEVELS)}, not {level}")
    return level


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Show what the loggers of envplan say while the context lasts."""
    import logging

    logger = logging.getLogger("envplan")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
