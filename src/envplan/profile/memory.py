"""Memory that a schedule takes on each rank: what the model takes, and activations in flight.

A forward leaves activations that its backward takes away; where the backward is split, they stay
until the gradients of the weights are made. What a microbatch leaves on each stage of the profile,
and what weights, gradients and optimizer take there, is in the sidecar of modelled profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from envplan.pipeline import Operation, Pipeline

if TYPE_CHECKING:
    from envplan.profile.model import Profile

__all__ = ["RankMemory", "memory_by_rank"]

_FORWARD: Final = "forward"
_LAST_USES: Final = ("backward", "backward_weight")


@dataclass(frozen=True)
class RankMemory:
    """Memory of a GPU of a rank, bytes.

    Attributes:
        model_bytes: weights, gradients and optimizer.
        activation_bytes: activations of all microbatches in flight, where they are most.
        microbatches_in_flight: forwards without their backwards, where they are most.
    """

    model_bytes: float
    activation_bytes: float
    microbatches_in_flight: int

    @property
    def total_gb(self) -> float:
        """Both together, GB."""
        return (self.model_bytes + self.activation_bytes) / 1e9


def memory_by_rank(pipeline: Pipeline, profile: Profile) -> list[RankMemory] | None:
    """The memory of each rank of a pipeline; None where the profile's sidecar does not say.

    Takes time linear in the number of operations.
    """
    footprint = profile.metadata.footprint
    if footprint is None or len(footprint.model_bytes) != pipeline.num_profile_stages:
        return None
    return [
        _rank_memory(
            pipeline.operations[begin:end], footprint.model_bytes, footprint.activation_bytes
        )
        for begin, end in pairwise(pipeline.stage_begin.tolist())
    ]


def _rank_memory(
    operations: Sequence[Operation],
    model_bytes: Sequence[float],
    activation_bytes: Sequence[float],
) -> RankMemory:
    """The memory of a rank that runs these operations, in order."""
    held_bytes = most_bytes = 0.0
    in_flight = most_in_flight = 0
    for operation in operations:
        saved_bytes = activation_bytes[operation.profile_stage]
        if operation.instruction == _FORWARD:
            held_bytes += saved_bytes
            in_flight += 1
        elif operation.instruction in _LAST_USES:
            held_bytes -= saved_bytes
            in_flight -= 1
        most_bytes = max(most_bytes, held_bytes)
        most_in_flight = max(most_in_flight, in_flight)
    stages = {operation.profile_stage for operation in operations}
    return RankMemory(
        model_bytes=sum(model_bytes[stage] for stage in stages),
        activation_bytes=most_bytes,
        microbatches_in_flight=most_in_flight,
    )
