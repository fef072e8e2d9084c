"""The plan of a site, site.json: which plan each job follows when."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from envplan._io.documents import Count, Document, GpuCount, Index, Model, Seconds, Watts

SITE_SCHEMA: Final = "envplan/site/v1"

Fraction = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[float, Field(ge=0, le=100)]

#: Which power of a plan counts against the budget: its mean over an iteration, or its highest.
PlanPower = Literal["average", "peak"]


class JobAssignment(Model):
    """One job in one interval."""

    name: str
    plan: Index | None = Field(
        description="index of the plan that it follows, of its frontier's plans by ascending time, "
        "those beyond T_star included; where it has a frequency plan, 0 for that and n for rung n "
        "of its ladder; absent where it pauses all the time"
    )
    faster_plan: Index | None = Field(
        None, description="index of the plan that its other iterations follow"
    )
    faster_share: Fraction = Field(0.0, description="of its iterations that follow faster_plan")
    iteration_time_s: Seconds | None = Field(
        description="mean time of an iteration while it runs; absent where it pauses all the time"
    )
    paused_share: Fraction = Field(description="of the interval in which it stands still")
    power_w: Watts = Field(
        description="of its GPUs alone: the mean over the interval, or the peak where peaks count"
    )


class SiteInterval(Model):
    """One interval of the plan."""

    start_s: Seconds
    end_s: Seconds
    budget_w: Watts
    reserved_w: Watts = Field(description="of the budget that others draw")
    power_w: Watts = Field(description="of the whole site, overheads and others included")
    throughput_loss_percent: Percent = Field(
        description="value lost against all jobs at T_min; relative throughput counts where jobs "
        "have no money"
    )
    price_percent_per_kw: Annotated[float, Field(ge=0)] = Field(
        description="of the value that the next kilowatt of the site buys"
    )
    price_money_per_kwh: Annotated[float, Field(ge=0)] | None = Field(
        None, description="money that the next kilowatt-hour earns, where jobs have money"
    )
    gap: Annotated[float, Field(ge=0)] = Field(
        description="best value that any plans could have over this one's, less 1: certified; "
        "where peaks count, that any of the plans that these jobs can follow could have"
    )
    jobs: list[JobAssignment]

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class SiteJobRecord(Model):
    """A job of the plan, described so that the plan can be proved."""

    name: str
    frontier: str | None = Field(None, description="path of its frontier file")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of its frontier file")
    freqplan: str | None = Field(
        None, description="path of the frequency plan that it trains by, whose ladder it follows"
    )
    freqplan_sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="of its frequency plan's file"
    )
    gpus: GpuCount
    replicas: GpuCount
    full_power_w: Watts = Field(
        description="of its GPUs alone: the least at T_min, or the peak of its fastest plan where "
        "peaks count"
    )
    weight: Annotated[float, Field(gt=0)]
    money: Annotated[float, Field(gt=0)] | None = None
    flexible: Fraction
    may_pause: bool
    iterations: Count | None = None
    by_s: Seconds | None = None
    iterations_made: Annotated[float, Field(ge=0)] | None = Field(
        None, description="by its deadline"
    )


class SitePlan(Document):
    """site.json: jobs, what was asked, and what each job does in every interval."""

    kind: ClassVar[str] = "site plan"
    schema_name: ClassVar[str] = SITE_SCHEMA

    schema_id: Literal["envplan/site/v1"] = Field(alias="schema")
    pue: Annotated[float, Field(ge=1)]
    host_power_w: Watts = Field(description="of the hosts, for each GPU")
    fixed_power_w: Watts = Field(description="of the site, whatever runs")
    alternates: bool = Field(description="two plans of a job may alternate by iterations")
    plan_power: PlanPower = Field(
        "average",
        description="power of a plan that counts against the budget: its mean over an iteration, "
        "or its peak at any moment of the replay, all peaks at once",
    )
    jobs: list[SiteJobRecord] = Field(min_length=1)
    intervals: list[SiteInterval] = Field(min_length=1)

    @property
    def throughput_loss_percent(self) -> float:
        """Mean over all intervals, by their length."""
        durations_s = [interval.duration_s for interval in self.intervals]
        lost = sum(
            interval.throughput_loss_percent * interval.duration_s for interval in self.intervals
        )
        return lost / sum(durations_s)
