"""What `envplan solve` does with a latency that was measured, published, or is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import done, envplan, refused, says, small_profile, told
from envplan import Pipeline, Plan, trace_frontier
from envplan.devices.modelled import GPUS, gpu
from envplan.profile import ClockLatency, Profile, ProfileMetadata, SwitchLatency

MEASURED = SwitchLatency(
    source="measured",
    by_mhz={
        210: ClockLatency(median_s=0.4, p95_s=0.5),  # no row of the profile has it
        780: ClockLatency(median_s=0.02, p95_s=0.03),
        1740: ClockLatency(median_s=0.01, p95_s=0.02),
    },
)


def write(folder: Path, *, gpu_name: str | None = None, latency: SwitchLatency | None) -> Profile:
    profile = small_profile()
    metadata = ProfileMetadata(
        gpu=gpu_name, source="modelled", num_microbatches=4, switch_latency=latency
    )
    profile.metadata = metadata
    profile.save_csv(folder / "profile.csv")
    return Profile.read_csv(folder / "profile.csv")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_measured_latency_is_planned_with_and_said(folder: Path) -> None:
    write(folder, latency=MEASURED)
    says(done("solve --slowdown 5"), "every clock comes 20 ms after it is asked for")
    says(done("solve --slowdown 5"), "that latency is the profile's: 20 ms, the largest median")
    assert Plan.load(folder / "plan.json").job.switch_latency_s == 0.02
    done("check plan.json")


def test_a_measured_latency_is_no_slip_of_units(folder: Path) -> None:
    late = SwitchLatency(source="measured", by_mhz={1740: ClockLatency(median_s=0.7, p95_s=0.8)})
    write(folder, latency=late)
    assert envplan("solve", "--slowdown", "5").err == ""
    assert "takes units" in envplan("solve", "--slowdown", "5", "--switch-latency", "800").err


def test_switch_latency_0_plans_for_clocks_at_once(folder: Path) -> None:
    write(folder, latency=MEASURED)
    out = done("solve --slowdown 5 --switch-latency 0")
    says(out, "on the profile's GPU they were measured to come 20 ms late")
    assert Plan.load(folder / "plan.json").job.switch_latency_s is None
    done("solve --slowdown 5 --switch-latency 7ms")
    assert Plan.load(folder / "plan.json").job.switch_latency_s == 0.007


def test_simulate_says_that_clocks_are_late_where_the_plan_does_not_know(folder: Path) -> None:
    write(folder, latency=MEASURED)
    done("solve -q --slowdown 5 --switch-latency 0")
    says(done("simulate plan.json"), "20 ms late on the profile's GPU, as it was measured")
    assert "measured" not in done("simulate plan.json --switch-latency 0")
    done("solve -q --slowdown 5")
    says(done("simulate plan.json"), "every clock comes 20 ms after it is asked for")


def test_ask_needs_a_latency_given_or_measured(folder: Path) -> None:
    write(folder, latency=None)
    refused("solve --ask start", "--ask goes with --switch-latency")
    write(folder, latency=MEASURED)
    done("solve --slowdown 5 --ask start")
    assert Plan.load(folder / "plan.json").job.ask == "start"


def test_other_planners_and_given_clocks_know_no_latency(folder: Path) -> None:
    write(folder, latency=MEASURED)
    done("solve --planner zeus_global")
    assert Plan.load(folder / "plan.json").job.switch_latency_s is None
    refused("solve --planner zeus_global --ask start", "--ask goes with --switch-latency")


def test_python_plans_as_the_command_line_does(folder: Path) -> None:
    profile = write(folder, latency=MEASURED)
    assert profile.measured_latency_s == 0.02
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), profile)
    assert frontier.plan(slowdown=0.05).job.switch_latency_s == 0.02
    assert frontier.plan(slowdown=0.05, switch_latency=0).job.switch_latency_s is None


def test_the_literatures_latency_is_stated_and_never_used(folder: Path) -> None:
    write(folder, gpu_name=gpu("a100").name, latency=None)
    out = done("solve --slowdown 5")
    says(
        out,
        "published, not measured here: 5 to 22 ms on A100 (arXiv 2502.20075)",
        "22 ms would add",
    )
    (note,) = (note for note in told("solve --slowdown 5")["notes"] if "published" in note)
    assert note.count("% time and ") == 2
    assert Plan.load(folder / "plan.json").job.switch_latency_s is None
    done("simulate plan.json --switch-latency 22 --ask start")
    literature = SwitchLatency(source="literature", by_mhz=MEASURED.by_mhz)
    write(folder, gpu_name="NVIDIA A9", latency=literature)
    assert "published" not in done("solve --slowdown 5")
    assert Plan.load(folder / "plan.json").job.switch_latency_s is None


def test_gpus_state_only_what_is_published_of_their_chip() -> None:
    assert str(gpu("a40").published_latency).startswith("2 to 12 ms on A40")
    assert str(gpu("h200").published_latency).startswith("up to 477 ms on GH200")
    assert gpu("b200").published_latency is None
    assert GPUS["v100"].published_latency is None


def fast_profile(folder: Path) -> None:
    """Operations of some ms, and rows that make clocks change often."""
    rows = []
    for stage in range(2):
        for name, work in (("forward", 0.006), ("backward", 0.011)):
            for mhz in (1740, 1260, 780):
                time_s = round(work * (1 + 0.6 * stage) * (0.2 + 0.8 * 1740 / mhz), 6)
                power_w = 90 + 190 * (mhz / 1740) ** 2.6
                rows.append((stage, name, mhz, time_s, round(power_w * time_s, 6)))
    Profile.from_rows(rows, metadata=ProfileMetadata(num_microbatches=4)).save_csv(
        folder / "profile.csv"
    )


def test_frequent_changes_are_said_with_what_lasting_clocks_cost(folder: Path) -> None:
    fast_profile(folder)
    out = done("solve --slowdown 8 --changes free")
    says(out, "a rank changes clocks every", "NCCL#1551", "--min-dwell 50ms would cost")
    energy_j = Plan.load(folder / "plan.json").energy
    said = float(out.split("would cost ")[1].split("%")[0])
    done("solve --slowdown 8 --changes free --min-dwell 50ms")
    lasting_j = Plan.load(folder / "plan.json").energy
    assert said == pytest.approx(100 * (lasting_j / energy_j - 1), abs=0.006)


def test_lasting_clocks_are_no_cause_for_alarm(folder: Path) -> None:
    fast_profile(folder)
    assert "NCCL" not in done("solve --slowdown 8 --min-dwell 50ms")
    write(folder, latency=None)
    assert "NCCL" not in done("solve --slowdown 5 --changes free")


def test_a_broken_latency_in_a_sidecar_is_one_line(folder: Path) -> None:
    write(folder, latency=MEASURED)
    sidecar = folder / "profile.meta.json"
    sidecar.write_text(sidecar.read_text().replace('"measured"', '"guessed"'))
    ran = envplan("solve")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "profile.meta.json: switch_latency.source" in ran.err
