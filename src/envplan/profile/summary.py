"""A profile in a few facts, as lists of profiles show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

from pydantic import JsonValue

from envplan.profile.model import Profile
from envplan.profile.sidecar import ProfileMetadata


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """The job of a profile and the source of its figures; None where its sidecar does not say.

    Attributes:
        name: of the profile.
        stages: how many model stages it has.
        frequency_mhz: its lowest and highest clock, as in "210-1410"; None where it has no clocks.
        gpu: name of the GPU.
        source: "measured" or "modelled".
        time: how its times were found, the same.
        energy: how its energies were found: "measured", "identified" or "modelled".
        workload: what was run.
        instructions: of its operations.
        schedule: the schedule that it is usually run with.
        microbatches: of an iteration, usually.
        sha256: of the CSV.
    """

    name: str
    stages: int
    frequency_mhz: str | None
    gpu: str | None
    source: str | None
    time: str | None
    energy: str | None
    workload: str | None
    instructions: tuple[str, ...]
    schedule: str | None
    microbatches: int | None
    sha256: str

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """The summary of a profile."""
        clocks, metadata = profile.clocks_mhz, profile.metadata
        return cls(
            name=profile.name,
            stages=profile.num_stages,
            frequency_mhz=f"{clocks[0]}-{clocks[-1]}" if clocks else None,
            gpu=metadata.gpu,
            source=metadata.source,
            time=metadata.source,
            energy=_energy_source(metadata),
            workload=metadata.workload,
            instructions=tuple(profile.instructions),
            schedule=metadata.schedule,
            microbatches=metadata.num_microbatches,
            sha256=profile.sha256,
        )

    def to_dict(self) -> dict[str, JsonValue]:
        """The summary in JSON types."""
        return {**asdict(self), "instructions": list(self.instructions)}


def _energy_source(metadata: ProfileMetadata) -> str | None:
    """How the energies of operations were found.

    The sidecar of a measured profile says under `identified` what was not measured operation by
    operation, and how each was found; energies may be measured all the same.
    """
    identified = metadata.extra.get("identified")
    if not isinstance(identified, dict):
        return metadata.source
    energy = identified.get("energy", metadata.source)
    return metadata.source if energy == metadata.source else "identified"
