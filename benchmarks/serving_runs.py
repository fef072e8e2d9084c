"""Replays for the page of serving results: python -m benchmarks.serving_runs [GROUP ...].

Runs every replay that the page shows, or those of some groups, one after another, and keeps what
came of them in benchmarks/data/serving.json. The weeks take hours; --missing leaves out what the
file has, unless it is marked as older.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from benchmarks.running import note
from envplan._io.files import atomic_write
from envplan.costs.rates import Rate
from envplan.serving import ServingProfile, Simulation, Trace
from envplan.serving.observed_trace import ObservedTrace, observe_trace
from envplan.serving.policies import POLICIES
from envplan.serving.replay import replay_policy
from envplan.serving.settings import Settings
from envplan.serving.trace import make_week
from envplan.units import J_PER_KWH

STORE: Final = Path(__file__).parent / "data" / "serving.json"
HOURS: Final = ("azure-2023-code", "azure-2023-conversation")
WEEKS: Final = ("coding-week", "conversation-week")
SMALL: Final = ("coding-week/1 days", 0.1)  # what sensitivities are measured on, and its load
LOADS: Final = (0.1, 0.3, 1.0, 3.0)
PASTS_S: Final = (900.0, 1800.0)
QUANTILES: Final = (90.0, 99.0, 99.5, 99.9, 99.95, 99.99)
POOLS: Final = (1, 2, 3, 5, 9)
WRONG: Final = ((0.0, 0.5), (0.05, 0.5), (0.2, 0.5), (0.5, 0.5), (0.2, 1.0), (0.2, 0.0))
WRONG_WEEK: Final = ((0.05, 0.5), (0.2, 1.0), (0.2, 0.0))
READY: Final = ((), ("vm",), ("vm", "weights"), ("vm", "weights", "snapshot"))
DELAYS_S: Final = (0.0, 0.03, 0.2, 1.0)
SQUASH_S: Final = (1.0, 10.0, 60.0, 1e9)

#: Rates for carbon and cost: assumed, not of any grid or cloud. Solar power at noon halves carbon.
CARBON: Final = Rate(
    begins_s=[0.0, 8 * 3600.0, 17 * 3600.0], per_kwh=[450.0, 225.0, 450.0], end_s=86_400.0,
    repeats=True,
)  # fmt: skip
PRICE_KWH: Final = 0.12
PRICE_GPU_HOUR: Final = 2.5


@dataclass(frozen=True)
class Job:
    """A replay of the page: its group, trace, times the load, policy, and what it varies."""

    group: str
    trace: str
    load: float
    policy: str
    varied: str
    settings: Settings

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"{self.group}/{self.trace}/x{self.load:g}/{self.policy}/{self.varied}"

    @property
    def question(self) -> tuple[Any, ...]:
        """What decides its result; groups have some in common."""
        return self.trace, self.load, self.policy, self.settings


#: Settings that the replays of a group start from.
USUAL: Final = Settings()


def jobs() -> Iterator[Job]:
    """All replays of the page, quick groups first."""
    yield from hours_and_clocks()
    yield from known_past()
    yield from wrong_predictions()
    yield from squashed_prompts()
    yield from scaled_loads()
    yield from numbers_of_pools()
    yield from slo_quantiles()
    yield from starts_of_instances()
    for trace in WEEKS:
        for policy in POLICIES:
            yield Job("weeks", trace, 1.0, policy, "", USUAL)


def hours_and_clocks() -> Iterator[Job]:
    """Every policy on the hours, and clocks that come late."""
    for trace in HOURS:
        for policy in POLICIES:
            yield Job("hours", trace, 1.0, policy, "", USUAL)
        for policy in ("ScaleFreq", "envplan"):
            for delay in DELAYS_S:
                slow = replace(USUAL, switch_latency_s=delay)
                yield Job("clocks", trace, 1.0, policy, f"{delay:g} s", slow)


def known_past() -> Iterator[Job]:
    """Every policy that knows only so much of the past."""
    for trace in HOURS:
        for past in PASTS_S:
            for policy in POLICIES:
                known = replace(USUAL, past_s=past)
                yield Job("past", trace, 1.0, policy, f"{past / 60:g} min", known)


def wrong_predictions() -> Iterator[Job]:
    """Output lengths that are predicted wrongly."""
    for trace in (HOURS[1], *WEEKS):
        for wrong, under in WRONG if trace in HOURS else WRONG_WEEK:
            settings = replace(
                USUAL, mispredicted_percent=100 * wrong, underestimated_percent=100 * under
            )
            for policy in ("MultiPool", "DynamoLLM", "envplan"):
                yield Job("predictor", trace, 1.0, policy, f"{wrong:g} {under:g}", settings)


def squashed_prompts() -> Iterator[Job]:
    """A fleet that is too small, by how long late requests are kept."""
    for squash in SQUASH_S:
        few = replace(USUAL, slo_quantile_percent=80.0, headroom_percent=0.0, squash_s=squash)
        yield Job("squash", HOURS[0], 1.0, "SinglePool", f"{squash:g} s", few)


def scaled_loads() -> Iterator[Job]:
    """A tenth to three times the load; three times a week's requests take too long: one day."""
    loads_by_trace = dict.fromkeys(HOURS, LOADS)
    loads_by_trace |= dict.fromkeys(WEEKS, LOADS[:-1])
    loads_by_trace |= {f"{week}/1 days": LOADS[-1:] for week in WEEKS}
    for trace, loads in loads_by_trace.items():
        for load in loads:
            for policy in ("SinglePool", "DynamoLLM", "envplan"):
                yield Job("load", trace, load, policy, "", USUAL)


def numbers_of_pools() -> Iterator[Job]:
    """DynamoLLM with one to nine pools."""
    for trace, load in ((HOURS[0], 1.0), (HOURS[1], 1.0), SMALL, (WEEKS[0], 1.0), (WEEKS[1], 1.0)):
        for pools in POOLS:
            yield Job(
                "pools", trace, load, "DynamoLLM", f"{pools}", replace(USUAL, max_pools=pools)
            )


def slo_quantiles() -> Iterator[Job]:
    """Energy against the share of requests within their SLOs."""
    for trace in HOURS:
        for policy in ("DynamoLLM", "envplan"):
            for quantile in QUANTILES:
                settings = replace(USUAL, slo_quantile_percent=quantile, headroom_percent=0.0)
                yield Job("frontier", trace, 1.0, policy, f"{quantile:g}", settings)


def starts_of_instances() -> Iterator[Job]:
    """Instances that start from less or more that is ready, usually and tightly sized."""
    tight = replace(USUAL, slo_quantile_percent=95.0, headroom_percent=0.0)
    for label, sized in (("", USUAL), ("tight: ", tight)):
        for policy in ("DynamoLLM", "envplan"):
            for ready in READY:
                varied = label + (", ".join(ready) or "nothing")
                settings = replace(sized, ready=tuple(ready))
                yield Job("start", *SMALL, policy, varied, settings)


@lru_cache(maxsize=1)
def _trace(name: str, load: float) -> Trace:
    name, _, days = name.partition("/")
    trace = make_week(name, days=float(days.removesuffix(" days"))) if days else Trace.open(name)
    return trace if load == 1 else trace.scaled(load)


@lru_cache(maxsize=1)
def _stream(trace: str, load: float, seen: Settings) -> ObservedTrace:
    return observe_trace(ServingProfile.builtin(), _trace(trace, load), seen)


def _what(job: Job) -> tuple[str, float, Settings]:
    """What a job replays: jobs in a row that replay the same share its stream."""
    asked = job.settings
    return (
        job.trace,
        job.load,
        Settings(
            mispredicted_percent=asked.mispredicted_percent,
            underestimated_percent=asked.underestimated_percent,
            past_s=asked.past_s,
        ),
    )


def run(job: Job) -> dict[str, Any]:
    """What comes of a job: everything that the page states of it."""
    return outcome(replay_policy(job.policy, _stream(*_what(job)), job.settings))


def outcome(result: Simulation) -> dict[str, Any]:
    """The figures of a simulation, energies in kWh."""
    energy = result.energy_j / J_PER_KWH
    return {
        "requests": result.requests,
        "kwh": round(energy, 4),
        "slo_percent": round(100 * result.slo_attainment, 4),
        "first_percent": round(100 * result.first_tokens_in_time, 4),
        "further_percent": round(100 * result.further_tokens_in_time, 4),
        "gpus_mean": round(result.gpus_mean, 2),
        "gpus_most": int(result.gpus_most),
        "gpu_hours": round(result.gpu_hours, 1),
        "carbon_kg": round(result.cost_at(CARBON) / 1e3, 3),
        "cost": round(energy * PRICE_KWH + result.gpu_hours * PRICE_GPU_HOUR, 2),
        "started": result.instances_started,
        "resharded": result.instances_resharded,
        "copies_moved": round(result.weights_moved_copies, 3),
        "clock_changes": result.clock_changes,
        "helped": result.requests_helped,
        "squashed": result.requests_squashed,
    }


def stored() -> dict[str, dict[str, Any]]:
    """What the store holds, by key."""
    known: dict[str, dict[str, Any]] = json.loads(STORE.read_text()) if STORE.exists() else {}
    return known


def main() -> None:
    """Run jobs and keep what comes of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help="of jobs; default: all")
    parser.add_argument("--missing", action="store_true", help="only what is missing or older")
    options = parser.parse_args()
    first: dict[Any, int] = {}
    for place, job in enumerate(jobs()):
        first.setdefault(_what(job), place)
    done = _up_to_date() if options.missing else set()
    same = {job.question: stored()[job.key] for job in jobs() if job.key in done}
    for job in sorted(jobs(), key=lambda job: first[_what(job)]):
        if (options.groups and job.group not in options.groups) or job.key in done:
            continue
        begin = time.process_time()
        result = same[job.question] = same.get(job.question) or run(job)
        found = {**stored(), job.key: result}
        order = {each.key: place for place, each in enumerate(jobs())}
        kept = {key: found[key] for key in sorted(order, key=order.__getitem__) if key in found}
        atomic_write(STORE, json.dumps(kept, indent=1) + "\n")
        note(f"{job.key}: {time.process_time() - begin:.1f} s, {result['slo_percent']}%")


def _up_to_date() -> set[str]:
    """Keys of the results in the store that are not marked as older."""
    return {key for key, result in stored().items() if not result.get("older")}


if __name__ == "__main__":
    main()
