"""`--entry package.module:function`: the user's own stages; `--slices`: work of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from envplan.errors import InputError
from envplan.profiling.explaining import explained
from envplan.profiling.stages import RunnableStages
from envplan.profiling.switch_latency import Slices

__all__ = ["load_entry", "load_slices"]

#: Methods of RunnableStages.
_METHODS = ("forward", "backward", "wait", "synchronize")


class _Entry(NamedTuple):
    """A function, as --entry or --slices name it.

    Attributes:
        module: that is imported.
        function: of the module.
        flag: the option that names it.
    """

    module: str
    function: str
    flag: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    @property
    def option(self) -> str:
        """How errors begin."""
        return f"{self.flag} {self}:"


def load_entry(entry: str, device: str) -> RunnableStages:
    """The stages that a user's function returns.

    The function takes no arguments and returns `RunnableStages`, or one pair for each stage of a
    torch module and the tuple of its sample inputs. It is looked for in the current folder, too.

    Args:
        entry: module:function.
        device: where torch modules are moved to, such as "cuda:0".

    Raises:
        InputError: it does not import, is not there, fails, or returns something else.
    """
    named = _parse_entry(entry, "--entry")
    function = _import_function(named)
    with explained(
        f"{named.option} {named.function}() failed",
        f"{named.option} what {named.function}() makes does not fit in memory; make stages smaller "
        "or let it return them on the CPU, they are moved to the GPU one by one",
    ):
        returned = function()
        if _has_all_methods(returned):
            return _checked_stages(returned, named)
        if isinstance(returned, Iterator):  # a generator runs the user's code only now
            returned = list(returned)
    return _torch_stages(returned, named, device)


def load_slices(entry: str) -> Slices:
    """The slices of work that a user's function returns; it takes no arguments.

    Args:
        entry: module:function, looked for in the current folder, too.

    Raises:
        InputError: it does not import, is not there, fails, or returns something else.
    """
    named = _parse_entry(entry, "--slices")
    function = _import_function(named)
    with explained(f"{named.option} {named.function}() failed"):
        returned = function()
    if not all(callable(getattr(returned, method, None)) for method in ("now", "run")):
        raise InputError(
            f"{named.option} must return an object with the methods now() and run(), not "
            f"{type(returned).__name__}"
        )
    slices: Slices = returned
    return slices


def _parse_entry(entry: str, flag: str) -> _Entry:
    module, colon, function = entry.partition(":")
    if not (module and colon and function):
        raise InputError(f"{flag} {entry} must read package.module:function")
    return _Entry(module, function, flag)


def _import_function(entry: _Entry) -> Callable[[], Any]:
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.insert(0, current_folder)
    with explained(f"{entry.option} {entry.module} does not import"):
        module = importlib.import_module(entry.module)
    function: Callable[[], Any] | None = getattr(module, entry.function, None)
    if not callable(function):
        raise InputError(f"{entry.option} {entry.module} has no function {entry.function}")
    return function


def _has_all_methods(returned: object) -> bool:
    return all(callable(getattr(returned, method, None)) for method in _METHODS)


def _checked_stages(stages: Any, entry: _Entry) -> RunnableStages:
    """Stages of the user's own type; they are described by the entry unless they say more."""
    if not hasattr(stages, "description"):
        stages.description = str(entry)
    num_stages = getattr(stages, "num_stages", None)
    if not isinstance(num_stages, int) or num_stages <= 0:
        raise InputError(
            f"{entry.option} num_stages of what it returns must be a whole number from 1 up, not "
            f"{num_stages!r}"
        )
    runnable: RunnableStages = stages
    return runnable


def _torch_stages(returned: Any, entry: _Entry, device: str) -> RunnableStages:
    """Stages of torch modules.

    Args:
        returned: should be a pair of a module and its sample inputs for each stage.
        entry: what returned it.
        device: where modules are moved to.
    """
    try:
        stages = [partial(_loaded_stage, module, tuple(inputs)) for module, inputs in returned]
    except (TypeError, ValueError):
        stages = []
    if not stages:
        raise InputError(
            f"{entry.option} must return a pair of a module and its sample inputs for each stage, "
            f"not {type(returned).__name__}"
        )
    from envplan.profiling.torch_stages import TorchStages

    return TorchStages(stages, description=str(entry), device=device)


def _loaded_stage(module: Any, inputs: tuple[object, ...]) -> tuple[Any, tuple[object, ...]]:
    """A stage as TorchStages wants it made; the user's function has made it already."""
    return module, inputs
