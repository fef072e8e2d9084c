"""The clocks of a serving fleet with the plan and the profile that they were made from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envplan._io.documents import check_stated
from envplan.check.sources import file_with_sha256
from envplan.enforce.freqplan import StageClocks
from envplan.errors import InputError
from envplan.serving.apply import ServingApplied, apply_serving_plan
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile

__all__ = ["AppliedServingPlan"]

#: How far stated loads may lie from their recomputation, relatively.
_TOLERANCE: Final = 1e-9


@dataclass(frozen=True)
class AppliedServingPlan:
    """The clocks of a serving fleet with their plan and its profile.

    Attributes:
        applied: the clocks.
        plan: that they were made from.
        profile: of the plan.
        path: of the plan.
        force: go on though the profile has changed since.
    """

    applied: ServingApplied
    plan: ServingPlan
    profile: ServingProfile
    path: Path
    force: bool

    @classmethod
    def find(
        cls, applied: ServingApplied, file: Path, profile: str | None, *, force: bool
    ) -> AppliedServingPlan | None:
        """What serving clocks were made from; None where that is not beside their file.

        Args:
            applied: the clocks.
            file: that they are in.
            profile: path or name of the plan's profile, if that has moved.
            force: go on though the profile has changed since.
        """
        with suppress(InputError):
            path = file_with_sha256(applied.plan_sha256, file.parent)
            if path is not None:
                plan = ServingPlan.load(path)
                return cls(applied, plan, plan.find_profile(profile), path, force)
        return None

    @property
    def not_proved(self) -> tuple[str, ...]:
        """Names of the fields that users chose as they applied the plan."""
        named_by_user = ("instances[].clock_mhz",) if self._clocks_were_given else ()
        return ("gpus_per_node", *named_by_user)

    @property
    def _clocks_were_given(self) -> bool:
        """Whether a user named the GPUs' clocks; the file has only those that are used."""
        return self.applied.clocks_source == "given"

    def prove(self) -> list[str]:
        """Make the clocks anew: they come out the same.

        Raises:
            InputError: they do not.
        """
        stated = self.applied
        clocks = None
        if self._clocks_were_given:
            used_mhz = {instance.clock_mhz for instance in stated.instances}
            clocks = StageClocks(clocks_source="given", supported_clocks_mhz=sorted(used_mhz))
        again = apply_serving_plan(
            self.plan,
            self.profile,
            clocks=clocks,
            gpus_per_node=stated.gpus_per_node,
            force=self.force,
            plan_sha256=stated.plan_sha256,
        )
        for name in ServingApplied.model_fields:
            check_stated(name, getattr(stated, name), getattr(again, name), _TOLERANCE)
        return [f"they are what `envplan serving apply` makes of {self.path.name}, beside them"]
