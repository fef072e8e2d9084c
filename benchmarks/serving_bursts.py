"""Bursts that nothing announces: python -m benchmarks.serving_bursts.

An hour of real conversations runs until its middle. From then on requests come three times as
often, or their prompts are four times as long, or both, and each of these again at half the rate.
Policies know the first 15 minutes. What each meets in the half hour after is written into
docs/results-bursts.md, the worst row first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.report import table
from benchmarks.running import note
from envplan._io.files import atomic_write
from envplan.errors import NoAnswerError
from envplan.serving import ServingProfile, Settings, Simulation, Trace
from envplan.serving.classes import DEFAULT_CLASSES
from envplan.serving.metrics import kwh
from envplan.serving.observed_trace import observe_trace
from envplan.serving.policies import POLICIES
from envplan.serving.replay import replay_policy

PAGE: Final = Path(__file__).parent.parent / "docs" / "results-bursts.md"
TRACE: Final = "azure-2023-conversation"
PAST_S: Final = 900.0
BURST_S: Final = 1800.0  # when it begins
SEED: Final = 0

_INTRO: Final = """# Results: bursts

<!-- Written by `python -m benchmarks.serving_bursts`. Do not edit. -->

The hour of real conversations, on the modelled fleet of [serving](serving.md). In its middle the
rate of requests, the length of their prompts or both change for good; nothing announces it. Every
policy knows the first 15 minutes, and what has come since. What it meets is counted over the half
hour from the change on, and over the second quarter of an hour of it, by when instances serve that
were asked for at once (423 s). Policies that do not scale are sized by the first 15 minutes. The
worst row comes first. Figures are modelled and of one draw.

"""


@dataclass(frozen=True)
class Burst:
    """What changes in the middle of the hour.

    Attributes:
        times_requests: so many times as many come.
        times_prompt: so many times as long are their prompts.
        load: of the whole hour: 1, or 0.5 for half the requests.
    """

    times_requests: int
    times_prompt: int
    load: float

    def __str__(self) -> str:
        changes = []
        if self.times_requests > 1:
            changes.append(f"{self.times_requests}x requests")
        if self.times_prompt > 1:
            changes.append(f"{self.times_prompt}x prompts")
        rate = "" if self.load == 1 else ", half the rate"
        return " and ".join(changes) + rate


BURSTS: Final = tuple(
    Burst(requests, prompt, load)
    for load in (1.0, 0.5)
    for requests, prompt in ((3, 1), (1, 4), (3, 4))
)


def burst_trace(burst: Burst) -> Trace:
    """The hour with a burst in its second half."""
    calm = Trace.open(TRACE)
    if burst.load != 1:
        calm = calm.scaled(burst.load, SEED)
    crowded = calm.scaled(burst.times_requests, SEED) if burst.times_requests > 1 else calm
    before = calm.part(calm.arrival_s < BURST_S)
    after = crowded.part(crowded.arrival_s >= BURST_S)
    profile = ServingProfile.builtin()
    inputs_before, outputs_before = before.lengths(profile)
    inputs_after, outputs_after = after.lengths(profile)
    inputs = np.concatenate([inputs_before, burst.times_prompt * inputs_after]).astype(np.int32)
    outputs = np.concatenate([outputs_before, outputs_after])
    return replace(
        calm,
        name=f"{TRACE}, {burst}",
        arrival_s=np.concatenate([before.arrival_s, after.arrival_s]),
        input_tokens=inputs,
        output_tokens=outputs,
        class_index=DEFAULT_CLASSES.classify(inputs, outputs),
        covered_s=calm.duration_s,
        provenance=f"{TRACE} with {burst} from {BURST_S:g} s on",
    )


def met_percent(result: Simulation, begin_s: float) -> float:
    """Percent of the requests from a time on that met their SLOs."""
    is_later = result.series.time_s >= begin_s
    requests = result.series.requests[is_later].sum()
    return float(100 * result.series.attained[is_later].sum() / requests)


def run_bursts() -> Iterator[tuple[Burst, Simulation]]:
    """Every policy that fits, under every burst."""
    settings = Settings(past_s=PAST_S)
    for burst in BURSTS:
        observed = observe_trace(ServingProfile.builtin(), burst_trace(burst), settings)
        for policy in POLICIES:
            begin_s = time.process_time()
            try:
                result = replay_policy(policy, observed, settings)
            except NoAnswerError as error:
                note(f"{burst}: {error}")
                continue
            note(f"{burst}, {policy}: {time.process_time() - begin_s:.1f} s")
            yield burst, result


def page() -> str:
    """The page, the worst row first."""
    rows = []
    for burst, result in run_bursts():
        rows.append((met_percent(result, BURST_S), burst, result))
    rows.sort(key=lambda row: row[0])
    cells = [
        [
            str(burst),
            result.policy,
            f"{met:.2f}",
            f"{met_percent(result, BURST_S + 900.0):.2f}",
            kwh(result.energy_j),
            f"{result.gpus_most:.0f}",
            str(result.instances_started),
        ]
        for met, burst, result in rows
    ]
    head = ["from the middle on", "policy", "SLOs met (%)", "after 15 min (%)", "kWh", "GPUs, most"]
    return _INTRO + table([*head, "started"], cells) + "\n"


if __name__ == "__main__":
    atomic_write(PAGE, page())
