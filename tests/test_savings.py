"""`envplan savings` and what it rests on, against figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import envplan as package
from cli_helpers import done, envplan, says, small_profile
from envplan.cli.command import Numbers, typed
from envplan.cli.options import JobOptions
from envplan.costs import Rate
from envplan.costs.spending import Site
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile, ProfileMetadata
from envplan.solve import Frontier, trace_frontier


@pytest.fixture(scope="module")
def single() -> Frontier:
    """One operation on one GPU: 1 s and 360 J, 1.25 s and 270 J, or 1.5 s and 255 J; waiting 40 W.

    At 1.25 s and 40 W of waiting power energy still falls towards 1.5 s.
    """
    options = [(1000, 1.0, 360.0), (800, 1.25, 270.0), (600, 1.5, 255.0)]
    rows = [
        (0, name, mhz, time / 2, joules / 2)
        for name in ("forward", "backward")
        for mhz, time, joules in options
    ]
    profile = Profile.from_rows(rows, name="one", metadata=ProfileMetadata(source="measured"))
    return trace_frontier(Pipeline("1f1b", 1, 1), profile, blocking_power=40.0)


def test_a_year_at_t_star_is_that_of_a_calculation_by_hand(single: Frontier) -> None:
    none, best, star = package.savings(
        single, gpus=64, price=0.1, pue=1.25, carbon=400, utilization=0.5
    )
    # 64 GPUs x 360 W x 4380 h x 1.25 = 126,144 kWh.
    assert none.spent.kwh == pytest.approx(126_144)
    assert none.spent.money == pytest.approx(12_614.4)
    assert none.spent.carbon_t == pytest.approx(50.4576)
    assert none.year.kwh == 0
    # 255 of 360 J are left: 105 / 360 are saved.
    assert star.plan.iteration_time == 1.5
    assert star.year.kwh == pytest.approx(126_144 * 105 / 360)
    assert star.month.money == pytest.approx(12_614.4 * 105 / 360 / 12)
    assert star.year.carbon_t == pytest.approx(50.4576 * 105 / 360)
    assert best.plan.energy == star.plan.energy


@pytest.mark.parametrize(
    ("gpu_hour", "time"),
    # A kWh costs 1: of 3.6e6 J. From 1 s to 1.25 s 360 J are saved a second, from there on 60.
    [(0.0, 1.5), (0.05, 1.5), (0.07, 1.25), (0.35, 1.25), (0.37, 1.0)],
)
def test_best_money_weighs_energy_against_gpu_hours(
    single: Frontier, gpu_hour: float, time: float
) -> None:
    none, best, star = package.savings(single, price=1.0, gpu_hour=gpu_hour)
    assert best.plan.iteration_time == time
    assert best.year.money >= max(none.year.money, star.year.money)
    # 8760 h at maximum frequency are 8760 x 1.5 h at T_star.
    lost = 8760 * 0.5 * gpu_hour
    assert star.year.money == pytest.approx(8760 * 0.36 * 105 / 360 - lost)


def test_hosts_and_embodied_carbon_count_for_the_time_that_is_lost(single: Frontier) -> None:
    _, best, star = package.savings(
        single, price=1.0, pue=2.0, host_power=100, carbon=500, embodied=175.2, lifetime=4
    )
    kwh = 2 * 8760 * ((360 + 100) - (255 + 150)) / 1000
    assert star.year.kwh == pytest.approx(kwh)
    # 175.2 kg over 4 x 8760 h are 5 g an hour; 4380 h more are taken.
    assert star.year.carbon_t == pytest.approx(500 * kwh / 1e6 - 0.0219)
    assert best.plan.iteration_time == 1.25  # from there on the host draws more than is saved


def test_two_jobs_on_twice_the_gpus_save_twice_as_much() -> None:
    frontier = trace_frontier(
        Pipeline("1f1b", 3, 4), small_profile(3), gpus_per_stage=2, replicas=2
    )
    own, twice = package.savings(frontier), package.savings(frontier, gpus=24)
    for one, two in zip(own, twice, strict=True):
        assert two.year.kwh == pytest.approx(2 * one.year.kwh)
    plan = own[0].plan
    watts = plan.predicted.baseline.energy_j / plan.predicted.baseline.iteration_time_s
    assert own[0].spent.kwh == pytest.approx(watts * 8.76)
    assert plan.savings.joules == pytest.approx(plan.predicted.baseline.energy_j - plan.energy)
    assert plan.savings.percent == pytest.approx(
        100 * plan.savings.joules / plan.predicted.baseline.energy_j
    )


def test_a_straggler_is_waited_for_in_both_years(single: Frontier) -> None:
    plan = single.plan(straggler_time=2.0)
    spent, saved = Site.of(price=1.0).year(plan)
    # 360 J and 40 W for 1 s, against 255 J and 40 W for half a second, every 2 s.
    assert spent.kwh == pytest.approx(8760 * 400 / 2 / 1000)
    assert saved.kwh == pytest.approx(8760 * (400 - 275) / 2 / 1000)


def test_mean_of_a_rate_weighs_by_time() -> None:
    rate = Rate(begins_s=[0.0, 3600.0], per_kwh=[1.0, 4.0], end_s=10_800.0, repeats=True)
    assert rate.mean == pytest.approx(3.0)
    assert Rate.fixed(0.5).mean == 0.5


@pytest.mark.parametrize(
    "wrong", [{"pue": 0.9}, {"utilization": 0.0}, {"utilization": 2.0}, {"gpus": 0}, {"fuel": 1}]
)
def test_numbers_out_of_range_are_refused(single: Frontier, wrong: dict[str, float]) -> None:
    with pytest.raises(package.InputError):
        package.savings(single, **wrong)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_profile(3, blocking=70.0).save_csv(tmp_path / "profile.csv")
    return tmp_path


def test_table_says_what_is_assumed_and_what_to_type_next(folder: Path) -> None:
    out = done("savings --gpus 6k", cwd=folder)
    says(out, "0.12 USD a kWh (assumed", "6,000 GPUs, energies modelled")
    assert "t CO2" not in out
    assert out.splitlines()[-1] == "next: envplan solve"
    priced = envplan(
        *("savings", "--price", "0.3", "--currency", "EUR", "--carbon", "380", "-m", "8"),
        *("--gpu-hour", "1e-3", "--utilization", "80%"),
        cwd=folder,
    )
    says(priced.out, "EUR a month", "t CO2 a year", "80% of the time")
    following = priced.out.splitlines()[-1]
    assert following.startswith("next: envplan solve --microbatches 8")
    assert envplan(*following.split()[2:], cwd=folder).code == 0


def test_json_is_what_the_library_says(folder: Path) -> None:
    ran = envplan("savings", "--json", "--pue", "1.3", "--carbon", "380", cwd=folder)
    document = json.loads(ran.out)
    assert document["schema"] == "envplan/savings/v1"
    assert document["gpus"] == 3
    assert document["energies_are"] == "modelled"
    profile = Profile.read_csv(folder / "profile.csv")
    rows = package.savings(trace_frontier(profile.pipeline(), profile), pue=1.3, carbon=380)
    for said, row in zip(document["savings"], rows, strict=True):
        assert said["point"] == row.point
        assert said["year"]["carbon_t"] == row.year.carbon_t
        assert said["month"]["kwh"] == row.month.kwh


def test_energies_identified_from_measurements_are_called_so() -> None:
    identified = ProfileMetadata(source="measured", extra={"identified": {"energy": "..."}})
    assert identified.energies_are == "identified"
    assert ProfileMetadata(source="measured").energies_are == "measured"
    assert ProfileMetadata(source="modelled").energies_are == "modelled"


def test_solve_says_what_a_year_saves_with_all_that_is_paid(folder: Path) -> None:
    priced = envplan("solve", "--price", "0.5", "--currency", "EUR", cwd=folder)
    last = priced.out.splitlines()[-1]
    assert last.startswith("a year of it on the job's GPUs saves ")
    assert " EUR at 0.5 a kWh, modelled; next: envplan report plan.json" in last
    last = envplan("solve", cwd=folder).out.splitlines()[-1]
    assert " USD at 0.12 a kWh (assumed; --price says yours)" in last
    more = ["--price", "0.5", "--pue", "1.5", "--host-power", "200", "--carbon", "400"]
    site = envplan("solve", *more, cwd=folder)
    assert "PUE 1.5, hosts of 200 W a GPU" in site.out.splitlines()[-1]
    plan = Plan.load(folder / "plan.json")
    spent, gpus = plan.costs.iteration.plan, plan.job.num_gpus * plan.job.stages
    kwh = 1.5 * (plan.energy + 200 * gpus * plan.iteration_time) / 3.6e6
    assert spent.energy_kwh == pytest.approx(kwh)
    assert spent.money == pytest.approx(0.5 * kwh)
    assert envplan("check", "plan.json", cwd=folder).code == 0


def test_options_can_be_typed_again() -> None:
    job = JobOptions(profile="a b.csv", microbatches=8, vp=2, recompute=True, p2p_latency=0.002)
    words = ["a b.csv", "--microbatches", "8", "--vp", "2", "--p2p-latency", "0.002", "--recompute"]
    assert typed(job) == words
    assert typed(JobOptions(activation_slots=Numbers([8, 7]))) == ["--activation-slots", "8,7"]
    assert typed(JobOptions()) == []
