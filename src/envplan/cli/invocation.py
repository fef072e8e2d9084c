"""One call of the command line: the command, how it answers, the files that it reads and writes.

`app` makes an Invocation before it looks at any option. Whatever prints or writes during the call
finds it by `invocation()`.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from envplan._io.files import check_writable, same_file
from envplan.errors import EnvplanError, InputError

#: From an interruption that got lost until the next one.
_AGAIN_S: Final = 0.05


@dataclass
class Invocation:
    """One call of the command line.

    Attributes:
        command: its name in schemas of documents, such as "solve" or "schedule-list".
        json: whether the answer, errors included, is a JSON document on stdout.
        quiet: whether nothing but errors is printed.
        color: whether to print in colours; None where the terminal decides.
        warnings: about what is probably not meant, each once, in order; printed in the end.
        interrupted: whether Ctrl-C or SIGTERM has come, and has not ended anything yet.
    """

    command: str = ""
    json: bool = False
    quiet: bool = False
    color: bool | None = None
    warnings: dict[str, None] = field(default_factory=dict)
    interrupted: bool = False
    _signal: int = signal.SIGINT
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
        usual_handler = signal.getsignal(signal.SIGINT)
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        handles_ctrl_c = is_in_main_thread and usual_handler is signal.default_int_handler
        if handles_ctrl_c:
            signal.signal(signal.SIGINT, self.interrupt)
        try:
            with self._interrupting_again() if is_in_main_thread else nullcontext():
                yield
        finally:
            if handles_ctrl_c:
                signal.signal(signal.SIGINT, usual_handler)
            _RUNNING.reset(token)

    def interrupt(self, number: int = signal.SIGINT, *_: object) -> None:
        """Note an interruption and raise it, as the handler of SIGINT or SIGTERM.

        Args:
            number: of the signal.

        Raises:
            KeyboardInterrupt: always.
        """
        self.interrupted = True
        self._signal = number
        raise KeyboardInterrupt

    @contextmanager
    def _interrupting_again(self) -> Iterator[None]:
        """Interrupt again shortly after Python could not propagate a KeyboardInterrupt.

        It cannot in the callback of a weak reference, of which matplotlib has many.
        """
        usual_hook, main_thread = sys.unraisablehook, threading.get_ident()
        is_over = False

        def interrupt_again() -> None:
            time.sleep(_AGAIN_S)
            if not is_over:
                signal.pthread_kill(main_thread, self._signal)

        def report(lost: sys.UnraisableHookArgs) -> None:
            if issubclass(lost.exc_type, KeyboardInterrupt):
                # threading.Thread takes locks, which whoever was interrupted may hold.
                _thread.start_new_thread(interrupt_again, ())
            else:
                usual_hook(lost)

        sys.unraisablehook = report
        try:
            yield
        finally:
            is_over = True
            sys.unraisablehook = usual_hook

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in place of an error that a library made of one.

        Raises:
            KeyboardInterrupt: an error after an interruption that is neither ours nor the system's.
        """
        try:
            yield
        except (EnvplanError, OSError):
            raise
        except Exception as error:
            if self.interrupted:
                raise KeyboardInterrupt from error
            raise

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Let an interruption be the usual end of something."""
        with suppress(KeyboardInterrupt), self.interruptible():
            yield
        self.interrupted = False

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


_RUNNING: Final[ContextVar[Invocation]] = ContextVar("invocation")


def invocation() -> Invocation:
    """The invocation that runs; a plain one outside the command line."""
    return _RUNNING.get(None) or Invocation()
