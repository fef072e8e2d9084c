"""Markdown for the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Target(NamedTuple):
    """Something to be reached, and whether it was."""

    what: str
    limit: str
    measured: str
    met: bool


@dataclass
class Section:
    """The results of one section: its text, its raw numbers and its targets."""

    title: str
    raw: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    def target(self, what: str, limit: str, measured: str, met: bool) -> None:
        """Add a target and whether it was met."""
        self.targets.append(Target(what, limit, measured, met))

    @property
    def markdown(self) -> str:
        """The section as Markdown."""
        return "\n\n".join([self.title, *self.paragraphs])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def seconds(value: float) -> str:
    """A duration with three significant digits: 2.21 ms, 0.119 s, 415 s."""
    return f"{_three(1000 * value)} ms" if value < 0.1 else f"{_three(value)} s"


def ratio(value: float) -> str:
    """Three significant digits and thousands separators: 9,840x."""
    return f"{_three(value)}x"


def megabytes(count: float) -> str:
    """Bytes in MB."""
    return f"{count / 2**20:,.0f} MB"


def percent(fraction: float, digits: int = 3) -> str:
    """A fraction in percent."""
    return f"{100 * fraction:.{digits}f}%"


def _three(value: float) -> str:
    rounded = float(f"{value:.3g}")
    if rounded < 1:
        return f"{rounded:.3f}"
    return f"{rounded:,.{max(0, 3 - len(str(int(rounded))))}f}"
