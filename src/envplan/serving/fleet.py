"""Fleets as policies want them: pools of alike instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envplan.serving.performance import Configuration


@dataclass(frozen=True)
class PoolSpec:
    """A pool as a policy wants it: alike instances.

    Attributes:
        home_class: the longest class that it is for.
        serves: classes that go to it.
        tp: GPUs of an instance.
        frequency_mhz: SM clock.
        num_instances: how many.
        dynamic_clock: the clock is where instances are without need; it goes up where prompts would
            be late, and comes down again.
        consolidates: one instance is filled after another, so that the last ones idle.
        part_of: name of the pool of unlike instances that these are a part of; "": a pool alone.
    """

    home_class: str
    serves: frozenset[str]
    tp: int
    frequency_mhz: int
    num_instances: int
    dynamic_clock: bool = False
    consolidates: bool = False
    part_of: str = ""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.tp * self.num_instances


@dataclass(frozen=True)
class Fleet:
    """All pools, by a name of their own; classes that no pool serves go to one that can.

    Attributes:
        pools: by name.
        gpus_wanted: GPUs that would be needed, where there are too few; otherwise 0.
    """

    pools: Mapping[str, PoolSpec] = field(default_factory=dict)
    gpus_wanted: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.gpus for pool in self.pools.values())

    @property
    def configurations(self) -> list[Configuration]:
        """TP and clock of the instances of each pool."""
        return [Configuration(pool.tp, pool.frequency_mhz) for pool in self.pools.values()]

    @property
    def routes(self) -> dict[str, str]:
        """The name of the pool that each class goes to."""
        return {
            request_class: name
            for name, pool in self.pools.items()
            for request_class in pool.serves
        }
