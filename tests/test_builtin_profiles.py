"""The profiles that ship: made by the script, labelled as modelled, with the shape they claim."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from envplan.profile import Profile, cost_curve
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.builtin_profiles import BUILTINS, listing, main
from tools.document import block

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "profiles"
NAMES = [builtin.name for builtin in BUILTINS]
LISTS = ("measured", "list")


def modelled() -> list[Profile]:
    """Those that the script makes; measured ones come from elsewhere."""
    return [Profile.builtin(name) for name in NAMES]


def test_committed_files_and_lists_are_what_the_script_makes(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "profiles"
    folder.mkdir()
    blocks = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in LISTS)
    page.write_text(f"before\n{blocks}after\n")
    main(str(folder), str(page))
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: (COMMITTED / name).read_bytes() for name in made} == made
    assert sum((COMMITTED / f"{name}.csv").stat().st_size for name in NAMES) < 3_000_000
    text, document = page.read_text(), (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    assert block(text, "list") == block(document, "list") == listing(modelled())
    assert block(text, "measured") == block(document, "measured")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_the_list_of_measured_profiles_says_what_is_known() -> None:
    for name, row in (
        ("sosp24-a100-gpt3-xl-4stage", "| 128 x 8 | 8-6-7-6 | 13.2 at 0.1 |"),
        ("sosp24-a40-gpt3-2.7b-8stage", "| 256 x 4 | uniform |"),
        ("sosp24-a100sxm-gpt3-175b-8stage", "| 24 x ? | - | 14.2 at 0 |"),
    ):
        assert row in listing([Profile.builtin(name)])


@pytest.mark.parametrize("model", ["bert-336m", "gpt-125m", "resnet-152", "megatron-1.3b"])
def test_v100_valleys_are_near_the_middle_of_the_range(model: str) -> None:
    for table in Profile.builtin(f"v100-{model}-4stage").tables():
        valley = table.frequency_mhz[np.argmin(table.energy_10fj)]
        assert valley == pytest.approx((135 + 1530) / 2, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_modelled_profile_is_what_it_claims_to_be(name: str) -> None:
    profile = Profile.builtin(name)
    metadata, powers = profile.metadata, profile.blocking_power_w
    assert metadata.source == "modelled"
    assert profile.num_stages == int(name.rpartition("-")[2].rstrip("stage"))
    assert metadata.tensor_parallel == (8 if name.startswith("h100") else 1)
    assert metadata.schedule == "1f1b"
    for known in ("gpu", "workload", "microbatch_size", "num_microbatches", "date"):
        assert getattr(metadata, known) is not None
    assert metadata.envplan_version is not None
    assert "not measured" in " ".join(metadata.extra["assumptions"])
    assert powers is not None
    assert all(55 <= power <= 90 for power in powers)
    for table in profile.tables():
        # Every clock from the top to below the valley, and a curve to trade along.
        clocks = np.sort(table.frequency_mhz)
        assert len(table) >= (60 if name.startswith("a40") else 50)
        assert set(np.diff(clocks)) == ({7, 8} if name.startswith("v100") else {15})
        valley = table.frequency_mhz[np.argmin(table.energy_10fj)]
        assert clocks[0] < valley < clocks[-1]
        curve = cost_curve(table, round(powers[table.stage] * POWER_UNITS_PER_W))
        assert len(curve.hull_slope_10uw) >= 15


@pytest.mark.parametrize("name", [name for name in NAMES if "gpt3-1.3b" in name])
def test_stages_are_imbalanced_by_a_layer_and_by_the_head(name: str) -> None:
    # Seven layers against six, four against three: no whole number of layers offsets the head.
    profile = Profile.builtin(name)
    times = [int(profile.table(s, "forward").time_ns[0]) for s in range(profile.num_stages)]
    expected = {4: 7 / 6, 8: 4 / 3}[profile.num_stages]
    assert max(times) / min(times) == pytest.approx(expected, abs=0.02)
    assert len(set(times)) >= 3


@pytest.mark.parametrize(
    ("stage", "instruction", "mhz", "seconds", "joules", "within"),
    [
        (0, "forward", 1740, 0.0937, 28.49, (0.02, 0.03)),
        (0, "backward", 1740, 0.2453, 69.57, (0.02, 0.03)),
        (3, "backward", 690, 0.4182, 68.11, (0.1, 0.15)),
    ],
)
def test_a40_is_near_the_points_of_the_zeus_documentation(
    stage: int,
    instruction: str,
    mhz: int,
    seconds: float,
    joules: float,
    within: tuple[float, float],
) -> None:
    table = Profile.builtin("a40-gpt3-1.3b-4stage").table(stage, instruction)
    row = table.frequency_mhz.tolist().index(mhz)
    time_ns, energy_10fj = table.time_ns[row], table.energy_10fj[row]
    assert time_ns / 1e9 == pytest.approx(seconds, rel=within[0])
    assert energy_10fj / ENERGY_UNITS_PER_J == pytest.approx(joules, rel=within[1])


def test_a100_saves_less_at_its_valleys_than_a40() -> None:
    def savings(name: str) -> float:
        tables = Profile.builtin(name).tables()
        top = sum(int(table.energy_10fj[table.max_frequency_option]) for table in tables)
        return 1 - sum(int(table.energy_10fj.min()) for table in tables) / top

    assert 0.10 < savings("a100-gpt3-1.3b-4stage") < 0.17
    assert 0.18 < savings("a40-gpt3-1.3b-4stage") < 0.28
