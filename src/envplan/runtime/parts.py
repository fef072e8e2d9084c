"""Parts of operations, told at the boundaries of modules: for any framework whose model is torch's.

    from envplan.runtime.parts import hook_parts

    with follow("run.freqplan.json", schedule) as shim, hook_parts(shim, model):
        ...

A part is a module, by the name that `named_modules` gives it. It begins as its forward does and, in
a backward, as the gradients of its outputs are there; it lasts until the next one begins. What no
hook separates belongs to the part before it, or to the operation's first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from envplan.errors import InputError
from envplan.runtime.observer import OperationObserver

if TYPE_CHECKING:
    from torch import nn

    #: A module with its name.
    _NamedModule = tuple[str, nn.Module]

__all__ = ["hook_parts"]


@contextmanager
def hook_parts(
    observer: OperationObserver, model: nn.Module | Sequence[nn.Module]
) -> Iterator[None]:
    """Tell a shim or a profiler as modules begin, while the context lasts.

    Args:
        observer: that is told.
        model: this rank's part of the model; several where it has several chunks.

    Raises:
        InputError: a part that the observer names is no module of any of them.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    modules = list(chain.from_iterable(map(_named_modules, chunks)))
    parts = _modules_of_parts(modules, observer.part_names)

    def tells_of(name: str, *, backward: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            observer.part(name, backward=backward)

        return hook

    with ExitStack() as handles:
        for name, module in parts:
            forward = module.register_forward_pre_hook(tells_of(name, backward=False))
            handles.callback(forward.remove)
            backward = module.register_full_backward_pre_hook(tells_of(name, backward=True))
            handles.callback(backward.remove)
        yield


def _modules_of_parts(
    modules: Sequence[_NamedModule], part_names: frozenset[str]
) -> list[_NamedModule]:
    """The modules that are parts of operations.

    Args:
        modules: of all chunks.
        part_names: see OperationObserver.

    Raises:
        InputError: a name is that of no module.
    """
    numbers: set[int] = set()
    for part in sorted(part_names):
        pattern = re.compile(re.escape(part).replace(r"\*", "[^.]*"))
        matching = [number for number, (name, _) in enumerate(modules) if pattern.fullmatch(name)]
        if not matching:
            names = ", ".join(name for name, _ in modules[:8])
            raise InputError(
                f"the model has no module {part}, which is to be a part of operations; "
                f"there are: {names}, ..."
            )
        numbers.update(matching)
    return [modules[number] for number in sorted(numbers)]


def _named_modules(chunk: nn.Module) -> list[_NamedModule]:
    """Modules by name, without what wrappers such as DistributedDataParallel put before it.

    A wrapper has one module, "module", which holds all others. There may be several around a model.
    """
    named = [(name, module) for name, module in chunk.named_modules() if name]
    while named and all(_is_within_wrapper(name) for name, _ in named):
        inner = [(name, module) for name, module in named if name != "module"]
        named = [(name.removeprefix("module."), module) for name, module in inner]
    return named


def _is_within_wrapper(name: str) -> bool:
    return name == "module" or name.startswith("module.")
