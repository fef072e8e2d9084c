"""`envplan frontier` and the files that it writes, as Python users have them: read, and looked up
without tracing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import done, envplan, says, small_profile, told
from envplan import FrontierFile, NoAnswerError
from envplan._io.tables import read_table
from envplan.check.plans import verify_plan
from envplan.cli.sketch import sketch
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.plan.frontier_file import Row, distinct
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier

PNG = b"\x89PNG\r\n\x1a\n"
COLUMNS = (
    "iteration_time_s,energy_j,lower_bound_j,gap,average_power_w,slowdown_percent,savings_percent"
)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"profile.csv", "profile.meta.json"}


def test_bare_plot_reads_profile_csv_and_writes_frontier_png(folder: Path) -> None:
    ran = envplan("frontier", "--plot")
    assert ran.code == 0, ran.err
    assert files(folder) == {"frontier.png"}
    assert (folder / "frontier.png").read_bytes().startswith(PNG)
    assert ran.err == ""
    says(ran.out, "waiting GPUs draw 70.0 W (default, the profile does not say")


def test_plot_and_output_stand_in_any_order(folder: Path) -> None:
    for arguments, written in (
        (["--plot", "out.svg"], {"out.svg"}),
        (["profile.csv", "--plot"], {"frontier.png"}),
        (["--plot", "-o", "x.csv"], {"frontier.png", "x.csv"}),
        (["-o", "x.json", "--plot"], {"frontier.png", "x.json"}),
        (["--plot=a.pdf"], {"a.pdf"}),
        (["--plot", "--", "profile.csv"], {"frontier.png"}),
    ):
        done("frontier --quiet", *arguments)
        assert files(folder) == written
        for name in written:
            (folder / name).unlink()


def test_files_hold_plans_and_breakpoints_and_json_is_what_is_printed(folder: Path) -> None:
    document = told("frontier -o f.json")
    assert done("frontier -o f.csv --quiet") == ""
    assert (folder / "f.csv").read_text().splitlines()[0] == COLUMNS
    assert json.loads((folder / "f.json").read_text()) == document
    assert document["schema"] == "envplan/frontier/v1"
    times = document["breakpoints"]["iteration_time_s"]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (document["t_min_s"], document["t_star_s"])
    plans = document["plans"]
    assert len(plans) > 5
    assert plans == sorted(plans, key=lambda plan: plan["iteration_time_s"])
    for plan in plans:
        assert [*plan] == [*COLUMNS.split(","), "frequencies_mhz"]
        assert [len(stage) for stage in plan["frequencies_mhz"]] == [8, 8]
        assert plan["lower_bound_j"] <= plan["energy_j"]
        assert plan["gap"] == pytest.approx(plan["energy_j"] / plan["lower_bound_j"] - 1)
    assert plans[0]["slowdown_percent"] <= 0 < plans[0]["savings_percent"]


def test_sidecar_says_schedule_and_microbatches_unless_told_otherwise(folder: Path) -> None:
    small_profile(4, microbatches=8, schedule="gpipe").save_csv(folder / "profile.csv")
    for arguments, expected in (
        ([], ("gpipe", 4, 8, 1)),
        (["-m", "4", "--schedule", "1f1b"], ("1f1b", 4, 4, 1)),
        (["--chunks", "2", "--schedule", "interleaved"], ("interleaved", 2, 8, 2)),
    ):
        job = told("frontier", *arguments)["job"]
        assert (job["schedule"], job["stages"], job["microbatches"], job["chunks"]) == expected


def test_distinct_leaves_out_plans_that_another_beats() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile())
    plans = frontier.sample_plans(9)
    worse = plans[0].model_copy(
        update={
            "predicted": plans[0].predicted.model_copy(
                update={"iteration_time_s": plans[-1].iteration_time}
            )
        }
    )
    kept: list[Plan] = distinct([*plans, worse, plans[0]])
    assert worse not in kept
    assert len({(p.iteration_time, p.energy) for p in kept}) == len(kept)


def test_a_falling_line_falls() -> None:
    lines = sketch([(0, 1), (1, 0)], [], width=8, height=2, units=(" s", " J"))
    assert lines == ["1 J │⠉⠒⠤⣀", "0 J │    ⠉⠒⠤⣀", "    └────────", "     0 s  1 s"]


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
    with pytest.raises(InputError, match="another profile"):
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
    ran = envplan("frontier", "profile.csv", "-m", 2, "-o", "f.json", "-q", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    file = FrontierFile.load(tmp_path / "f.json")
    profile = Profile.read_csv(tmp_path / "profile.csv")
    plan = file.plan(1e6, profile)
    assert {operation.config for operation in plan.stages[0]} == {"a"}
    assert envplan("check", "f.json", cwd=tmp_path).code == 0


def test_a_loaded_frontier_finds_the_profile_beside_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    jobs.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(jobs)
    small_profile(2).save_csv("p.csv")
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), Profile.read_csv("p.csv"))
    FrontierFile.from_plans(frontier, distinct(frontier.sample_plans(3))).save("f.json")
    monkeypatch.chdir(elsewhere)
    plan = FrontierFile.load(jobs / "f.json").plan(2 * frontier.min_time)
    assert plan.iteration_time <= 2 * frontier.min_time
