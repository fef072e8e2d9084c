"""Frontier files as Python users have them: read, and looked up without tracing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import envplan, small_profile
from envplan import Frontier, FrontierFile, NoAnswerError, Pipeline, Profile, trace_frontier
from envplan._tables import read_table
from envplan.errors import InputError
from envplan.frontier_file import Row, distinct
from envplan.verify import verify_plan


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    small_profile(3, blocking=60.0).save_csv(tmp_path / "profile.csv")
    return Profile.read_csv(tmp_path / "profile.csv")


@pytest.fixture
def frontier(profile: Profile) -> Frontier:
    return trace_frontier(Pipeline("1f1b", 3, 4), profile, gpus_per_stage=2, replicas=3)


@pytest.fixture
def file(frontier: Frontier, tmp_path: Path) -> FrontierFile:
    FrontierFile.from_plans(frontier, distinct(frontier.sample_plans(9))).save(
        tmp_path / "frontier.json"
    )
    return FrontierFile.load(tmp_path / "frontier.json")


def test_a_plan_is_looked_up_for_any_time_and_holds(
    file: FrontierFile, frontier: Frontier, profile: Profile
) -> None:
    for share in (0.0, 0.3, 0.71, 1.0, 1.5):
        time = frontier.min_time + share * (frontier.min_energy_time - frontier.min_time)
        row = [one for one in file.plans if one.iteration_time_s <= time][-1]
        for plan in (file.plan(time), file.plan(time, profile)):
            assert plan.iteration_time == row.iteration_time_s <= time
            assert plan.energy == row.energy_j
            assert verify_plan(plan, profile)


def test_curve_is_that_of_the_frontier_from_t_min_on(
    file: FrontierFile, frontier: Frontier
) -> None:
    for share in (0.0, 0.123, 0.9, 1.0):
        time = frontier.min_time + share * (frontier.min_energy_time - frontier.min_time)
        assert file.energy_at(time) == pytest.approx(frontier.energy_at(time))
    assert file.energy_at(1e6) == file.breakpoints.energy_j[-1]
    with pytest.raises(NoAnswerError, match="T_min is"):
        file.energy_at(file.t_min_s / 2)
    with pytest.raises(NoAnswerError, match="no plan of the file ends by"):
        file.plan(file.t_min_s / 2)


def test_another_profile_is_refused(file: FrontierFile) -> None:
    with pytest.raises(InputError, match="has changed"):
        file.plan(1e6, small_profile(3))


def test_table_holds_the_same_plans(file: FrontierFile, tmp_path: Path) -> None:
    file.save(tmp_path / "frontier.csv")
    rows = list(read_table(tmp_path / "frontier.csv", Row, kind="a frontier").rows())
    assert [row.model_dump() for row in rows] == [
        plan.model_dump(exclude={"frequencies_mhz", "configs"}) for plan in file.plans
    ]


def test_configs_of_operations_are_kept(tmp_path: Path) -> None:
    rows = [
        f"0,{name},{mhz},{time},{energy},{config}"
        for name in ("forward", "backward")
        for mhz, time, energy, config in ((900, 0.2, 20, "a"), (900, 0.1, 30, "b"))
    ]
    header = "stage,instruction,frequency,time,energy,config"
    (tmp_path / "profile.csv").write_text("\n".join([header, *rows, ""]))
    ran = envplan("frontier", "-m", 2, "-o", "f.json", "-q", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    file = FrontierFile.load(tmp_path / "f.json")
    profile = Profile.read_csv(tmp_path / "profile.csv")
    plan = file.plan(1e6, profile)
    assert {operation.config for operation in plan.stages[0]} == {"a"}
    assert envplan("check", "f.json", cwd=tmp_path).code == 0
