"""One call of the command line: the command, how it answers, the files that it reads and writes.

`app` makes an Invocation before it looks at any option. Whatever prints or writes during the call
finds it by `invocation()`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from envplan._io.files import check_writable, same_file
from envplan.errors import EnvplanError, InputError


@dataclass
class Invocation:
    """One call of the command line.

    Attributes:
        command: its name in schemas of documents, such as "solve" or "schedule-list".
        json: whether the answer, errors included, is a JSON document on stdout.
        quiet: whether nothing but errors is printed.
        color: whether to print in colours; None where the terminal decides.
        warnings: about what is probably not meant, each once, in order; printed in the end.
        interrupted: whether Ctrl-C has come. What runs until then asks it each time around, because
            libraries lose a KeyboardInterrupt that comes while they clean up, as matplotlib does.
    """

    command: str = ""
    json: bool = False
    quiet: bool = False
    color: bool | None = None
    warnings: dict[str, None] = field(default_factory=dict)
    interrupted: bool = False
    _inputs: list[str | Path] = field(default_factory=list)
    _outputs: list[Path] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files that the command writes."""
        return tuple(self._outputs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the invocation that runs, and that Ctrl-C interrupts."""
        token = _RUNNING.set(self)
        usual_handler, usual_hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
        handles_ctrl_c = usual_handler is signal.default_int_handler and (
            threading.current_thread() is threading.main_thread()
        )
        if handles_ctrl_c:
            signal.signal(signal.SIGINT, self.interrupt)
            sys.unraisablehook = partial(_report_unless_interruption, usual_hook)
        try:
            yield
        finally:
            if handles_ctrl_c:
                sys.unraisablehook = usual_hook
                signal.signal(signal.SIGINT, usual_handler)
            _RUNNING.reset(token)

    def interrupt(self, *_: object) -> None:
        """Do what Ctrl-C does, as the handler of a signal.

        Raises:
            KeyboardInterrupt: always.
        """
        self.interrupted = True
        raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have an interruption end in KeyboardInterrupt, not in what a library makes of it.

        Raises:
            KeyboardInterrupt: Ctrl-C has come, and an error that is not ours after it.
        """
        try:
            yield
        except EnvplanError:
            raise
        except Exception as error:
            if self.interrupted:
                raise KeyboardInterrupt from error
            raise

    def will_read(self, *inputs: str | Path | None) -> None:
        """Note input files: no output may replace one by what is made from it.

        Args:
            inputs: files that are read; None for one that there is not.

        Raises:
            InputError: an output is one of these.
        """
        self._inputs += [path for path in inputs if path is not None]
        self._refuse_overwriting()

    def will_write(self, *outputs: Path) -> None:
        """Note output files, before any work is done for them.

        Those that options name are noted before a command begins.

        Raises:
            InputError: one cannot be written, is an input, or is named twice.
        """
        for output in outputs:
            check_writable(output)
            named = {path.resolve() for path in self._outputs}
            if output.resolve() in named and not output.is_char_device():
                raise InputError("is named for two outputs; choose another file", path=output)
            self._outputs.append(output)
        self._refuse_overwriting()

    def will_not_write(self, output: Path) -> None:
        """Take back that a file is written."""
        self._outputs.remove(output)

    def _refuse_overwriting(self) -> None:
        for output in self._outputs:
            if any(same_file(path, output) for path in self._inputs):
                raise InputError("is an input itself; choose another output file", path=output)


def _report_unless_interruption(
    report: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs
) -> None:
    """Report an exception that nobody could catch; an interruption is remembered anyway."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        report(lost)


_RUNNING: Final[ContextVar[Invocation]] = ContextVar("invocation")


def invocation() -> Invocation:
    """The invocation that runs; a plain one outside the command line."""
    return _RUNNING.get(None) or Invocation()
