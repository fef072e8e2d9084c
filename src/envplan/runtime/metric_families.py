"""Metrics as Prometheus has them: families of values with labels, and their text format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["Families", "Family", "Sample", "prometheus_text"]


class Sample(NamedTuple):
    """A value of a metric.

    Attributes:
        labels: by name.
        value: the value.
    """

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Family:
    """A metric with its values.

    Attributes:
        name: in full, with "_total" where it is a counter.
        help: what it is, with its source.
        type: its type.
        samples: its values.
    """

    name: str
    help: str
    type: Literal["gauge", "counter"]
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float | None, **labels: object) -> None:
        """Add a value, unless it is not known."""
        if value is not None:
            self.samples.append(
                Sample({name: str(text) for name, text in labels.items()}, float(value))
            )


class Families(dict[str, Family]):
    """Families by name, each made when it is first named."""

    def gauge(self, name: str, text: str) -> Family:
        """The gauge of this name: what goes up and down."""
        return self.setdefault(name, Family(name, text, "gauge"))

    def counter(self, name: str, text: str) -> Family:
        """The counter of this name: what only grows."""
        return self.setdefault(name, Family(name, text, "counter"))


def prometheus_text(families: Iterable[Family]) -> str:
    """Families in Prometheus' text format."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help, quotes=False)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{_escaped(text, quotes=True)}"' for name, text in sample.labels.items()
            )
            lines.append(f"{family.name}{{{labels}}} {sample.value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quotes: bool) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
