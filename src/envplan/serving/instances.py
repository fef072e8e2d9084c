"""Alike instances: what fleets that never change are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envplan.serving.performance import Configuration


@dataclass(frozen=True)
class Instances:
    """Alike instances.

    Attributes:
        configuration: of each.
        count: how many.
    """

    configuration: Configuration
    count: int

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.configuration.tp * self.count

    def more(self, count: int) -> Instances:
        """The same, so many more."""
        return replace(self, count=self.count + count)

    def __str__(self) -> str:
        return f"{self.count}xTP{self.configuration.tp}@{self.configuration.frequency_mhz}"
