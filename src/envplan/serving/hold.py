"""Holding the clocks of a fleet: a guard for each GPU of a node.

A guard sets the clock of its GPU, and gives it back whatever becomes of its owner
(devices/guard.py says how).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Final

from envplan.devices import DeviceError
from envplan.devices.guard import Guard
from envplan.devices.modelled import GPUS
from envplan.serving.apply import ServingApplied

_POLL_S: Final = 0.5
_DEFAULT_MODEL: Final = "h100-sxm"


@contextmanager
def hold_clocks(
    applied: ServingApplied,
    node: int,
    *,
    backend: str = "nvml",
    backend_options: Mapping[str, str | int] | None = None,
) -> Iterator[list[Guard]]:
    """Hold the clocks of a node's GPUs, a guard for each, until the context ends.

    The guards give the clocks back when it does, and when this process dies in any way.

    Args:
        applied: instances and clocks.
        node: number of this node.
        backend: "nvml" or "modelled".
        backend_options: such as which GPU is modelled, and how many there are.

    Raises:
        DeviceError: a GPU is not there, or its clock may not be set; none is left set.
        InputError: there is no such node.
    """
    clocks = applied.clocks_of(node)
    options: dict[str, Any] = dict(backend_options or {})
    guards: list[Guard] = []
    with ExitStack() as stack:
        for device, clock_mhz in sorted(clocks.items()):
            # Servers compute there, and most are in containers of their own.
            guard = stack.enter_context(Guard.start(backend, device, share=True, **options))
            guard.request(clock_mhz)
            guards.append(guard)
        yield guards
        problems = _problems_of(guards)
    problems += _problems_of(guards)  # of giving the clocks back
    if problems:
        raise DeviceError(problems[0])


def _problems_of(guards: Sequence[Guard]) -> list[str]:
    """The problems that guards have had since they were last asked."""
    return list(chain.from_iterable(guard.problems() for guard in guards))


def watch_guards(guards: Sequence[Guard], end_s: float, warn: Callable[[str], None]) -> None:
    """Wait while guards hold their clocks.

    Args:
        guards: as hold_clocks gives them.
        end_s: how long to wait, in s of the monotonic clock; may be infinite.
        warn: told of each problem meanwhile, in a line.

    Raises:
        DeviceError: a guard is gone, or a clock could not be set in the end either.
    """
    last_problem = ""
    while (remaining_s := end_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, remaining_s))
        for guard in guards:
            for problem in guard.problems():
                warn(problem)
                last_problem = problem
            if not guard.alive:
                raise DeviceError("a clock guard has ended; start holding again")
    if any(guard.failing for guard in guards):
        raise DeviceError(last_problem)


def modelled_model(gpu: str | None) -> str:
    """The modelled GPU that stands in for one of a name, such as "a40"; an H100 for all others."""
    for model in GPUS.values():
        if model.name == gpu:
            return model.key
    return _DEFAULT_MODEL
