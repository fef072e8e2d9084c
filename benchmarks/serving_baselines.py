"""Policies beside fleets that never change: python -m benchmarks.serving_baselines [days|weeks].

The two real hours under every policy that knows only the past; with `days` two days of each
real-shaped week under some policies, with `weeks` the weeks under all. Beside each policy stand the
fixed fleets of least energy that meet as many SLOs, found with hindsight. What comes of a trace is
kept in benchmarks/data/serving_baselines.json; docs/results-baselines.md is written from all that
is kept. The hours take some seconds of CPU, the days some minutes, the weeks more than an hour.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.report import table
from benchmarks.running import note
from envplan._io.files import atomic_write
from envplan.errors import NoAnswerError
from envplan.serving import ServingProfile, Settings, Trace
from envplan.serving.fixed_fleets import rivals_of
from envplan.serving.metrics import kwh
from envplan.serving.observed_trace import observe_trace
from envplan.serving.policies import POLICIES
from envplan.serving.replay import replay_policy
from envplan.serving.trace import make_week

ROOT: Final = Path(__file__).parent.parent
STORE: Final = ROOT / "benchmarks" / "data" / "serving_baselines.json"
PAGE: Final = ROOT / "docs" / "results-baselines.md"
HOURS: Final = ("azure-2023-code", "azure-2023-conversation")
WEEKS: Final = ("coding-week", "conversation-week")
#: The first two days of a week, and the policies that they are replayed under.
DAYS: Final = tuple(f"{week}, 2 days" for week in WEEKS)
DAYS_POLICIES: Final = ("SinglePool", "DynamoLLM", "static", "envplan")
#: Seconds of each trace that policies know before the replay begins.
PASTS_S: Final = {
    **dict.fromkeys(HOURS, 900.0),
    **dict.fromkeys(DAYS, 86_400.0),
    **dict.fromkeys(WEEKS, 86_400.0),
}

_INTRO: Final = """# Results: policies and fixed fleets

<!-- Written by `python -m benchmarks.serving_baselines`. Do not edit. -->

Policies know a past, which is not replayed, and what has come since: 15 minutes of an hour, a day
of a week or of two days of it. Beside each stand fleets that never change: alike instances at one
clock. Of those that meet as many SLOs as the policy, to one request in ten thousand, they take the
least energy. They are found with
**hindsight** of the whole trace, which no policy has. The last three columns split what the policy
saves against TP8 at the highest clock into what another TP saves, what one lower clock saves and
what changes over time save. The worst row comes first. All is modelled (see [serving](serving.md)).
"""


def run_trace(name: str) -> list[dict[str, Any]]:
    """Every policy that fits on a trace, or some on days of a week, beside its rivals."""
    settings = Settings(past_s=PASTS_S[name])
    observed = observe_trace(ServingProfile.builtin(), open_trace(name), settings)
    simulations = []
    for policy in DAYS_POLICIES if name in DAYS else POLICIES:
        try:
            simulations.append(replay_policy(policy, observed, settings))
        except NoAnswerError as error:
            note(str(error))
    results = []
    begin_s = time.process_time()
    for rivals in rivals_of(observed, settings, simulations):
        policy_result = rivals.policy
        results.append(
            {
                "policy": policy_result.policy,
                "energy_j": policy_result.energy_j,
                "slo_attainment": policy_result.slo_attainment,
                **rivals.to_dict(),
            }
        )
        note(f"{name}, {policy_result.policy}: {time.process_time() - begin_s:.1f} s")
    return results


def open_trace(name: str) -> Trace:
    """A trace that ships, or the first two days of a week."""
    if name not in DAYS:
        return Trace.open(name)
    return make_week(WEEKS[DAYS.index(name)], days=2.0)


def stored() -> dict[str, list[dict[str, Any]]]:
    """What is kept, by trace."""
    kept: dict[str, list[dict[str, Any]]] = json.loads(STORE.read_text()) if STORE.exists() else {}
    return kept


def page() -> str:
    """The page of all that is kept."""
    parts = [_INTRO]
    parts += [f"{text}\n" for text in tables("##")]
    return "\n".join(parts)


def tables(heading: str) -> Iterator[str]:
    """A table for each trace that is kept, the worst row first.

    Args:
        heading: marks of its heading's level.
    """
    head = ["policy", "kWh", "SLOs met (%)", "best at the highest clock", "saved (%)"]
    head += ["best at one lower clock", "saved (%) ", "by TP (%)", "by clock (%)", "by changes (%)"]
    for name, results in stored().items():
        rows = [_cells(result) for result in sorted(results, key=_saved_percent)]
        yield f"{heading} {name}\n\n{table(head, rows)}"


def _saved_percent(result: dict[str, Any]) -> float:
    """Energy saved against the best of the fixed fleets, in percent."""
    fleets = result["fixed_fleets"]
    saved = [fleets[name]["saved_percent"] for name in fleets if fleets[name] is not None]
    return min(saved, default=0.0)


def _cells(result: dict[str, Any]) -> list[str]:
    cells = [result["policy"], kwh(result["energy_j"]), f"{100 * result['slo_attainment']:.3f}"]
    for name in ("highest_clock", "lower_clock"):
        rival = result["fixed_fleets"][name]
        if rival is None:
            cells += ["-", "-"]
        else:
            cells.append(f"{rival['fleet']}, {kwh(rival['energy_j'])} kWh")
            cells.append(f"{rival['saved_percent']:.1f}")
    split = result["savings_split"]
    cells += ["-"] * 3 if split is None else [f"{percent:.1f}" for percent in split.values()]
    return cells


def main() -> None:
    """Run the hours, and what else is asked for; write the page."""
    longer = {"days": DAYS, "weeks": WEEKS}
    asked = [name for argument in sys.argv[1:] for name in longer[argument]]
    for name in (*HOURS, *asked):
        kept = {**stored(), name: run_trace(name)}
        atomic_write(STORE, json.dumps(kept, indent=1) + "\n")
    atomic_write(PAGE, page())


if __name__ == "__main__":
    main()
