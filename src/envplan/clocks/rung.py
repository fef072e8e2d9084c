"""A rung of a plan's ladder."""

from __future__ import annotations

from envplan._io.documents import Index, Joules, Model, Seconds


class Rung(Model):
    """A further plan of the same job, for when a straggler makes everyone wait.

    Attributes:
        frequencies_mhz: MHz of each stage's operations in execution order.
        configs: likewise; absent where no operation has one.
    """

    iteration_time_s: Seconds
    energy_j: Joules
    frequencies_mhz: list[list[Index]]
    configs: list[list[str]] | None = None

    def configs_of(self, stage: int) -> list[str] | None:
        """The configs of one stage's operations; None where no operation has one."""
        return None if self.configs is None else self.configs[stage]
