"""For tests of sites whose jobs run: folders of frontiers and of the plans that jobs train by."""

from __future__ import annotations

from pathlib import Path

from cli_helpers import done
from envplan.profile import Profile, ProfileMetadata
from fake_nvml import FakeNvml

__all__ = ["add_job", "one_stage_profile"]


def add_job(folder: Path, name: str, profile: Profile, microbatches: int, *, rungs: int) -> None:
    """Put NAME.json, a frontier, and NAME.freqplan.json, from T_min to T_max, into a folder."""
    csv = folder.parent / f"{name}.csv"
    profile.save_csv(csv)
    plan = folder.parent / f"{name}.plan.json"
    done(f"frontier {csv} -m {microbatches} --slower -o {folder / name}.json")
    done(f"solve {csv} -m {microbatches} --slowdown 0 --ladder {rungs} -o {plan}")
    done(f"apply {plan} -o {folder / name}.freqplan.json")


def one_stage_profile(
    fake: FakeNvml, activity: float, scale_s: float, clocks: tuple[int, ...], *, stages: int = 1
) -> Profile:
    """A profile of operations that draw what fake GPUs of an activity draw.

    Args:
        fake: whose model is profiled.
        activity: of its GPUs.
        scale_s: of a forward at the highest clock.
        clocks: MHz, descending.
        stages: of the pipeline, all alike.
    """
    waiting_w = fake.model.uncapped_power_w(clocks[-1], activity)
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in clocks:
                time_s = round(scale_s * work * (0.3 + 0.7 * clocks[0] / mhz), 6)
                power_w = fake.model.uncapped_power_w(mhz, activity)
                rows.append((stage, instruction, mhz, time_s, round(power_w * time_s, 6)))
        rows.append((stage, "blocking", clocks[0], 1.0, waiting_w))
    metadata = ProfileMetadata(source="measured", gpu=fake.model.name)
    return Profile.from_rows(rows, name="live", metadata=metadata)
