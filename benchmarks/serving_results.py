"""Writes the page of serving results from what benchmarks.serving_runs has kept.

python -m benchmarks.serving_results docs/results-serving.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import serving_baselines
from benchmarks.report import table
from benchmarks.serving_runs import (
    CARBON,
    HOURS,
    LOADS,
    PRICE_GPU_HOUR,
    PRICE_KWH,
    READY,
    SMALL,
    WEEKS,
    Job,
    jobs,
    stored,
)
from envplan._io.files import atomic_write
from envplan.serving.metrics import kwh
from envplan.units import J_PER_KWH

#: kW of a GPU without work: assumed, as in the profile.
IDLE_KW = 0.1

Result = Mapping[str, Any]
Runs = list[tuple[Job, Result]]

_INTRO = """# Results: serving

<!-- Written by `make results` from benchmarks/data/serving.json. Do not edit. -->

Requests are **real** (the hours) or **real-shaped** (the weeks; [which](serving.md#traces)). Times
and powers come from [a profile identified from measurements](serving-profile.md), so energies are
**modelled**. A request meets its SLO by its own first token and by the mean time between its
further ones. There are at most 1,024 GPUs, and 5% of outputs are predicted wrongly.
`python -m benchmarks.serving_runs` replays all of this."""

_OLDER = """Rows with a † are older: they were replayed before fleets had as many instances as
replays of their past show to be enough. Rows that were replayed again moved by -52 to +16% in
energy; most of these are of policies with several pools, which came to need less."""

_EQUAL = """## Without hindsight, at equal attainment

Policies know 15 minutes of an hour, or a day of a week, which are not replayed, and what has come
since (`--past`). Beside each stand the fleets that never change and meet as many SLOs as it does,
to one request in ten thousand; these are found **with hindsight**. The last columns split what is
saved against TP8 at the highest clock. The worst row comes first. ([All of
it](results-baselines.md).)"""

_AGAINST = """The tables below compare policies with SinglePool, which is on TP8: most of what they
save against it, the right TP and one clock would save, too (above)."""

_HINDSIGHT = """An hour has no past. In these two tables every policy is sized once, by the whole
hour, and classes have the mean lengths of the whole hour: **with hindsight**."""

_WEEK_HINDSIGHT = """Fleets are sized for the peak of the week, those that scale for their first two
hours, and classes have the mean lengths of the week: **with hindsight**. What scales goes by what
has come."""

_PAST = """## Hours without hindsight

The first minutes of the hour are a past: fleets are sized by them and by nothing that comes later,
and only the rest of the hour is replayed and counted (`--past 15min`). From then on, policies that
scale judge by what came until then. The other fleets stay as they are, so `static`, the tightest of
them, may fall short."""

_PAPER = """DynamoLLM reports 53% less energy, 38% less carbon and 61% less cost than its baseline,
on its own servers and with its own policy. Our SinglePool is not sized as its baseline is, so the
figures stand beside each other and do not compare. Carbon is at {high:g} g/kWh, and {low:g} g/kWh
from 8 to 17 o'clock (assumed: a grid with solar power). Cost is {gpu:g} for a GPU hour and {kwh:g}
for a kWh (assumed, one currency)."""

_FINDINGS = """## What DynamoLLM finds, and what we find

- **Different requests have different best configurations.** Reproduced: see the circles of `envplan
  serving profile --plot`.
- **A pool for each class saves energy.** Not reproduced: MultiPool uses more than SinglePool
  everywhere, because it cuts a fleet into smaller ones that each need room for their own bursts.
  For each service the loss falls with the size of the fleet: {losses} (GPUs of SinglePool in
  brackets). On the hour of code, MultiPool has {more_gpus} GPUs more, whose idle power of 100 W
  each is {idle:.1f} kWh; it uses {more:.1f} kWh more. With chunked prefill and the nearest deadline
  first, short requests hardly wait for long ones in a common pool, so pools by class gain little
  that could pay for this. Over all ways to sort classes into pools (`static`, `exact`: branch and
  bound, by what the bursts of each pool need), one common pool was the best in both hours.
- **More pools are better up to a point, then fragmentation costs more.** In part: energy rises with
  the number of pools (above), and one pool is the best.
- **Scaling instances saves most.** Reproduced for cost, not for energy. Over coding-week, ScaleInst
  saves {inst_cost}% of MultiPool's cost (ScaleShard {shard_cost}%, ScaleFreq {freq_cost}%), but
  {inst}% of its energy (ScaleShard {shard}%). An instance without work is what scaling takes away,
  and it draws 100 W a GPU, which we assume: {hours:,.0f} GPU hours less are {idle_week:,.0f} kWh of
  the {saved_week:,.0f} kWh saved. More would be saved if idle GPUs drew more.
- **The best TP depends on the load.** Reproduced: ScaleShard saves against MultiPool, and fleets
  re-shard within the week.
- **Lower clocks save energy within the SLOs.** Reproduced, the more the busier GPUs are. ScaleFreq
  saves {freq_hour}% of MultiPool's energy over the hour of code, {freq_coding}% over coding-week
  and {freq_talk}% over conversation-week. Fleets sized for bursts idle most of the time, and idle
  power does not depend on the clock.
- **All of them together save more than any one.** Reproduced: DynamoLLM is below ScaleInst,
  ScaleShard and ScaleFreq on every trace.
- **A bad predictor costs energy or SLOs.** In part: see the table. Requests in the wrong pool are
  mostly still in time, because other pools help. A policy with one pool needs no predictor.
- **Prepared starts matter.** Only to fleets without room to spare. Of fleets sized for 95% of SLOs
  and without headroom, all three preparations take away {start_dynamo:.0f}% (DynamoLLM) and
  {start_envplan:.0f}% (envplan) of the requests that miss their SLOs. With the usual room, nearly
  none miss them anyway (table of starts)."""


def _figures(hours: Mapping[str, Runs], weeks: Mapping[str, Runs]) -> dict[str, Any]:
    """What the findings state, from the results."""
    known = {
        trace: {job.policy: r for job, r in runs}
        for trace, runs in (*hours.items(), *weeks.items())
    }
    losses = [
        f"{100 * (both['MultiPool']['kwh'] / both['SinglePool']['kwh'] - 1):.0f}% on {trace} "
        f"({both['SinglePool']['gpus_mean']:.0f})"
        for trace, both in sorted(
            known.items(),
            key=lambda item: ("cod" not in item[0], item[1]["SinglePool"]["gpus_mean"]),
        )
    ]
    code, coding, talk = (known[trace] for trace in (HOURS[0], *WEEKS))
    multi, inst, one = coding["MultiPool"], coding["ScaleInst"], code["SinglePool"]
    hours_less = multi["gpu_hours"] - inst["gpu_hours"]
    starts = {
        (job.policy, job.varied): 100 - r["slo_percent"]
        for job, r in found("start")
        if "tight" in job.varied
    }
    fewer = {
        policy: 100 * (1 - starts[policy, "tight: " + ", ".join(READY[-1])]
                       / starts[policy, "tight: nothing"])
        for policy in ("DynamoLLM", "envplan")
    }  # fmt: skip
    return {
        "losses": ", ".join(losses),
        "more_gpus": f"{code['MultiPool']['gpus_mean'] - one['gpus_mean']:.0f}",
        "idle": (code["MultiPool"]["gpu_hours"] - one["gpu_hours"]) * IDLE_KW,
        "more": code["MultiPool"]["kwh"] - one["kwh"],
        "inst_cost": _saved(inst, multi, "cost"),
        "shard_cost": _saved(coding["ScaleShard"], multi, "cost"),
        "freq_cost": _saved(coding["ScaleFreq"], multi, "cost"),
        "inst": _saved(inst, multi),
        "shard": _saved(coding["ScaleShard"], multi),
        "hours": hours_less,
        "idle_week": hours_less * IDLE_KW,
        "saved_week": multi["kwh"] - inst["kwh"],
        "freq_hour": _saved(code["ScaleFreq"], code["MultiPool"]),
        "freq_coding": _saved(coding["ScaleFreq"], multi),
        "freq_talk": _saved(talk["ScaleFreq"], talk["MultiPool"]),
        "start_dynamo": fewer["DynamoLLM"],
        "start_envplan": fewer["envplan"],
    }


def found(group: str) -> Runs:
    """The runs of a group that the store has."""
    known = stored()
    return [(job, known[job.key]) for job in jobs() if job.group == group and job.key in known]


def _traces(runs: Runs) -> dict[str, Runs]:
    by_trace: dict[str, Runs] = {}
    for job, result in runs:
        by_trace.setdefault(job.trace, []).append((job, result))
    return by_trace


def _energy(result: Result) -> str:
    return kwh(result["kwh"] * J_PER_KWH)


def _saved(result: Result, base: Result, what: str = "kwh") -> str:
    return f"{100 * (1 - result[what] / base[what]):.1f}"


def _met(result: Result) -> str:
    return f"{result['slo_percent']:.3f}"


def _policy(job: Job, result: Result) -> str:
    """The policy, with a mark where the figures are older than how fleets are sized now."""
    return job.policy + (" †" if result.get("older") else "")


def _side_by_side(trace: str, runs: Runs) -> str:
    base = runs[0][1]
    worst_first = sorted(runs, key=lambda run: -run[1]["kwh"])
    kind = "an hour, real" if trace in HOURS else "a week, real-shaped"
    head = ["policy", "kWh", "saved (%)", "SLOs met (%)", "carbon saved (%)", "cost saved (%)",
            "GPUs, mean", "GPUs, most", "started", "re-sharded"]  # fmt: skip
    rows = [
        [_policy(job, r), _energy(r), _saved(r, base), _met(r), _saved(r, base, "carbon_kg"),
         _saved(r, base, "cost"), f"{r['gpus_mean']:.1f}", str(r["gpus_most"]), str(r["started"]),
         str(r["resharded"])]
        for job, r in worst_first
    ]  # fmt: skip
    return f"### {trace}: {kind}, {base['requests']:,} requests\n\n{table(head, rows)}"


def _varied(
    title: str, words: str, first: str, runs: Runs, *columns: str,
    named: Callable[[Job], str] = lambda job: job.varied,
) -> Iterable[str]:  # fmt: skip
    """A section with a row for each run: what is varied, energy, SLOs and other columns."""
    if not runs:
        return
    head = ["trace", first, "policy", "kWh", "SLOs met (%)", *columns]
    keys = {
        "TTFT met (%)": lambda r: f"{r['first_percent']:.3f}",
        "TBT met (%)": lambda r: f"{r['further_percent']:.3f}",
        "GPUs, mean": lambda r: f"{r['gpus_mean']:.1f}",
        "clock changes": lambda r: f"{r['clock_changes']:,}",
        "other pools helped": lambda r: str(r["helped"]),
        "given up": lambda r: str(r["squashed"]),
        "started": lambda r: str(r["started"]),
    }
    rows = [
        [_trace_name(job), named(job), _policy(job, r), _energy(r), _met(r),
         *(keys[column](r) for column in columns)]
        for job, r in runs
    ]  # fmt: skip
    yield f"## {title}\n\n{words}\n\n{table(head, rows)}"


def _trace_name(job: Job) -> str:
    return job.trace.replace("/", ", ").replace("1 days", "1 day") + (
        f" x{job.load:g}" if job.load != 1 else ""
    )


def _loads(runs: Runs) -> Iterable[str]:
    rows = []
    for trace, mine in _traces(runs).items():
        for load in LOADS:
            at = {job.policy: r for job, r in mine if job.load == load}
            if base := at.pop("SinglePool", None):
                rows += [
                    [
                        trace.replace("/", ", ").replace("1 days", "1 day"),
                        f"{load:g}",
                        policy + (" †" if r.get("older") else ""),
                        _energy(r),
                        _saved(r, base),
                        _met(r),
                    ]
                    for policy, r in at.items()
                ]
    if rows:
        head = ["trace", "times the load", "policy", "kWh", "saved (%)", "SLOs met (%)"]
        yield f"## Other loads\n\n{table(head, rows)}"


def _pasts(runs: Runs) -> Iterable[str]:
    rows = []
    for trace, mine in _traces(runs).items():
        for past in dict.fromkeys(job.varied for job, _ in mine):
            at = {job.policy: r for job, r in mine if job.varied == past}
            rows += [
                [trace, past, policy, _energy(r), _saved(r, at["SinglePool"]), _met(r),
                 f"{r['gpus_mean']:.1f}", str(r["started"])]
                for policy, r in sorted(at.items(), key=lambda run: -run[1]["kwh"])
            ]  # fmt: skip
    head = ["trace", "past", "policy", "kWh", "saved (%)", "SLOs met (%)", "GPUs, mean", "started"]
    if rows:
        yield f"{_PAST}\n\n{table(head, rows)}"


def _prediction(job: Job) -> str:
    wrong, under = map(float, job.varied.split())
    way = {0.5: "both ways", 1.0: "too short", 0.0: "too long"}[under]
    return f"{100 * wrong:g}%" + (f" {way}" if wrong else "")


def page() -> str:
    """The page."""
    hours, weeks = (_traces(found(group)) for group in ("hours", "weeks"))
    parts = [_INTRO]
    if any(result.get("older") for result in stored().values()):
        parts.append(_OLDER)
    parts += [_EQUAL, *serving_baselines.tables("###"), _AGAINST]
    parts += [*_pasts(found("past")), "## Hours", _HINDSIGHT]
    parts += [_side_by_side(trace, runs) for trace, runs in hours.items()]
    if weeks:
        parts += ["## Weeks", _WEEK_HINDSIGHT]
        parts += [_side_by_side(trace, runs) for trace, runs in weeks.items()]
        high, low = max(CARBON.per_kwh), min(CARBON.per_kwh)
        parts.append(_PAPER.format(high=high, low=low, gpu=PRICE_GPU_HOUR, kwh=PRICE_KWH))
    small = f"{SMALL[0].replace('/1 days', ', 1 day')}, at {SMALL[1]:g} of the load"
    sections = (
        _varied(
            "SLOs met against energy",
            "Fleets sized for a quantile of SLOs, without headroom.",
            "sized for (%)", found("frontier"), "GPUs, mean",
        ),
        _loads(found("load")),
        _varied(
            "Number of pools", "DynamoLLM's policy with so many pools at most.", "pools",
            found("pools"), "GPUs, mean",
        ),
        _varied(
            "Predicted output lengths",
            "Outputs predicted one length off; a short one cannot be predicted too short, nor a "
            "long one too long.",
            "wrong", found("predictor"), "TTFT met (%)", "TBT met (%)", "other pools helped",
            named=_prediction,
        ),
        _varied(
            "Starting instances",
            f"What is ready before an instance is needed: machines are booted ahead (vm, 90 s of "
            f"423 s), the weights are on their disks (180 s), engines start from a snapshot of "
            f"their state (138 s). On {small}. Tight: sized for 95% of SLOs, without headroom.",
            "ready", found("start"), "GPUs, mean", "started",
        ),
        _varied(
            "Delay of a change of clock", "Until a clock that was asked for is in force.", "delay",
            found("clocks"), "clock changes",
        ),
        _varied(
            "An emergency",
            "A fleet that is too small (sized for 80% of SLOs). A request whose first token is so "
            "much later than its SLO is given up: DynamoLLM squashes as a last resort. Late "
            "requests wait behind those that can still be in time, so this saves energy and hardly "
            "changes the SLOs.",
            "given up after", found("squash"), "given up",
        ),
    )  # fmt: skip
    parts += [text for section in sections for text in section]
    if lacking := [job for job in jobs() if job.key not in stored()]:
        names = dict.fromkeys(
            f"{job.group} {_trace_name(job)} {job.varied}".strip() for job in lacking
        )
        parts.append(f"Not replayed yet, for want of time: {'; '.join(names)}.")
    parts.append(_FINDINGS.format(**_figures(hours, weeks)))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    atomic_write(sys.argv[1], page())
