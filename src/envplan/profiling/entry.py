"""`--entry package.module:function`: the user's own stages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from envplan.errors import InputError
from envplan.profiling.explaining import explained
from envplan.profiling.sweep import Workload

__all__ = ["load_entry"]

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
    with explained(f"{option} {module_name} does not import"):
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{option} {module_name} has no function {name}")
    with explained(
        f"{option} {name}() failed",
        f"{option} what {name}() makes does not fit in memory; make stages smaller or let it "
        "return them on the CPU, they are moved to the GPU one by one",
    ):
        made: Any = function()
        if all(callable(getattr(made, method, None)) for method in _METHODS):
            if not hasattr(made, "description"):
                made.description = entry
            count = getattr(made, "num_stages", None)
            if isinstance(count, int) and count > 0:
                workload: Workload = made
                return workload
            raise InputError(
                f"{option} num_stages of what it returns must be a whole number from 1 up, not "
                f"{count!r}"
            )
        if isinstance(made, Iterator):  # a generator runs the user's code only now
            made = list(made)
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
