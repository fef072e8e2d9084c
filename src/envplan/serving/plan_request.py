"""Requests for serving plans, and why there may be no answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Final, Self

from pydantic import Field

from envplan._io.documents import Count, Model
from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import (
    DEFAULT_CLASSES,
    ClassList,
    ClassName,
    Positive,
    RequestClasses,
    Slo,
)
from envplan.serving.profile import ServingProfile

#: Loads that a plan can be made for, tokens/s: less counts as none, and more no planner could tell
#: apart.
_MIN_LOAD: Final = 0.01
_MAX_LOAD: Final = 1e9
#: Percent of requests whose SLOs a plan must meet, unless it is told otherwise.
SLO_QUANTILE_PERCENT: Final = 99.0


class PlanRequest(Model):
    """The loads and SLOs of a fleet, and what its planner may do.

    Attributes:
        gpus: at most.
        loads_tokens_s: tokens per second by class, all above 0, in the order of the classes.
        slos: by class.
        merge: whether a class may be served by a higher one's pool.
        one_frequency: whether all instances of a pool with the same TP run at one clock.
        slo_quantile_percent: percent of requests that meet their SLOs when the plan is replayed;
            None where it was not replayed, as plans of envplan 0.1 were not.
        kv_link_bytes_s: of a GPU's network, over which contexts go from prefill to decode; None
            where instances that only run one phase were not asked for.
        classes: all classes of requests; None: those of the profile, as in plans of envplan 0.1.
    """

    gpus: Count
    loads_tokens_s: dict[ClassName, Positive]
    slos: dict[ClassName, Slo]
    merge: bool
    one_frequency: bool
    slo_quantile_percent: Annotated[float, Field(gt=0, lt=100)] | None = None
    kv_link_bytes_s: Positive | None = None
    classes: ClassList | None = None

    @cached_property
    def all_classes(self) -> RequestClasses:
        """All classes of requests; in older plans these are the nine default ones."""
        return DEFAULT_CLASSES if self.classes is None else RequestClasses(self.classes)

    @classmethod
    def create(
        cls,
        profile: ServingProfile,
        loads_tokens_s: Mapping[str, float],
        gpus: int,
        *,
        merge: bool = True,
        one_frequency: bool = False,
    ) -> Self:
        """The request for some loads under a profile's SLOs.

        Args:
            profile: with the SLOs to be met.
            loads_tokens_s: by class; those of 0 are left out.
            gpus: at most.
            merge: whether a class may be served by a higher one's pool.
            one_frequency: whether all instances of a pool with the same TP run at one clock.

        Raises:
            InputError: there is no load, no GPU, or no such class.
            NoAnswerError: as require_reachable.
        """
        if gpus < 1:
            raise InputError(f"a fleet needs at least one GPU, not {gpus}")
        for name, load in loads_tokens_s.items():
            profile.classes.check_name(name)
            _require_plannable(name, load)
        loads = {
            name: float(loads_tokens_s[name])
            for name in profile.classes
            if loads_tokens_s.get(name)
        }
        if not loads:
            raise InputError("there is no load; give at least one class tokens/s above 0")
        require_reachable(profile, loads, merge=merge)
        return cls(
            gpus=gpus,
            loads_tokens_s=loads,
            slos={name: profile.classes[name].slo for name in loads},
            merge=merge,
            one_frequency=one_frequency,
            classes=profile.classes.to_list(),
        )


def _require_plannable(name: str, load_tokens_s: float) -> None:
    if load_tokens_s == 0 or _MIN_LOAD <= load_tokens_s <= _MAX_LOAD:
        return
    raise InputError(
        f"the load of {name} must be 0, or from {_MIN_LOAD:g} to {_MAX_LOAD:g} tokens/s, not "
        f"{load_tokens_s:g}"
    )


def require_reachable(
    profile: ServingProfile, class_names: Iterable[str], *, merge: bool = True
) -> None:
    """Refuse classes whose SLO no configuration meets.

    Args:
        profile: with the SLOs.
        class_names: those to be served.
        merge: a configuration of a higher class will do.

    Raises:
        NoAnswerError: a class has none; says which SLO it misses and the best there is.
    """
    for name in class_names:
        slo = profile.classes[name].slo
        hosts = profile.classes.hosts(name, merge=merge)
        curves = [curve for host in hosts for curve in profile.curves_of(host)]
        if not curves:
            raise NoAnswerError(f"no configuration of profile {profile.name} has memory for {name}")
        if any(curve.capacity(slo) for curve in curves):
            continue
        tokens_apart = f"its tokens {slo.tbt_s:g} s apart"
        ttfts_in_pace_s = [curve.ttft_s[0] for curve in curves if curve.tbt_s[0] <= slo.tbt_s]
        if ttfts_in_pace_s:
            missed = f"its first token within {slo.ttft_s:g} s"
            best = f"the best that keeps {tokens_apart} takes {min(ttfts_in_pace_s):g} s"
        else:
            missed = tokens_apart
            best = f"the best takes {min(curve.tbt_s[0] for curve in curves):g} s"
        raise NoAnswerError(f"no configuration gives {name} {missed}; {best}")


def too_few_gpus(
    who_needs: str, needed: int, available: int, gpus_by_class: Mapping[str, int]
) -> NoAnswerError:
    """An error: the fleet is too small, by how much, and whose pools take most GPUs.

    Args:
        who_needs: the sentence's begin, as in "the loads need".
        needed: GPUs at least.
        available: GPUs that there are.
        gpus_by_class: GPUs that pools would take; may be empty.
    """
    largest = ""
    if gpus_by_class:
        name = max(gpus_by_class, key=gpus_by_class.__getitem__)
        largest = f"; class {name} takes most"
    return NoAnswerError(
        f"{who_needs} at least {needed} GPUs, {needed - available} more than the {available} "
        f"there are{largest}"
    )
