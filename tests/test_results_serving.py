"""The page of serving results says what replays say, and its sentences what its tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import serving_baselines
from benchmarks.serving_baselines import KeptReplays
from benchmarks.serving_results import page
from benchmarks.serving_runs import HOURS, Job, jobs, run, stored

from envplan.serving import ServingProfile, Settings, Trace, simulate

ROOT = Path(__file__).parent.parent
QUICK = [job for job in jobs() if job.group == "hours" and job.policy in ("DynamoLLM", "envplan")]


def test_the_page_is_what_the_stored_results_make() -> None:
    assert (ROOT / "docs" / "results-serving.md").read_text(encoding="utf-8") == page()


def test_replays_of_a_stopped_run_are_there_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_baselines, "KEPT", tmp_path)
    profile, settings = ServingProfile.builtin(), Settings(past_s=900.0)
    trace = Trace.open(HOURS[0])
    simulation = simulate(profile, trace, "static", settings)
    stopped = KeptReplays(HOURS[0], profile, settings)
    stopped["static"] = simulation
    replays = KeptReplays(HOURS[0], profile, settings)
    assert list(replays) == ["static"]
    assert replays["static"].to_dict() == simulation.to_dict()
    assert "static" not in KeptReplays(HOURS[1], profile, settings)
    assert "static" not in KeptReplays(HOURS[0], profile, Settings())
    replays.clear()
    assert not stopped


def test_what_is_stored_is_of_replays_of_the_page_in_their_order() -> None:
    known = stored()
    assert [job.key for job in jobs() if job.key in known] == list(known)


@pytest.mark.parametrize("job", QUICK, ids=lambda job: f"{job.trace}-{job.policy}")
def test_stored_results_of_an_hour_are_what_a_replay_gives(job: Job) -> None:
    assert run(job) == stored()[job.key]


def by_policy(group: str) -> dict[str, dict[str, dict[str, float]]]:
    """Results of a group by trace and policy."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for job in jobs():
        if job.group == group and job.key in stored():
            found.setdefault(job.trace, {})[job.policy] = stored()[job.key]
    return found


def test_what_the_page_says_of_the_policies_holds() -> None:
    hours, weeks = by_policy("hours"), by_policy("weeks")
    assert set(hours) == set(HOURS)
    for results in (*hours.values(), *weeks.values()):
        assert all(result["slo_percent"] >= 99.9 for result in results.values())
        for less, more in (
            ("SinglePool", "MultiPool"),
            ("ScaleShard", "MultiPool"),
            ("ScaleFreq", "MultiPool"),
            ("DynamoLLM", "ScaleInst"),
            ("DynamoLLM", "MultiPool"),
            ("DynamoLLM", "ScaleShard"),
            ("DynamoLLM", "ScaleFreq"),
            ("envplan", "DynamoLLM"),
        ):
            if less in results and more in results:
                assert results[less]["kwh"] < results[more]["kwh"], (less, more)
    for results in hours.values():
        assert results["exact"] == results["envplan"]
