"""Alike instances: what fleets that never change are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envplan.serving.classes import RequestClasses
from envplan.serving.fleet import PoolSpec
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

    def pool(self, classes: RequestClasses, part_of: str = "") -> PoolSpec:
        """The pool, for everything, that they make.

        Args:
            classes: all that come.
            part_of: name of the pool of unlike instances that these are a part of.
        """
        return PoolSpec(
            home_class=classes.lowest_host(classes),
            serves=frozenset(classes),
            tp=self.configuration.tp,
            frequency_mhz=self.configuration.frequency_mhz,
            num_instances=self.count,
            part_of=part_of,
        )

    def more(self, count: int) -> Instances:
        """The same, so many more."""
        return replace(self, count=self.count + count)

    def __str__(self) -> str:
        return f"{self.count}xTP{self.configuration.tp}@{self.configuration.frequency_mhz}"
