"""`--entry package.module:function`: the user's own stages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from envplan.errors import InputError
from envplan.profiling.explaining import explained
from envplan.profiling.sweep import Workload

__all__ = ["explained", "load_entry"]

_METHODS = ("forward", "backward", "wait", "synchronize")


def load_entry(entry: str, device: str) -> Workload:
    """What the user's function returns, as a workload.

    The function takes no arguments and returns a `Workload`, or one pair for each stage of a
    torch module and the tuple of its sample inputs. It is looked for in the current folder, too.

    Args:
        entry: module:function.
        device: where torch modules are moved to, such as "cuda:0".

    Raises:
        InputError: it does not import, is not there, fails, or returns something else.
    """
    module_name, colon, name = entry.partition(":")
    if not (module_name and colon and name):
        raise InputError(f"--entry {entry} must read package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    option = f"--entry {entry}:"
    with explained(f"{option} {module_name} does not import", ""):
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{option} {module_name} has no function {name}")
    with explained(
        f"{option} {name}() failed",
        f"{option} what {name}() makes does not fit in memory; make stages smaller or let it "
        "return them on the CPU, they are moved to the GPU one by one",
    ):
        made = function()
    if all(callable(getattr(made, method, None)) for method in _METHODS):
        return _Guarded(made, entry)
    try:
        stages = [partial(_pair, module, tuple(inputs)) for module, inputs in made]
    except (TypeError, ValueError):
        stages = []
    if not stages:
        raise InputError(
            f"{option} must return a pair of a module and its sample inputs for each stage, not "
            f"{type(made).__name__}"
        )
    from envplan.profiling.torch_workloads import TorchWorkload

    return TorchWorkload(stages, description=entry, device=device)


def _pair(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    return module, inputs


class _Guarded:
    """A user's own workload whose failures are said in a line, and which has a description."""

    def __init__(self, workload: Any, entry: str) -> None:
        self._workload = workload
        self.description = str(getattr(workload, "description", entry))
        count = getattr(workload, "num_stages", None)
        if not isinstance(count, int) or count < 1:
            raise InputError(
                f"--entry {entry}: num_stages of what it returns must be a whole number from 1 up, "
                f"not {count!r}"
            )

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._workload, name)
        return partial(_guarded, name, found) if callable(found) else found


def _guarded(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    where = f"{name}({', '.join(map(str, arguments))}) of the workload"
    with explained(
        f"{where} fails",
        f"{where} does not fit in the GPU's memory; choose more stages or a smaller microbatch",
    ):
        return method(*arguments)
