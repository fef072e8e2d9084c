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
    patterns = []
    for part in sorted(observer.part_names):
        pattern = re.compile(re.escape(part).replace(r"\*", "[^.]*"))
        patterns.append(pattern)
        if not any(pattern.fullmatch(name) for name, _ in modules):
            raise InputError(
                f"the model has no module {part}, which is to be a part of operations; "
                f"there are: {', '.join(name for name, _ in modules[:8])}, ..."
            )

    def hook(name: str, backward: bool) -> Callable[..., None]:
        return lambda *_: observer.part(name, backward=backward)

    with ExitStack() as handles:
        for name, module in modules:
            if any(pattern.fullmatch(name) for pattern in patterns):
                forward = module.register_forward_pre_hook(hook(name, False))
                backward = module.register_full_backward_pre_hook(hook(name, True))
                handles.callback(forward.remove)
                handles.callback(backward.remove)
        yield


def _named_modules(chunk: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules by name, without what wrappers such as DistributedDataParallel put before it."""
    named = [(name, module) for name, module in chunk.named_modules() if name]
    while named and all(f"{name}.".startswith("module.") for name, _ in named):
        named = [
            (name.removeprefix("module."), module) for name, module in named if name != "module"
        ]
    return named
