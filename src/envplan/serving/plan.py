"""Serving plans: which instances run, for which classes, at which clock and load.

A serving plan is a file, serving-plan.json ("envplan/serving-plan/v1"). Here is what all planners
share, too: what they may be asked, why there may be no answer, and how a plan is made of pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field

from envplan._io.documents import Count, Document, Model
from envplan._io.files import is_file
from envplan._io.words import counted
from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, Class, Positive, Slo, check_class, hosts, serves
from envplan.serving.profile import Curve, ServingProfile, builtin_profiles

#: Loads and powers of a plan must agree with its profile this well, relative to the larger.
_TOLERANCE: Final = 1e-6
#: tokens/s, or W, that make no difference: the exact planner's solver does not see them.
_NOTHING: Final = 2e-3
#: tokens/s: what is less is none, and what is more no planner could tell apart.
_LOADS: Final = (0.01, 1e9)


Amount = Annotated[float, Field(ge=0)]


class Served(Model):
    """A class, or a share of it, that a pool serves.

    Attributes:
        request_class: its name.
        load_tokens_s: its own tokens per second.
    """

    request_class: Class
    load_tokens_s: Amount


class Group(Model):
    """Instances of a pool that are alike; powers, latencies and load are of each of them."""

    tp: Count
    frequency_mhz: Count
    instances: Count
    load_tokens_s: Amount
    power_w: Amount
    ttft_s: Positive
    tbt_s: Positive

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.tp * self.instances

    def __str__(self) -> str:
        return f"TP{self.tp} at {self.frequency_mhz} MHz"


class Pool(Model):
    """Instances that serve a class and, maybe, lower ones as if they were of it.

    Attributes:
        request_class: the class whose configurations it runs.
        slo: the strictest SLO of what it serves.
        serves: what it serves.
        groups: its instances.
    """

    request_class: Class
    slo: Slo
    serves: list[Served]
    groups: list[Group]

    @property
    def classes(self) -> list[str]:
        """Names of what it serves."""
        return [served.request_class for served in self.serves]

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return sum(group.gpus for group in self.groups)

    @property
    def power_w(self) -> float:
        """W of all its instances."""
        return sum(group.instances * group.power_w for group in self.groups)


class ProfileReference(Model):
    """The profile a plan was made from."""

    name: str
    path: str | None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    source: str | None


class Asked(Model):
    """What a plan was asked for.

    Attributes:
        gpus: at most.
        loads_tokens_s: tokens per second by class.
        slos: by class.
        merge: whether a class might be served by a higher one's pool.
        one_frequency: whether all instances of a pool with the same TP had to run at one clock.
    """

    gpus: Count
    loads_tokens_s: dict[Class, Positive]
    slos: dict[Class, Slo]
    merge: bool
    one_frequency: bool

    @classmethod
    def about(
        cls, profile: ServingProfile, loads: Mapping[str, float], gpus: int,
        merge: bool = True, one_frequency: bool = False,
    ) -> Self:  # fmt: skip
        """The loads above zero, in the order of the classes; each can be served at some load.

        Raises:
            InputError: there is no load, no GPU, or no such class.
            NoAnswerError: as check_reachable.
        """
        if gpus < 1:
            raise InputError(f"a fleet needs at least one GPU, not {gpus}")
        least, most = _LOADS
        for name, load in loads.items():
            check_class(name)
            if not (math.isfinite(load) and (load == 0 or least <= load <= most)):
                raise InputError(
                    f"the load of {name} must be 0, or from {least:g} to {most:g} tokens/s, not "
                    f"{load:g}"
                )
        wanted = {name: float(loads[name]) for name in CLASSES if loads.get(name)}
        if not wanted:
            raise InputError("there is no load; give at least one class tokens/s above 0")
        check_reachable(profile, wanted, merge)
        slos = {name: profile.classes[name].slo for name in wanted}
        return cls(gpus=gpus, loads_tokens_s=wanted, slos=slos, merge=merge,
                   one_frequency=one_frequency)  # fmt: skip


class Baseline(Model):
    """The same loads on TP8 at maximum frequency; the highest TP a class has, where it lacks 8."""

    gpus: Count
    power_w: Amount


class Predicted(Model):
    """What a plan comes to, by its profile.

    Attributes:
        gpus: in use.
        power_w: of all instances.
        power_lower_bound_w: no plan draws less; None where none was proved.
        gap: how far power_w lies above that, as a fraction of it.
        baseline: the same loads on TP8 at maximum frequency; None where that cannot serve them.
        savings_percent: power saved against the baseline.
    """

    gpus: Count
    power_w: Amount
    power_lower_bound_w: Amount | None
    gap: Amount | None
    baseline: Baseline | None
    savings_percent: float | None


class ServingPlan(Document):
    """A plan and what it was made from and for."""

    kind: ClassVar[str] = "serving plan"
    schema_name: ClassVar[str] = "envplan/serving-plan/v1"
    writes_null: ClassVar[bool] = True

    schema_id: Literal["envplan/serving-plan/v1"] = Field(alias="schema")
    planner: str
    profile: ProfileReference
    asked: Asked
    predicted: Predicted
    pools: list[Pool]

    @property
    def power(self) -> float:
        """W of all instances."""
        return self.predicted.power_w

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.predicted.gpus

    def instances(self) -> Iterator[tuple[Pool, Group]]:
        """Every single instance, with its pool and its group."""
        for pool in self.pools:
            for group in pool.groups:
                for _ in range(group.instances):
                    yield pool, group

    def find_profile(self, given: str | None = None) -> ServingProfile:
        """The profile that the plan was made from, changed since or not.

        Args:
            given: path or built-in name, if it is not where it was.

        Raises:
            InputError: there is none.
        """
        name, path = self.profile.name, self.profile.path
        found = given or (path if path is not None and is_file(path) else name)
        if found == name and not given and name not in builtin_profiles():
            raise InputError(
                f"the plan's profile {name} is not where it was; name it with --profile", path=path
            )
        return ServingProfile.open(found)

    def check(self, profile: ServingProfile, *, force: bool = False) -> list[str]:
        """Prove from the profile that the plan serves its loads within SLOs and GPUs.

        Args:
            force: go on though the profile has changed since.

        Returns:
            What was proved, in lines.

        Raises:
            InputError: something does not hold; says what.
        """
        if profile.sha256 != self.profile.sha256 and not force:
            raise InputError(
                f"the plan was made from another profile than {profile.name} is now; plan again, "
                "or go on with --force"
            )
        if problem := next(_problems(self, profile), None):
            raise InputError(problem)
        loads = self.asked.loads_tokens_s
        return [
            f"served, all within their SLOs by the profile: {counted(len(loads), 'class')} with "
            f"{sum(loads.values()):g} tokens/s",
            f"GPUs: {self.gpus} of {self.asked.gpus}, drawing {self.power:.6g} W",
        ]


def _problems(plan: ServingPlan, profile: ServingProfile) -> Iterator[str]:
    """What does not hold."""
    asked, served = plan.asked, dict.fromkeys(CLASSES, 0.0)
    for pool in plan.pools:
        name, brought, carried = pool.request_class, 0.0, 0.0
        for part in pool.serves:
            other, load = part.request_class, part.load_tokens_s
            if not serves(name, other):
                yield f"pool {name} cannot serve {other}"
            if other not in asked.slos or not pool.slo.covers(asked.slos[other]):
                yield f"pool {name} does not promise what {other} needs"
            served[other] += load
            brought += load * profile.needed_for(other, name)
        for group in pool.groups:
            where, load = f"pool {name}, {group}", group.load_tokens_s
            carried += group.instances * load
            curve = profile.curves.get((name, group.tp, group.frequency_mhz))
            if curve is None:
                yield f"{where}: the profile has no such configuration"
            elif not curve.meets(pool.slo, load):
                yield f"{where}: {load:g} tokens/s violate the SLO"
            elif not _close(curve.power_at(load), group.power_w):
                yield f"{where}: draws another power than the plan states"
        if not _close(carried, brought):
            yield f"pool {name} is brought {brought:g} tokens/s; its instances carry {carried:g}"
    gpus, power = (sum(getattr(pool, of) for pool in plan.pools) for of in ("gpus", "power_w"))
    if gpus != plan.gpus or gpus > asked.gpus:
        yield f"the plan's pools hold {gpus} GPUs; {asked.gpus} were given"
    if not _close(power, plan.power):
        yield f"the pools draw {power:g} W, not {plan.power:g} as stated"
    for name, load in served.items():
        if not _close(load, asked.loads_tokens_s.get(name, 0.0)):
            yield f"{load:g} tokens/s of {name} are served, not what was asked for"


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_NOTHING)


def make_plan(
    planner: str, profile: ServingProfile, asked: Asked, pools: Sequence[Pool],
    bound_w: float | None = None,
) -> ServingPlan:  # fmt: skip
    """The plan of pools that a planner has decided on, checked.

    Args:
        bound_w: no plan draws less, W; None where nothing was proved.
    """
    power = sum(pool.power_w for pool in pools)
    baseline = _baseline(profile, asked.loads_tokens_s)
    plan = ServingPlan(
        schema="envplan/serving-plan/v1",
        planner=planner,
        profile=ProfileReference(
            name=profile.name, path=str(profile.path), sha256=profile.sha256, source=profile.source
        ),
        asked=asked,
        predicted=Predicted(
            gpus=sum(pool.gpus for pool in pools),
            power_w=power,
            power_lower_bound_w=bound_w,
            gap=None if bound_w is None else max(0.0, power / bound_w - 1 if bound_w else 0.0),
            baseline=baseline,
            savings_percent=100 * (1 - power / baseline.power_w)
            if baseline and baseline.power_w
            else None,
        ),
        pools=list(pools),
    )
    plan.check(profile)
    return plan


def _baseline(profile: ServingProfile, loads: Mapping[str, float]) -> Baseline | None:
    """As few instances as SLOs allow, however many GPUs; None if a class cannot be served so."""
    gpus, power = 0, 0.0
    for name, load in loads.items():
        most = 0.0
        if curves := profile.of(name):
            most = curves[-1].capacity(profile.classes[name].slo)
        if most == 0:
            return None
        count = -int(-load // most)
        gpus += count * curves[-1].tp
        power += count * curves[-1].power_at(load / count)
    return Baseline(gpus=gpus, power_w=power)


def make_pool(
    name: str, slo: Slo, served: Mapping[str, float], instances: Iterable[tuple[Curve, int, float]]
) -> Pool:
    """A pool of a class.

    Args:
        served: tokens/s by class.
        instances: configuration, number and load of each (tokens/s) of those that are alike.
    """
    parts = [Served(request_class=c, load_tokens_s=served[c]) for c in CLASSES if c in served]
    groups = []
    for curve, number, load in instances:
        (ttft, tbt), watts = curve.latencies_at(load), curve.power_at(load)
        groups.append(
            Group(tp=curve.tp, frequency_mhz=curve.frequency_mhz, instances=number,
                  load_tokens_s=load, power_w=watts, ttft_s=ttft, tbt_s=tbt)
        )  # fmt: skip
    return Pool(request_class=name, slo=slo, serves=parts, groups=groups)


def check_reachable(profile: ServingProfile, loads: Iterable[str], merge: bool = True) -> None:
    """Every class, or with `merge` a higher one, has a configuration that meets the class's SLO.

    Raises:
        NoAnswerError: one has none; says which SLO it misses and the best there is.
    """
    for name in loads:
        slo = profile.classes[name].slo
        curves = [curve for host in hosts(name, merge=merge) for curve in profile.of(host)]
        if not curves:
            raise NoAnswerError(f"no configuration of profile {profile.name} has memory for {name}")
        if any(curve.capacity(slo) for curve in curves):
            continue
        apart = f"its tokens {slo.tbt_s:g} s apart"
        if paced := [curve.ttft_s[0] for curve in curves if curve.tbt_s[0] <= slo.tbt_s]:
            missed = f"its first token within {slo.ttft_s:g} s"
            best = f"the best that keeps {apart} takes {min(paced):g} s"
        else:
            missed, best = apart, f"the best takes {min(curve.tbt_s[0] for curve in curves):g} s"
        raise NoAnswerError(f"no configuration gives {name} {missed}; {best}")


def too_few(gpus: int, needed: int, held: Mapping[str, int], what: str) -> NoAnswerError:
    """That the fleet is too small, by how much, and whose pools take most GPUs (`held`)."""
    most = f"; class {max(held, key=held.__getitem__)} takes most" if held else ""
    return NoAnswerError(
        f"{what} at least {needed} GPUs, {needed - gpus} more than the {gpus} there are{most}"
    )
