"""Policies beside fleets that never change: python -m benchmarks.serving_baselines [TRACE ...].

Traces, by default the two real hours and the two real-shaped weeks, are replayed under every
policy, knowing only the past. Beside each policy stand the fixed fleets of least energy that meet
as many SLOs, found with hindsight. What comes of a trace is kept in
benchmarks/data/serving_baselines.json; docs/results-baselines.md is written from all that is kept.
Replays of a trace are kept in build/serving_baselines/ until all of it is done, so that a run that
was stopped goes on. The hours take some seconds of CPU, each week most of an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import table
from benchmarks.running import note
from envplan._io.files import atomic_write
from envplan.errors import NoAnswerError
from envplan.serving import ServingProfile, Settings, Simulation, Trace
from envplan.serving.fixed_fleets import FixedFleets, Rivals
from envplan.serving.metrics import kwh
from envplan.serving.observed_trace import observe_trace
from envplan.serving.policies import POLICIES
from envplan.serving.replay import replay_policy
from envplan.serving.simulation import TimeQuantiles, TimeSeries

ROOT: Final = Path(__file__).parent.parent
STORE: Final = ROOT / "benchmarks" / "data" / "serving_baselines.json"
KEPT: Final = ROOT / "build" / "serving_baselines"
PAGE: Final = ROOT / "docs" / "results-baselines.md"
HOURS: Final = ("azure-2023-code", "azure-2023-conversation")
WEEKS: Final = ("coding-week", "conversation-week")
#: Seconds of each trace that policies know before the replay begins.
PASTS_S: Final = {**dict.fromkeys(HOURS, 900.0), **dict.fromkeys(WEEKS, 86_400.0)}

_INTRO: Final = """# Results: policies and fixed fleets

<!-- Written by `python -m benchmarks.serving_baselines`. Do not edit. -->

Policies know a past, which is not replayed, and what has come since: 15 minutes of an hour, a day
of a week. Beside each stand fleets that never change: alike instances at one clock. Of those that
meet as many SLOs as the policy, to one request in ten thousand, they take the least energy. They
are found with **hindsight** of the whole trace, which no policy has. The last three columns split
what the policy saves against TP8 at the highest clock into what another TP saves, what one lower
clock saves and what changes over time save. The worst row comes first. All is modelled (see
[serving](serving.md)).
"""


class KeptReplays(MutableMapping[str, Simulation]):
    """Replays of a trace, by policy or fixed fleet, a file each: a run that stopped goes on there.

    Whoever changes how replays go throws them away: files do not know by which code they were made.

    Args:
        trace: its name.
        profile: with which it is replayed.
        settings: of the replays.
    """

    def __init__(self, trace: str, profile: ServingProfile, settings: Settings) -> None:
        made_with = hashlib.sha256(f"{profile.sha256} {settings}".encode()).hexdigest()
        self._trace = trace
        self._folder = KEPT / f"{trace} {made_with[:12]}"
        self._last_s = time.process_time()

    def __getitem__(self, name: str) -> Simulation:
        path = self._path(name)
        if not path.exists():
            raise KeyError(name)
        return _read_simulation(path.read_text())

    def __setitem__(self, name: str, simulation: Simulation) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path(name), _simulation_text(simulation))
        now_s = time.process_time()
        note(
            f"{self._trace}, {name}: {kwh(simulation.energy_j)} kWh, "
            f"{100 * simulation.slo_attainment:.4f}% of SLOs met, {now_s - self._last_s:.1f} s"
        )
        self._last_s = now_s

    def __delitem__(self, name: str) -> None:
        self._path(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self._folder.glob("*.json")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _simulation_text(simulation: Simulation) -> str:
    """A simulation as JSON, all of it."""
    series = {name: values.tolist() for name, values in vars(simulation.series).items()}
    return json.dumps({**vars(simulation), "series": series}, default=lambda number: number.item())


def _read_simulation(text: str) -> Simulation:
    """The simulation of such a JSON text."""
    fields = json.loads(text)
    series = {name: np.array(values) for name, values in fields["series"].items()}
    fields["series"] = TimeSeries(**series)
    for name in ("ttft_s", "tbt_s"):
        fields[name] = TimeQuantiles(*fields[name])
    return Simulation(**fields)


def run_trace(name: str) -> Iterator[dict[str, Any]]:
    """Every policy that fits on a trace, beside its rivals."""
    profile, settings = ServingProfile.builtin(), Settings(past_s=PASTS_S[name])
    observed = observe_trace(profile, Trace.open(name), settings)
    replays = KeptReplays(name, profile, settings)
    fixed_fleets = FixedFleets(observed, settings, replays=replays)
    for policy in POLICIES:
        if policy not in replays:
            try:
                replays[policy] = replay_policy(policy, observed, settings)
            except NoAnswerError as error:
                note(str(error))
                continue
        yield _result(fixed_fleets.beside(replays[policy]))
    replays.clear()


def _result(rivals: Rivals) -> dict[str, Any]:
    return {
        "policy": rivals.policy.policy,
        "energy_j": rivals.policy.energy_j,
        "slo_attainment": rivals.policy.slo_attainment,
        **rivals.to_dict(),
    }


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
        text = f"{heading} {name}\n\n{table(head, rows)}"
        run = {result["policy"] for result in results}
        if lacking := [policy for policy in POLICIES if policy not in run]:
            text += f"\n\nNot replayed yet, or too large for the fleet: {', '.join(lacking)}."
        yield text


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
    """Run traces, keep what comes of each policy, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", help=f"of {', '.join(PASTS_S)}; default: all")
    for name in parser.parse_args().traces or PASTS_S:
        results = []
        for result in run_trace(name):
            results.append(result)
            atomic_write(STORE, json.dumps({**stored(), name: results}, indent=1) + "\n")
            note(f"{name}, {result['policy']}: saves {_saved_percent(result):.1f}% or more")
    atomic_write(PAGE, page())


if __name__ == "__main__":
    main()
