"""`envplan compare` and `envplan solve --planner`, through the installed command and in process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import done, says, small_profile, told
from envplan.plan import Plan
from envplan.planners import PLANNERS
from envplan.plotting.frontier import LOOKS
from envplan.profile import Profile, ProfileMetadata


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile(3, blocking=70.0, microbatches=6).save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_table_shows_every_planner(folder: Path) -> None:
    out = done("compare")
    for name in PLANNERS:
        assert name in out
    says(
        out,
        "slower (%) | saved (%) | gap (%) | intrinsic (%) | planned in (s)",
        "envpipe stopped after | modelled",
    )
    assert "extrinsic" not in out
    assert "published" not in out


def test_plot_alone_draws_compare_png_and_svg_is_the_same_again(folder: Path) -> None:
    assert "wrote compare.png" in done("compare profile.csv --straggler-slowdown 3 --plot")
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    texts = []
    for name in ("a.svg", "b.svg"):
        done("compare -q --plot", name)
        texts.append((folder / name).read_text())
    assert texts[0] == texts[1]
    assert all(LOOKS[name].name in texts[0] for name in PLANNERS)


def test_json_has_what_the_table_has(folder: Path) -> None:
    document = told("compare")
    assert document["straggler_time_s"] is None
    assert document["published"] is None
    assert {entry["planner"] for entry in document["planners"]} == set(PLANNERS)
    for entry in document["planners"]:
        assert entry["energy_lower_bound_j"] <= entry["frontier_energy_j"] <= entry["energy_j"]
        assert entry["extrinsic_bloat_j"] is None
    assert document["envpipe"]["stopped"] in ("outer envelope", "highest clocks")


def test_straggler_by_time_and_by_slowdown_is_the_same(folder: Path) -> None:
    by_slowdown = told("compare --straggler-slowdown 3")
    time = by_slowdown["straggler_time_s"]
    assert time == pytest.approx(1.03 * by_slowdown["baseline"]["iteration_time_s"])
    by_time = told("compare --straggler-time", repr(time))
    for one, other in zip(by_slowdown["planners"], by_time["planners"], strict=True):
        assert one["extrinsic_bloat_j"] == other["extrinsic_bloat_j"]
        assert one["straggler_energy_j"] >= one["energy_j"]


def test_published_figure_is_labelled_as_such(folder: Path) -> None:
    metadata = ProfileMetadata(
        num_microbatches=4,
        extra={"published": {"savings_percent": 25.2, "slowdown_percent": 1, "source": "a paper"}},
    )
    rows = [(0, name, mhz, 90 / mhz, 5.0 + mhz / 300) for name in ("forward", "backward")
            for mhz in (900, 1200)]  # fmt: skip
    Profile.from_rows(rows, metadata=metadata).save_csv(folder / "known.csv")
    says(done("compare known.csv"), "published", "not here: 25.2% saved at 1% slowdown (a paper)")


def test_activation_slots_hold_envpipe_back(folder: Path) -> None:
    assert told("compare")["envpipe"]["forwards_ahead"][0] > 0
    assert told("compare --activation-slots 3")["envpipe"]["forwards_ahead"] == [0, 0, 0]
    capped = told("compare --schedule envpipe --activation-slots 4,2,1")
    assert capped["envpipe"]["forwards_ahead"] == [1, 0, 0]
    assert {entry["schedule"] for entry in capped["planners"]} == {"envpipe"}


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_solve_with_any_planner_writes_a_plan_that_check_proves(folder: Path, name: str) -> None:
    slots = ("--activation-slots", 4) if name == "envpipe" else ()
    done("solve -q --planner", name, *slots)
    plan = Plan.load(folder / "plan.json")
    assert plan.planner == name
    assert plan.job.schedule == ("envpipe" if name == "envpipe" else "1f1b")
    if name == "envpipe":
        assert plan.job.forwards_ahead == [1, 1, 0]
        assert list(plan.job.pipeline().forwards_ahead) == [1, 1, 0]
    done("check -q plan.json")
