"""Kareus's files: profiles with the overlap of each part in columns, clocks and overlaps to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from envplan.enforce.clock_files import read_clocks
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.solve import plan_from_clocks

EARLY, LATE = "norm_0-none-12-1024", "rope_0-none-6-1024"
PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=2)


def profile(folder: Path, *, recomputes: bool) -> Profile:
    """As Kareus's artifact writes one; either overlap at either clock."""
    again = ("recompute_attention_configs", "recompute_mlp_configs") if recomputes else ()
    header = ["stage", "instruction", "frequency", *again, "attention_configs", "mlp_configs"]
    lines = [",".join([*header, "time", "energy"])]
    for stage in range(2):
        for instruction in ("forward", "backward"):
            for mhz in (1410, 900):
                for k, overlap in enumerate((EARLY, LATE)):
                    before = [overlap if instruction == "backward" else ""] * len(again)
                    time = 141 / mhz * (1 + 0.1 * k)
                    cells = [stage, instruction, mhz, *before, overlap, EARLY, time, mhz / 50 - k]
                    lines.append(",".join(map(str, cells)))
    (folder / "profile.csv").write_text("\n".join(lines) + "\n")
    return Profile.read_csv(folder / "profile.csv")


def run_files(folder: Path, *, recomputes: bool) -> Path:
    """The clocks and overlaps of an iteration; forwards early, backwards late."""
    forward = ("forward", EARLY, EARLY)
    backward = ("backward", *([LATE, LATE] if recomputes else []), LATE, EARLY)
    freqs, scheds = [], []
    for stage in range(2):
        mine = [op for op in PIPELINE.operations if op.stage == stage]
        freqs.append([(op.instruction, 900 if stage else 1410) for op in mine])
        if recomputes:
            scheds.append([forward if op.instruction == "forward" else backward for op in mine])
        else:
            scheds.append([(forward, backward)] * 2)
    for name, stages in (("freqs", freqs), ("scheds", scheds)):
        listed = ",\n".join(map(str, stages))
        (folder / f"{name}_pipeline_00012.py").write_text(f"[\n{listed},\n]\n# total cost: 1.0\n")
    return folder / "freqs_pipeline_00012.py"


@pytest.mark.parametrize("recomputes", [True, False])
def test_clocks_and_overlaps_are_run_together(tmp_path: Path, recomputes: bool) -> None:
    timed = profile(tmp_path, recomputes=recomputes)
    assert len(timed.table(0, "forward")) == 4
    clocks = read_clocks(run_files(tmp_path, recomputes=recomputes), PIPELINE)
    plan = plan_from_clocks(PIPELINE, timed, clocks)
    late = f"{LATE} {LATE} {LATE} {EARLY}" if recomputes else f"{LATE} {EARLY}"
    for stage, mhz in ((0, 1410), (1, 900)):
        for op in plan.stages[stage]:
            wanted = f"{EARLY} {EARLY}" if op.instruction == "forward" else late
            assert (op.frequency_mhz, op.config) == (mhz, wanted)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[], []]", "says nothing of forward 0"),
        ("[[]]", "has 1 stages; the pipeline has 2"),
        ("[[('forward', 3)], []]", "says nothing of forward 0"),
        ("print('x')", "code in it is not run"),
    ],
)
def test_overlaps_that_do_not_fit_are_refused(text: str, words: str, tmp_path: Path) -> None:
    clocks = run_files(tmp_path, recomputes=True)
    (tmp_path / "scheds_pipeline_00012.py").write_text(text)
    with pytest.raises(InputError, match=words) as error:
        read_clocks(clocks, PIPELINE)
    assert error.value.path == str(tmp_path / "scheds_pipeline_00012.py")


def test_overlap_that_the_profile_lacks_is_refused(tmp_path: Path) -> None:
    timed = profile(tmp_path, recomputes=True)
    clocks = read_clocks(run_files(tmp_path, recomputes=False), PIPELINE)
    with pytest.raises(InputError, match="900 MHz with config "):
        plan_from_clocks(PIPELINE, timed, [clocks[1], clocks[1]])
