"""How far long work is, told on stderr: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from envplan.cli.invocation import invocation
from envplan.units import duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_LOG_PERIOD_S: Final = 60.0
#: Work that ends sooner shows no bar.
_BAR_DELAY_S: Final = 1.0
_BAR_WIDTH: Final = 16
_REFRESHES_PER_S: Final = 4


class Progress:
    """Where some work stands. Its methods only note numbers, so that they may be called often.

    Args:
        task: what is done.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._current_step = task
        self._begin_s = time.monotonic()
        self._first_part = 0.0  # what an earlier run has done
        self._first_ns = 0  # where a walk along a frontier began; 0 before it did
        self.part: float | None = None

    def reach(self, part: float, task: str) -> None:
        """Note how much is done, from 0 to 1, and what is being done."""
        if self.part is None:
            self._first_part = part
        self.part = part
        self._current_step = task

    def frontier_step(self, now_ns: int, min_ns: int) -> None:
        """Note how far a walk along a frontier is: it goes down to `min_ns`."""
        self._first_ns = self._first_ns or now_ns
        part = (self._first_ns - now_ns) / max(1, self._first_ns - min_ns)
        self.reach(part, self._task)

    def items(self, done: int, count: int, failed: int = 0) -> None:
        """Note how many of some things are done."""
        failures = f", {failed} failed" if failed else ""
        self.reach(done / max(1, count), f"{done} of {count} {self._task}{failures}")

    def describe(self) -> str:
        """The task, how much of it is done, for how long, and how long it will still take."""
        elapsed_s = time.monotonic() - self._begin_s
        elapsed = duration_text(round(elapsed_s))
        part = self.part
        if part is None:
            return f"{self._task}: {elapsed} so far"
        line = f"{self._current_step}: {part:.1%} done after {elapsed}"
        done_here = part - self._first_part
        if done_here > 0:
            left_s = elapsed_s * (1 - part) / done_here
            line += f", about {duration_text(round(left_s))} left"
        return line


@contextmanager
def progress(task: str) -> Iterator[Progress]:
    """Tell how far work is while the context lasts; nothing with --quiet.

    Args:
        task: what is done.
    """
    work = Progress(task)
    if invocation().quiet:
        yield work
        return
    with _Bar(work) if sys.stderr.isatty() else _Log(work):
        yield work


class _Log(AbstractContextManager[None]):
    """A line a minute."""

    def __init__(self, work: Progress) -> None:
        self._work = work
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOG_PERIOD_S):
            with suppress(OSError):  # nobody reads it
                print(self._work.describe(), file=sys.stderr, flush=True)


class _Bar(AbstractContextManager[None]):
    """A bar that vanishes in the end."""

    def __init__(self, work: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        self._work = work
        self._live = Live(
            console=Console(
                stderr=True, color_system=None if invocation().color is False else "auto"
            ),
            get_renderable=self._renderable,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
        )
        self._delay = threading.Timer(_BAR_DELAY_S, self._show)
        self._delay.daemon = True

    def __enter__(self) -> None:
        self._delay.start()

    def __exit__(self, *_: object) -> None:
        self._delay.cancel()
        self._delay.join()
        with suppress(OSError):
            self._live.stop()

    def _show(self) -> None:
        with suppress(OSError):  # nobody sees it
            self._live.start()

    def _renderable(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        part = self._work.part
        bar = ProgressBar(total=1.0, completed=part or 0.0, pulse=part is None, width=_BAR_WIDTH)
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True, width=_BAR_WIDTH)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(bar, self._work.describe())
        return line
