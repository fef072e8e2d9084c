"""The files that a file was made from, where they lie beside it: with them, more of it is proved.

A frequency plan, and the clocks of a serving fleet, name their plan by its sha256 only. If a plan
with this content is in the same folder, and its profile is found, they are made from it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from envplan._io.documents import MAX_DOCUMENT_BYTES, check_stated
from envplan._io.files import is_file, read_bounded
from envplan.check.unproved import GPUS_AS_NAMED
from envplan.enforce.apply import apply_plan
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError
from envplan.plan import Plan, find_profile
from envplan.profile import Profile
from envplan.runtime.drift import replan
from envplan.units import FINER_UNITS_TOLERANCE

__all__ = ["AppliedPlan", "Sources", "file_with_sha256"]

#: How far stated numbers may lie from their recomputation, relatively.
_TOLERANCE: Final = 1e-9
#: So many files of a folder are looked at.
_MAX_FILES: Final = 256


class Sources(Protocol):
    """A file together with those that it was made from."""

    @property
    def not_proved(self) -> tuple[str, ...]:
        """Names of the fields that they do not prove, as in unproved.NOT_PROVED."""

    def prove(self) -> list[str]:
        """A sentence for everything that they prove of it.

        Raises:
            InputError: it does not follow from them.
        """


@dataclass(frozen=True)
class AppliedPlan:
    """A frequency plan with its plan and its profile.

    Attributes:
        freqplan: the frequency plan.
        plan: that it was made from.
        profile: of the plan.
        path: of the plan.
        force: go on though the profile has changed since.
        progress: as for trace_frontier.
    """

    freqplan: FrequencyPlan
    plan: Plan
    profile: Profile
    path: Path
    force: bool
    progress: Callable[[int, int], None] | None = None

    @classmethod
    def find(
        cls,
        freqplan: FrequencyPlan,
        file: Path,
        profile: str | None,
        *,
        force: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> AppliedPlan | None:
        """What a frequency plan in a file was made from; None where that is not beside it.

        Args:
            freqplan: the frequency plan.
            file: its file.
            profile: path or name of the plan's profile, if that has moved.
            force: go on though the profile has changed since.
            progress: as for trace_frontier.
        """
        if freqplan.dwell is not None:  # an older version changed the plan's clocks for that
            return None
        with suppress(InputError):
            path = file_with_sha256(freqplan.plan_sha256, file.parent)
            if path is not None:
                plan = Plan.load(path)
                measured = find_profile(plan.profile, path, profile)
                return cls(freqplan, plan, measured, path, force, progress)
        return None

    @property
    def not_proved(self) -> tuple[str, ...]:
        """Names of the fields that users chose as they applied the plan."""
        return GPUS_AS_NAMED

    def prove(self) -> list[str]:
        """Make the frequency plan anew: it comes out the same, but for what users chose."""
        stated, plan = self.freqplan, self.plan
        # Applied with --force, it has another profile than the plan's.
        force = self.force or stated.profile_sha256 != plan.profile.sha256
        if stated.min_dwell_s:
            plan = replan(plan, self.profile, self.progress, min_dwell=stated.min_dwell_s)
        again = apply_plan(
            plan,
            self.profile,
            topology=stated.layout,
            clocks=[stated.clocks_of(stage) for stage in range(stated.layout.stages)],
            devices=[rank.device for rank in stated.ranks],
            ladder=stated.ladder is not None,
            force=force,
            plan_sha256=stated.plan_sha256,
        )
        tolerance = _TOLERANCE if plan.job.is_in_whole_units else FINER_UNITS_TOLERANCE
        for name in FrequencyPlan.model_fields:
            value = getattr(stated, name)
            # What is absent was not known to an older version, or does not occur.
            if value is not None and name != "min_dwell_s":
                check_stated(name, value, getattr(again, name), tolerance)
        return [f"it is what `envplan apply` makes of {self.path.name}, which is beside it"]


def file_with_sha256(sha256: str, folder: Path) -> Path | None:
    """The JSON file in a folder whose content has a sha256; None where there is none."""
    for path in islice(sorted(folder.glob("*.json")), _MAX_FILES):
        with suppress(InputError):
            if is_file(path) and _sha256_of(path) == sha256:
                return path
    return None


def _sha256_of(path: Path) -> str:
    return hashlib.sha256(read_bounded(path, MAX_DOCUMENT_BYTES)).hexdigest()
