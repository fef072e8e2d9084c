"""Serving plans: which instances run, for which classes, at which clock and load.

A serving plan is a file, serving-plan.json ("envplan/serving-plan/v1"). `ServingPlan.check` proves
from the profile what a plan states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from envplan._io.documents import Count, Document, Model
from envplan._io.files import is_file
from envplan._io.words import counted
from envplan.errors import InputError
from envplan.serving.builtin import builtin_profiles
from envplan.serving.classes import ClassName, Positive, RequestClasses, Slo
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration
from envplan.serving.plan_replay import ClassReplay, PlanReplay, replay_plan
from envplan.serving.plan_request import PlanRequest
from envplan.serving.profile import ServingProfile
from envplan.serving.savings_split import SavingsSplit
from envplan.serving.settings import Settings
from envplan.serving.steady_replay import SteadyLoad
from envplan.serving.steady_state import CurveKey

#: Loads and powers of a plan must agree with its profile this well, relative to the larger.
_TOLERANCE: Final = 1e-6
#: tokens/s, or W, that make no difference: the exact planner's solver does not see them.
_NEGLIGIBLE: Final = 2e-3

Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
#: Phases of requests that the instances of a group run, where they do not run both.
Role = Literal["prefill", "decode"]
PREFILL: Final[Role] = "prefill"
DECODE: Final[Role] = "decode"


class Served(Model):
    """A class, or a share of it, that a pool serves.

    Attributes:
        request_class: its name.
        load_tokens_s: its own tokens per second.
    """

    request_class: ClassName
    load_tokens_s: Amount


class Group(Model):
    """Instances of a pool that are alike.

    Attributes:
        tp: GPUs of each.
        frequency_mhz: SM clock.
        instances: their number.
        load_tokens_s: of each.
        power_w: of each.
        ttft_s: time to first token at that load.
        tbt_s: time between tokens at that load.
        attainment: share of their requests that meet their SLOs at least, when they are replayed;
            None where they were not.
        role: the phase that they run; None: both. Where instances have roles, attainment and times
            are of the requests, whose prompts run on one group and which decode on the other.
    """

    tp: Count
    frequency_mhz: Count
    instances: Count
    load_tokens_s: Amount
    power_w: Amount
    ttft_s: Positive
    tbt_s: Amount
    attainment: Share | None = None
    role: Role | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.tp * self.instances

    @property
    def configuration(self) -> Configuration:
        """TP and clock of its instances."""
        return Configuration(self.tp, self.frequency_mhz)

    def __str__(self) -> str:
        role = f" for {self.role}" if self.role else ""
        return f"TP{self.tp} at {self.frequency_mhz} MHz{role}"


class Pool(Model):
    """Instances that serve a class and, maybe, lower ones as if they were of it.

    Attributes:
        request_class: the class whose configurations it runs.
        slo: the strictest SLO of what it serves.
        serves: classes and their loads.
        groups: its instances. Where these have roles, there are two groups: one for prefill, and
            one where the same requests decode.
    """

    request_class: ClassName
    slo: Slo
    serves: list[Served]
    groups: list[Group]

    @property
    def classes(self) -> list[str]:
        """Names of the classes it serves."""
        return [served.request_class for served in self.serves]

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return sum(group.gpus for group in self.groups)

    @property
    def power_w(self) -> float:
        """Power of all its instances, W."""
        return sum(group.instances * group.power_w for group in self.groups)

    @property
    def carried_tokens_s(self) -> float:
        """Load of all its instances to which requests come, in tokens of its own class."""
        groups = [group for group in self.groups if group.role != DECODE]
        return sum(group.instances * group.load_tokens_s for group in groups)

    @property
    def has_roles(self) -> bool:
        """Whether some instances run one phase only."""
        return any(group.role for group in self.groups)

    def group_loads(self, profile: ServingProfile, link_bytes_s: float) -> list[SteadyLoad]:
        """The instances of each group, and its part of the requests that come to the pool.

        Two groups of instances with roles have one load together.

        Args:
            profile: with the lengths of classes.
            link_bytes_s: of a GPU's network, over which contexts go from prefill to decode.
        """
        if self.has_roles:
            return [self._load_of_both_roles(profile, link_bytes_s)]
        carried_tokens_s = self.carried_tokens_s
        loads = []
        for group in self.groups:
            part = 0.0
            if carried_tokens_s:
                part = group.instances * group.load_tokens_s / carried_tokens_s
            loads.append(
                SteadyLoad(
                    configuration=group.configuration,
                    num_instances=group.instances,
                    requests_s=self._requests_s(profile, part),
                )
            )
        return loads

    def _load_of_both_roles(self, profile: ServingProfile, link_bytes_s: float) -> SteadyLoad:
        prefill, decode = self.groups
        return SteadyLoad(
            configuration=prefill.configuration,
            num_instances=prefill.instances,
            requests_s=self._requests_s(profile, part=1.0),
            decode=Instances(decode.configuration, decode.instances),
            link_bytes_s=link_bytes_s,
        )

    def _requests_s(self, profile: ServingProfile, part: float) -> dict[str, float]:
        """Requests per second of each class, of a part of what comes to the pool."""
        requests_s = {}
        for served in self.serves:
            tokens = profile.classes[served.request_class].tokens
            if part * served.load_tokens_s:
                requests_s[served.request_class] = part * served.load_tokens_s / tokens
        return requests_s


class ProfileReference(Model):
    """The profile a plan was made from."""

    name: str
    path: str | None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    source: str | None


class Baseline(Model):
    """The same loads on TP8 at maximum frequency; the highest TP a class has, where it lacks 8."""

    gpus: Count
    power_w: Amount


class OneClockFleet(Model):
    """The best fleet for the same loads, SLOs and GPUs whose instances all run at one clock.

    Attributes:
        frequency_mhz: the clock.
        gpus: in use.
        power_w: of all instances, when it is replayed.
        is_highest: whether the profile has no higher clock; None where the plan does not say, as in
            plans of envplan 0.1.
    """

    frequency_mhz: Count
    gpus: Count
    power_w: Amount
    is_highest: bool | None = None


class FleetFigures(Model):
    """GPUs and power of a fleet, when it is replayed."""

    gpus: Count
    power_w: Amount


class LongRun(Model):
    """The share of a class's requests that meet their SLOs in the long run.

    Attributes:
        requests: that came in all draws of the replay together.
        mean: share of these that met their SLOs.
        at_least: share in the long run: two standard errors below that.
    """

    requests: Annotated[int, Field(ge=0, strict=True)]
    mean: Share
    at_least: Share


class Predicted(Model):
    """Power and GPUs of a plan, by its profile.

    Attributes:
        gpus: in use.
        power_w: of all instances.
        power_lower_bound_w: no plan draws less; None where none was proved.
        gap: how far power_w lies above that, as a fraction of it.
        baseline: the same loads on TP8 at maximum frequency; None where that cannot serve them.
        savings_percent: power saved against the baseline.
        attainment_by_class: share of the requests of each class that meet their SLOs at least in
            any draw as long as those that the plan is replayed with; None where it was not. Of a
            class that seldom comes few requests are in a draw, so it says little of such a one.
        long_run_by_class: the share in the long run, and the requests that tell it; None where
            the plan was not replayed, or by an earlier envplan.
        one_clock: the best fleets within the same GPUs at one lower clock, and at the highest; none
            where these cannot serve the loads. None where the plan was not replayed.
        together: the best fleet found whose instances run both phases; None where none holds, or
            where instances with roles were not asked for.
        apart: the best fleet found whose instances have roles; None likewise.
    """

    gpus: Count
    power_w: Amount
    power_lower_bound_w: Amount | None
    gap: Amount | None
    baseline: Baseline | None
    savings_percent: float | None
    attainment_by_class: dict[ClassName, Share] | None = None
    long_run_by_class: dict[ClassName, LongRun] | None = None
    one_clock: list[OneClockFleet] | None = None
    together: FleetFigures | None = None
    apart: FleetFigures | None = None

    @property
    def savings_split(self) -> SavingsSplit | None:
        """What is saved against the baseline, in parts.

        None where the baseline, or the best fleet at the highest or at a lower clock, is missing.
        """
        fleets = sorted(self.one_clock or [], key=lambda fleet: fleet.frequency_mhz)
        if self.baseline is None or not self.baseline.power_w or len(fleets) != 2:
            return None
        lower, highest = fleets
        return SavingsSplit.of(
            fleet=self.power_w,
            largest_tp=self.baseline.power_w,
            highest_clock=highest.power_w,
            lower_clock=lower.power_w,
        )


class ServingPlan(Document):
    """A plan, and what it was made from and for."""

    kind: ClassVar[str] = "serving plan"
    schema_name: ClassVar[str] = "envplan/serving-plan/v1"
    writes_null: ClassVar[bool] = True

    schema_id: Literal["envplan/serving-plan/v1"] = Field(alias="schema")
    planner: str
    profile: ProfileReference
    request: PlanRequest = Field(alias="asked")
    predicted: Predicted
    pools: list[Pool]

    @model_validator(mode="after")
    def _require_known_classes(self) -> Self:
        classes = self.request.all_classes
        for where, name in _class_names(self):
            if name not in classes:
                raise ValueError(f"{where}: {classes.no_class_text(repr(name))}")
        return self

    @property
    def power(self) -> float:
        """Power of all instances, W."""
        return self.predicted.power_w

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.predicted.gpus

    @property
    def was_replayed(self) -> bool:
        """Whether its figures are those of a replay, rather than of load curves."""
        return self.request.slo_quantile_percent is not None

    @property
    def classes(self) -> RequestClasses | None:
        """The classes that it was made for; None: those of its profile, in older plans."""
        return None if self.request.classes is None else self.request.all_classes

    def group_loads(self, profile: ServingProfile) -> list[list[SteadyLoad]]:
        """The groups of instances of each pool, and the requests that come to each."""
        link_bytes_s = self.request.kv_link_bytes_s or Settings.link_bytes_s
        return [pool.group_loads(profile, link_bytes_s) for pool in self.pools]

    def find_profile(self, path_or_name: str | None = None) -> ServingProfile:
        """The profile that the plan was made from, changed since or not.

        Args:
            path_or_name: of the profile, if it is not where it was.

        Raises:
            InputError: there is none.
        """
        return self.in_its_classes(self._open_profile(path_or_name))

    def in_its_classes(self, profile: ServingProfile) -> ServingProfile:
        """A profile for the classes of requests that the plan was made for."""
        return profile if self.classes is None else profile.with_classes(self.classes)

    def _open_profile(self, path_or_name: str | None) -> ServingProfile:
        if path_or_name:
            return ServingProfile.open(path_or_name)
        name, path = self.profile.name, self.profile.path
        if path is not None and is_file(path):
            return ServingProfile.open(path)
        if name not in builtin_profiles():
            raise InputError(
                f"the plan's profile {name} is not where it was; name it with --profile", path=path
            )
        return ServingProfile.open(name)

    def check(self, profile: ServingProfile, *, force: bool = False) -> list[str]:
        """Prove from the profile that the plan serves its loads within SLOs and GPUs.

        Args:
            profile: that the plan was made from.
            force: go on though the profile has changed since.

        Returns:
            Lines that state what was proved.

        Raises:
            InputError: something does not hold; says what.
        """
        if profile.sha256 != self.profile.sha256 and not force:
            raise InputError(
                f"the plan was made from another profile than {profile.name} is now; plan again, "
                "or go on with --force"
            )
        problem = next(_problems(self, self.in_its_classes(profile)), None)
        if problem is not None:
            raise InputError(problem)
        loads = self.request.loads_tokens_s
        how = "by the profile's queueing model, not replayed"
        if self.was_replayed:
            how = f"when replayed, at least {self.request.slo_quantile_percent:g}% of requests"
        return [
            f"served within their SLOs, {how}: {counted(len(loads), 'class')} with "
            f"{sum(loads.values()):g} tokens/s",
            f"GPUs: {self.gpus} of {self.request.gpus}, drawing {self.power:.6g} W",
        ]


def _class_names(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    """Every class that a plan names, and where."""
    for name in plan.request.loads_tokens_s:
        yield "asked.loads_tokens_s", name
    for name in plan.request.slos:
        yield "asked.slos", name
    for name in plan.predicted.attainment_by_class or {}:
        yield "predicted.attainment_by_class", name
    for name in plan.predicted.long_run_by_class or {}:
        yield "predicted.long_run_by_class", name
    for number, pool in enumerate(plan.pools):
        yield f"pools[{number}].request_class", pool.request_class
        for name in pool.classes:
            yield f"pools[{number}].serves", name


def _problems(plan: ServingPlan, profile: ServingProfile) -> Iterator[str]:
    """Everything in a plan that its profile contradicts, pool by pool, then its sums."""
    for pool in plan.pools:
        yield from _problems_of_classes(pool, plan.request)
        yield from _problems_of_roles(pool, plan)
        if not plan.was_replayed:
            yield from _problems_by_curves(pool, profile)
        yield from _problems_of_load(pool, profile)
    if plan.was_replayed:
        yield from _problems_of_replay(plan, profile)
    yield from _problems_of_sums(plan)


def _problems_of_classes(pool: Pool, request: PlanRequest) -> Iterator[str]:
    """Classes that the pool cannot serve, or whose SLO it does not promise."""
    for name in pool.classes:
        if not request.all_classes.serves(pool.request_class, name):
            yield f"pool {pool.request_class} cannot serve {name}"
        if name not in request.slos or not pool.slo.covers(request.slos[name]):
            yield f"pool {pool.request_class} does not promise what {name} needs"


def _problems_of_roles(pool: Pool, plan: ServingPlan) -> Iterator[str]:
    """Roles that do not make a pair of groups, or a plan that was not replayed and has roles."""
    if not pool.has_roles:
        return
    if not plan.was_replayed:
        yield f"pool {pool.request_class} has roles, and no replay shows that it keeps its SLOs"
    if [group.role for group in pool.groups] != [PREFILL, DECODE]:
        yield f"pool {pool.request_class} must have a group for prefill, then one for decode"


def _problems_by_curves(pool: Pool, profile: ServingProfile) -> Iterator[str]:
    """Instances that miss the pool's SLO, or draw another power than stated, by load curves."""
    for group in pool.groups:
        group_name = f"pool {pool.request_class}, {group}"
        key = CurveKey(pool.request_class, group.tp, group.frequency_mhz)
        curve = profile.curves.get(key)
        if curve is None:
            yield f"{group_name}: the profile has no such configuration"
        elif not curve.meets(pool.slo, group.load_tokens_s):
            yield f"{group_name}: {group.load_tokens_s:g} tokens/s violate the SLO"
        elif not _is_close(curve.power_at(group.load_tokens_s), group.power_w):
            yield f"{group_name}: draws another power than the plan states"


def _problems_of_replay(plan: ServingPlan, profile: ServingProfile) -> Iterator[str]:
    """Figures that a replay does not show again, and requests that meet their SLOs too seldom."""
    for pool in plan.pools:
        for group in pool.groups:
            if group.configuration not in profile.performance:
                yield f"pool {pool.request_class}, {group}: the profile has no such configuration"
                return
    with_slos = profile.with_slos(plan.request.slos)
    replay = replay_plan(with_slos, plan.group_loads(with_slos))
    for pool, replayed_groups in zip(plan.pools, replay.groups, strict=True):
        for group, replayed in zip(pool.groups, replayed_groups, strict=True):
            for name, value in asdict(replayed).items():
                stated = getattr(group, name)
                if stated is None or not math.isclose(value, stated, rel_tol=_TOLERANCE):
                    yield (
                        f"pool {pool.request_class}, {group}: {name} is {value:g} when it is "
                        f"replayed, not {stated} as stated"
                    )
    yield from _problems_of_shares(plan, replay)


def _problems_of_shares(plan: ServingPlan, replay: PlanReplay) -> Iterator[str]:
    """Shares of classes that a replay does not show again, and such as are too low."""
    stated = plan.predicted
    if attainment_by_class(replay.classes) != stated.attainment_by_class:
        yield "attainment_by_class is not what a replay shows"
    long_run = long_run_by_class(replay.classes)
    if stated.long_run_by_class is not None and long_run != stated.long_run_by_class:
        yield "long_run_by_class is not what a replay shows"
    quantile = plan.request.slo_quantile_percent or 0.0
    if stated.long_run_by_class is not None:  # earlier plans were judged by means
        for name in replay.missing_classes(quantile / 100):
            yield f"{name} meets its SLOs for less than the {quantile:g}% of requests asked for"
    if replay.attainment < quantile / 100:
        yield (
            f"{100 * replay.attainment:.2f}% of requests meet their SLOs when the plan is "
            f"replayed, less than the {quantile:g}% that it states"
        )


def attainment_by_class(classes: Mapping[str, ClassReplay]) -> dict[str, float]:
    """What a plan states of each class in any draw."""
    return {name: replayed.attainment for name, replayed in classes.items()}


def long_run_by_class(classes: Mapping[str, ClassReplay]) -> dict[str, LongRun]:
    """What a plan states of each class in the long run."""
    return {
        name: LongRun(
            requests=replayed.num_requests, mean=replayed.mean, at_least=replayed.long_run
        )
        for name, replayed in classes.items()
    }


def _problems_of_load(pool: Pool, profile: ServingProfile) -> Iterator[str]:
    """Load that is brought to the pool and not carried by its instances, or the reverse."""
    brought_tokens_s = 0.0
    for served in pool.serves:
        factor = profile.load_conversion_factor(served.request_class, pool.request_class)
        brought_tokens_s += served.load_tokens_s * factor
    carried_tokens_s = pool.carried_tokens_s
    if not _is_close(carried_tokens_s, brought_tokens_s):
        yield (
            f"pool {pool.request_class} is brought {brought_tokens_s:g} tokens/s; its instances "
            f"carry {carried_tokens_s:g}"
        )
    for group in pool.groups:
        decoded_tokens_s = group.instances * group.load_tokens_s
        if group.role == DECODE and not _is_close(decoded_tokens_s, brought_tokens_s):
            yield (
                f"pool {pool.request_class} is brought {brought_tokens_s:g} tokens/s; its "
                f"instances that decode carry {decoded_tokens_s:g}"
            )


def _problems_of_sums(plan: ServingPlan) -> Iterator[str]:
    """GPUs, power and loads of the plan that its pools do not add up to."""
    gpus = sum(pool.gpus for pool in plan.pools)
    if gpus != plan.gpus or gpus > plan.request.gpus:
        yield f"the plan's pools hold {gpus} GPUs; {plan.request.gpus} were given"
    power_w = sum(pool.power_w for pool in plan.pools)
    if not _is_close(power_w, plan.power):
        yield f"the pools draw {power_w:g} W, not {plan.power:g} as stated"
    served_tokens_s = dict.fromkeys(plan.request.all_classes, 0.0)
    for pool in plan.pools:
        for served in pool.serves:
            served_tokens_s[served.request_class] += served.load_tokens_s
    for name, load in served_tokens_s.items():
        if not _is_close(load, plan.request.loads_tokens_s.get(name, 0.0)):
            yield f"{load:g} tokens/s of {name} are served, not what was asked for"


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_TOLERANCE, abs_tol=_NEGLIGIBLE)
