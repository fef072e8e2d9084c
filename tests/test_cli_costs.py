from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import done, refused, says, small_profile, told
from envplan.costs.spending import check_costs
from envplan.errors import InputError
from envplan.plan import Plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    rows = "".join(f"{hour},{0.1 if hour < 6 else 0.4},{300 + hour}\n" for hour in range(24))
    (tmp_path / "day.csv").write_text(f"hour,price,carbon\n{rows}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def solved(*arguments: str) -> Plan:
    done("solve --quiet", *arguments)
    plan = Plan.load("plan.json")
    check_costs(plan)
    return plan


def test_with_a_straggler_costs_are_until_it_has_finished(folder: Path) -> None:
    rates = ("--price", "0.3", "--iterations", "1000")
    plan = solved(*rates, "--straggler-time", "2.5")
    until, costs = plan.predicted.until_straggler, plan.costs
    assert until is not None
    assert costs is not None
    assert costs.run is not None
    for spent, joules in (
        (costs.run.plan, until.energy_j),
        (costs.run.max_frequency, until.baseline_energy_j),
    ):
        assert spent.time_s == pytest.approx(2500.0)
        assert spent.energy_kwh == pytest.approx(1000 * joules / 3.6e6)
        assert spent.money == pytest.approx(0.3 * 1000 * joules / 3.6e6)
    assert "costs follow from" in done("check plan.json")
    alone = plan.target.model_copy(update={"straggler_time_s": None})
    with pytest.raises(InputError, match=r"costs\.iteration"):
        check_costs(plan.model_copy(update={"target": alone}))
    said = done("solve --straggler-time 2.5", *rates)
    assert "iterations that last until the straggler has finished" in said
    # One that is not slower than the plan changes nothing.
    assert solved(*rates, "--straggler-time", "0.5").costs == solved(*rates).costs


def test_the_cheapest_plan_in_time_is_recorded(folder: Path) -> None:
    work = ("--price", "day.csv", "--iterations", "20000")
    document = told("solve --deadline 12h", *work)
    costs = document["costs"]
    assert costs["price"]["file"] == "day.csv"
    assert costs["minimized"] == "money"
    assert costs["deadline_s"] == 12 * 3600
    assert costs["run"]["plan"]["time_s"] <= 12 * 3600
    assert costs["run"]["plan"]["money"] < costs["run"]["max_frequency"]["money"]
    assert "least money" in document["notes"][-1]
    assert "12 h" in document["notes"][-1]
    plan = Plan.load(folder / "plan.json")
    assert len(check_costs(plan)) == 2
    assert plan.iteration_time * 20000 <= 12 * 3600


def test_a_shorter_deadline_costs_more(folder: Path) -> None:
    fast = solved("--price", "1", "--iterations", "20000", "--deadline", "8h")
    slow = solved("--price", "1", "--iterations", "20000", "--deadline", "1d12h")
    assert fast.iteration_time * 20000 <= 8 * 3600
    assert fast.energy > slow.energy


def test_tokens_stand_for_iterations(folder: Path) -> None:
    plan = solved("--tokens", "1e6", "--tokens-per-iteration", "3000", "--price", "0.3")
    assert plan.costs is not None
    assert plan.costs.iterations == 334
    assert plan.costs.tokens == 1_000_000
    refused("solve --tokens 1e6", "--tokens-per-iteration", "sidecar")


def test_the_same_hours_at_another_start_cost_something_else(folder: Path) -> None:
    rows = "".join(f"2026-12-01T{h:02d}:00,{0.1 if h < 6 else 0.4}\n" for h in range(24))
    (folder / "dated.csv").write_text(f"time,price\n{rows}")
    work = ("--price", "dated.csv", "--iterations", "5000", "--slowdown", "1")
    night = solved(*work).costs
    day = solved(*work, "--start", "2026-12-01T08:00").costs
    assert night is not None
    assert day is not None
    assert day.iteration.plan.money == pytest.approx(4 * (night.iteration.plan.money or 0.0))


def test_a_deadline_is_met_with_clocks_that_follow_late(folder: Path) -> None:
    usual = solved("--iterations", "1000", "--deadline", "1500s")
    late = solved("--iterations", "1000", "--deadline", "1500s", "--switch-latency", "20")
    assert late.job.switch_latency_s == 0.02
    assert late.iteration_time * 1000 <= 1500
    assert late.energy >= usual.energy_lower_bound
    done("check plan.json")


def test_replays_are_priced_on_average_and_waiting_too(folder: Path) -> None:
    plan = solved("--price", "0.25", "--carbon", "400", "--iterations", "1000")
    prices = "simulate --price 0.25 --carbon 400 --iterations 1000"
    assert plan.costs is not None
    assert plan.costs.run is not None
    exact = told(prices)["costs"]
    assert exact["run"] == pytest.approx(plan.costs.run.plan.model_dump())
    assert exact["iteration"] == pytest.approx(plan.costs.iteration.plan.model_dump())
    waited = told(f"{prices} --sync-time 3")
    assert waited["costs"]["iteration"]["time_s"] == 3
    assert waited["costs"]["run"]["money"] == pytest.approx(waited["energy_j"] / 3.6e6 * 250)
    noisy = told(f"{prices} --noise 5 --runs 7")
    assert noisy["costs"]["iteration"]["energy_kwh"] != noisy["energy_j"] / 3.6e6
    says(done(f"{prices} --currency EUR"), "1,000 iterations cost ", " EUR")


def test_planners_are_compared_by_what_their_runs_cost(folder: Path) -> None:
    line = "compare --price day.csv --carbon 400 --iterations 5000"
    said = done(line)
    says(said, "The run: 5,000 iterations, all GPUs, modelled", "cost (USD)", "CO2")
    planners = told(line)["planners"]
    spent = {entry["planner"]: entry["costs"]["run"]["plan"] for entry in planners}
    assert spent["frontier"]["money"] < spent["max_frequency"]["money"]
    assert spent["frontier"]["carbon_g"] < spent["max_frequency"]["carbon_g"]


def test_planners_are_compared_by_what_their_runs_cost_until_a_straggler_has_finished(
    folder: Path,
) -> None:
    said = told("compare --price 0.2 --straggler-slowdown 30")
    for entry in said["planners"]:
        pair = entry["costs"]["iteration"]
        assert pair["plan"]["money"] == pytest.approx(0.2 * entry["straggler_energy_j"] / 3.6e6)
        assert pair["plan"]["time_s"] == max(said["straggler_time_s"], entry["iteration_time_s"])
        assert pair["max_frequency"]["time_s"] == said["straggler_time_s"]


def test_clusters_and_unlike_replicas_are_priced_as_a_whole(folder: Path) -> None:
    solved()
    prices = "simulate --price 0.2 --carbon 400 --iterations 1000"
    whole = told(f"{prices} --dp 4 --straggler 1.3 --strong-scaling 1,2")["cluster"]
    assert len(whole) == 3
    for report in whole:
        pair = report["costs"]["run"]
        assert pair["plan"]["money"] == pytest.approx(200 * report["energy_j"] / 3.6e6)
        assert pair["plan"]["time_s"] == pytest.approx(1000 * report["time_s"])
        before = pair["max_frequency"]
        assert before["carbon_g"] == pytest.approx(4e5 * report["baseline_energy_j"] / 3.6e6)
    both = told(f"{prices} --replica plan.json")["replicas"]
    assert both["costs"]["plan"]["money"] == pytest.approx(200 * both["energy_j"] / 3.6e6)
    table = done(f"{prices} --dp 4 --straggler 1.3 --currency EUR")
    assert "The run: 1,000 iterations, all GPUs" in table
