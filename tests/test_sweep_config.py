"""The TOML file of a sweep, and the points it asks for."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.planners import PLANNERS
from envplan.sweep import read_config
from envplan.sweep.config import MAX_POINTS, Point

EXAMPLE = Path(__file__).parents[1] / "examples" / "sweep.toml"


def points(folder: Path, text: str) -> list[Point]:
    (folder / "sweep.toml").write_text(text)
    return list(read_config(folder / "sweep.toml").points)


#: Keys of a grid in the order in which its points vary, the last fastest: the field of a point, and
#: what may stand in the list. All targets are one axis; other keys come in the order of the file.
AXES: dict[str, tuple[str, list[Any]]] = {
    "profiles": ("profile", ["a", "b", "c"]),
    "microbatches": ("microbatches", [2, 4, 8]),
    "vp": ("chunks", [1, 2]),
    "planners": ("planner", list(PLANNERS)),
    "slowdowns": ("slowdown", [0, 2.5, 20]),
    "target_times": ("target_time", [9.5, 3]),
    "seeds": ("seed", [0, 1]),
    "dp": ("replicas", [1, 3]),
    "noise": ("noise", [1]),
    "p2p_latency": ("p2p_latency", [0.0, 0.001]),
    "recompute": ("recompute", [True, False]),
}


def combined(grid: dict[str, list[Any]]) -> list[Point]:
    """All points of a grid, each once."""
    axes = [[{AXES[key][0]: one} for one in grid[key]] for key in AXES]
    axes[4:6] = [axes[4] + axes[5]]
    made = []
    for chosen in product(*(axis or [{}] for axis in axes)):
        fields = {name: value for part in chosen for name, value in part.items()}
        if not PLANNERS[fields.get("planner", "frontier")].takes_target:
            fields = {k: v for k, v in fields.items() if k not in ("slowdown", "target_time")}
        made.append(Point(**fields))
    return list(dict.fromkeys(made))


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({key: st.lists(st.sampled_from(values), unique=True, max_size=2)
                              for key, (_, values) in AXES.items()}))  # fmt: skip
def test_a_grid_is_every_combination_once_and_in_order(grid: dict[str, list[Any]]) -> None:
    grid |= {"profiles": grid["profiles"] or ["a"], "noise": [1]}  # a seed needs some
    text = "".join(f"{key} = {json.dumps(grid[key])}\n" for key in AXES)
    with TemporaryDirectory() as folder:
        made = points(Path(folder), f"[grid]\n{text}")
    assert made == combined(grid)


@pytest.mark.parametrize(
    ("lines", "fields", "expected"),
    [
        (
            'profiles = ["a"]\nslowdowns = [1]\ntarget_times = [9.5]\nmin_energy = true\n'
            "energy_budgets = [9]\npower_caps = [8, 7.5]\npeak_power_caps = [6]",
            ("target",),
            [
                *((("slowdown", 1),), (("time", 9.5),), (("min-energy", None),)),
                *((("energy-budget", 9),), (("power-cap", 8),), (("power-cap", 7.5),)),
                (("peak-power-cap", 6),),
            ],
        ),
        # Without a target ours is T_min, and others choose.
        (
            'profiles = ["a"]\nplanners = ["frontier", "zeus_global"]',
            ("target",),
            [(("slowdown", 0.0),), (("own", None),)],
        ),
        # Stages take their place in names.
        (
            'profiles = ["x-{stages}stage", "y"]\nstages = [4, 8]',
            ("profile",),
            [("x-4stage",), ("x-8stage",), ("y",)],
        ),
        # What a grid has one of goes to all its points; other names mean the same.
        (
            'profiles = "a"\ngpus_per_stage = 2\ncp = 3\nswitch_latency = [0, 5]',
            ("gpus_per_stage", "cp", "switch_latency"),
            [(2, 3, late) for late in (0, 5)],
        ),
        # Points one by one come after the grid, and twins are dropped.
        (
            'profiles = ["a"]\nslowdowns = [1, 2, 1]\n[[points]]\nprofile = "a"\nslowdown = 2\n'
            '[[points]]\nprofile = "a"\nslowdown = 3\nnoise = 2\nseed = 5',
            ("slowdown", "noise", "seed"),
            [(1, None, 0), (2, None, 0), (3, 2, 5)],
        ),
    ],
)
def test_a_file_says_these_points(
    tmp_path: Path, lines: str, fields: tuple[str, ...], expected: list[tuple[object, ...]]
) -> None:
    made = points(tmp_path, f"[grid]\n{lines}\n")
    assert [tuple(getattr(point, name) for name in fields) for point in made] == expected


def test_the_example_is_a_sweep() -> None:
    config = read_config(EXAMPLE)
    assert config.folder == EXAMPLE.parent
    assert len({p.profile for p in config.points}) == 2


MANY = list(range(1, 2000))
#: What stands in a file, a grid of profile "a" where no table begins, and words of the refusal.
WRONG = f"""
microbatch = [2] | a point of grid: microbatch is not a field
microbatches = [2.5] | microbatches should be | 2.5
schedules = ["1f1b", "x"] | schedule should be | gpipe
planners = ["x"] | planner should be | zeus_global
planners = ["frontier", "zeus_global"];switch_latency = 5 | zeus_global
planners = ["zeus_global"];power_caps = [5] | power_cap, which goes with planner
robust = 100 | a point of grid: robust
target_times = [inf] | target_time | finite
stages = [4] | stages is not a field
seeds = [1, 2] | a point of grid: has a seed | noise
x = [1;y = 1 | is not valid TOML | line 4
microbatches = {MANY};target_times = {MANY} | {MAX_POINTS}
[grid];microbatches = [2] | profile is missing
[grid];profiles = [] | profile is missing
[[points]];profile = "a";slowdown = 0;min_energy = true | points[0] | slowdown
[[points]];profile = "a";planner = "envpipe";target_time = 3 | points[0] has target_time | envpipe
[output];file = 3 | output is not a field of a sweep
[grid] | asks for 0 points
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_what_is_wrong_is_named(tmp_path: Path, row: str) -> None:
    lines, *words = row.split(" | ")
    text = lines if lines.startswith("[") else f'[grid];profiles = ["a"];{lines}'
    if lines == "[grid]":
        text = ""
    with pytest.raises(InputError) as caught:
        points(tmp_path, text.replace(";", "\n") + "\n")
    for word in ("sweep.toml: ", *words):
        assert word in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "nothere.toml")
    (tmp_path / "sweep.toml").write_bytes(b"[grid]\n\xff")
    with pytest.raises(InputError, match=r"sweep\.toml:2: is not UTF-8"):
        read_config(tmp_path / "sweep.toml")
