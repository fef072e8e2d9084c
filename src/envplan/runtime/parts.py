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
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from envplan.errors import InputError
from envplan.runtime.listener import Listener

if TYPE_CHECKING:
    from torch import nn

__all__ = ["hook_parts"]


@contextmanager
def hook_parts(listener: Listener, model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Tell a shim or a profiler as modules begin, while the context lasts.

    Args:
        listener: who is told.
        model: this rank's part of the model; several where it has several chunks.

    Raises:
        InputError: a part that the listener names is no module of any of them.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    modules = [pair for chunk in chunks for pair in _named(chunk)]
    wanted = {name: _pattern(name) for name in sorted(listener.part_names)}
    for part, pattern in wanted.items():
        if not any(pattern.fullmatch(name) for name, _ in modules):
            raise InputError(
                f"the model has no module {part}, which is to be a part of operations; "
                f"there are: {', '.join(name for name, _ in modules[:8])}, ..."
            )
    handles = []
    try:
        for name, module in modules:
            if any(pattern.fullmatch(name) for pattern in wanted.values()):
                forward = _call(partial(listener.part, name, backward=False))
                backward = _call(partial(listener.part, name, backward=True))
                handles.append(module.register_forward_pre_hook(forward))
                handles.append(module.register_full_backward_pre_hook(backward))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named(chunk: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules by name, without what wrappers such as DistributedDataParallel put before it."""
    found = [(name, module) for name, module in chunk.named_modules() if name]
    while found and all(name == "module" or name.startswith("module.") for name, _ in found):
        found = [(name.removeprefix("module."), one) for name, one in found if name != "module"]
    return found


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", "[^.]*"))


def _call(tell: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        tell()

    return hook
