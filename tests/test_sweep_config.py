from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

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


def refused(folder: Path, text: str, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        points(folder, text)
    for word in ("sweep.toml: ", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "fields", "expected"),
    [
        (
            'profiles = ["a", "b"]\nmicrobatches = [4, 8]\nslowdowns = [0, 2.5]',
            ("profile", "microbatches", "slowdown"),
            [(name, count, slow) for name in "ab" for count in (4, 8) for slow in (0, 2.5)],
        ),
        (
            'profiles = ["a"]\nslowdowns = [1]\ntarget_times = [9.5]\nmin_energy = true\n'
            "energy_budgets = [9]\npower_caps = [8, 7.5]\npeak_power_caps = [6]",
            ("target",),
            [
                (("slowdown", 1),),
                (("time", 9.5),),
                (("min-energy", None),),
                (("energy-budget", 9),),
                (("power-cap", 8),),
                (("power-cap", 7.5),),
                (("peak-power-cap", 6),),
            ],
        ),
        # Without a target ours is T_min, and others choose.
        (
            'profiles = ["a"]\nplanners = ["frontier", "zeus_global"]',
            ("target",),
            [(("slowdown", 0.0),), (("own", None),)],
        ),
        # A planner that takes no target gets one point for all of them.
        (
            'profiles = ["a"]\nplanners = ["max_frequency", "frontier"]\nslowdowns = [0, 1]',
            ("planner", "slowdown"),
            [("max_frequency", None), ("frontier", 0), ("frontier", 1)],
        ),
        # Stages take their place in names.
        (
            'profiles = ["x-{stages}stage", "y"]\nstages = [4, 8]',
            ("profile",),
            [("x-4stage",), ("x-8stage",), ("y",)],
        ),
        # Whatever a point has may be a list.
        (
            'profiles = "a"\nswitch_latency = [0, 5]\nvp = [1, 2]',
            ("chunks", "switch_latency"),
            [(chunks, late) for chunks in (1, 2) for late in (0, 5)],
        ),
        # What a grid has one of goes to all its points.
        (
            'profiles = ["a"]\np2p_latency = 0.001\ngpus_per_stage = 2\n'
            "dp = 3\nrecompute = true\nnoise = 1\nseeds = [1, 2]",
            ("seed", "p2p_latency", "gpus_per_stage", "replicas", "recompute", "noise"),
            [(seed, 0.001, 2, 3, True, 1) for seed in (1, 2)],
        ),
    ],
)
def test_a_grid_is_every_combination_once_and_in_order(
    tmp_path: Path, lines: str, fields: tuple[str, ...], expected: list[tuple[object, ...]]
) -> None:
    made = points(tmp_path, f"[grid]\n{lines}\n")
    assert [tuple(getattr(point, name) for name in fields) for point in made] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('planners = ["frontier", "zeus_global"]\nswitch_latency = 5', "zeus_global"),
        ('planners = ["zeus_global"]\npower_caps = [5]', "power_cap, which goes with planner"),
        ("robust = 100", "a point of grid: robust"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, text: str, words: str) -> None:
    refused(tmp_path, f'[grid]\nprofiles = ["a"]\n{text}\n', words)


def test_points_one_by_one_come_after_the_grid_and_twins_are_dropped(tmp_path: Path) -> None:
    made = points(
        tmp_path,
        """
        [grid]
        profiles = ["a"]
        slowdowns = [1, 2, 1]
        [[points]]
        profile = "a"
        slowdown = 2
        [[points]]
        profile = "a"
        slowdown = 3
        noise = 2
        seed = 5
        """,
    )
    assert [p.slowdown for p in made] == [1, 2, 3]
    assert (made[-1].noise, made[-1].seed) == (2, 5)


def test_the_example_is_a_sweep() -> None:
    config = read_config(EXAMPLE)
    assert config.folder == EXAMPLE.parent
    assert len({p.profile for p in config.points}) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, unique=True),
    st.lists(st.integers(1, 9), min_size=1, unique=True),
    st.lists(st.sampled_from(list(PLANNERS)), min_size=1, unique=True),
    st.lists(st.integers(0, 20), unique=True),
)
def test_a_grid_has_the_product_of_its_lists(
    profiles: list[str], microbatches: list[int], planners: list[str], slowdowns: list[int]
) -> None:
    lists = {"profiles": profiles, "microbatches": microbatches, "planners": planners}
    text = "".join(f"{key} = {value}\n" for key, value in {**lists, "slowdowns": slowdowns}.items())
    with TemporaryDirectory() as folder:
        made = points(Path(folder), f"[grid]\n{text}")
    free = sum(PLANNERS[planner].takes_target for planner in planners)
    each = free * max(1, len(slowdowns)) + len(planners) - free
    assert len(set(made)) == len(made) == len(profiles) * len(microbatches) * each


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[grid]\nprofiles = ["a"]\nmicrobatch = [2]\n',
            ("a point of grid: microbatch is not a field",),
        ),
        ("[grid]\nmicrobatches = [2]\n", ("profile is missing",)),
        ("[grid]\nprofiles = []\n", ("profile is missing",)),
        ('[grid]\nprofiles = ["a"]\nmicrobatches = [2.5]\n', ("microbatches should be", "2.5")),
        ('[grid]\nprofiles = ["a"]\nschedules = ["1f1b", "x"]\n', ("schedule should be", "gpipe")),
        ('[grid]\nprofiles = ["a"]\nplanners = ["x"]\n', ("planner should be", "zeus_global")),
        ('[grid]\nprofiles = ["a"]\ntarget_times = [inf]\n', ("target_time", "finite")),
        ('[grid]\nprofiles = ["a"]\nstages = [4]\n', ("stages is not a field",)),
        ('[grid]\nprofiles = ["a"]\nseeds = [1, 2]\n', ("a point of grid: has a seed", "noise")),
        ('[[points]]\nprofile = "a"\nslowdown = 0\nmin_energy = true\n', ("points[0]", "slowdown")),
        (
            '[[points]]\nprofile = "a"\n[[points]]\nprofile = "a"\nplanner = "envpipe"\n'
            "target_time = 3\n",
            ("points[1] has target_time", "envpipe"),
        ),
        ("[output]\nfile = 3\n", ("output is not a field of a sweep",)),
        ("", ("asks for 0 points",)),
        ('[grid]\nprofiles = ["a"\nx = 1\n', ("is not valid TOML", "line 3")),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    refused(tmp_path, text, *words)


def test_more_than_a_million_points_are_refused_before_they_are_made(tmp_path: Path) -> None:
    numbers = list(range(1, 2000))
    refused(
        tmp_path,
        f'[grid]\nprofiles = ["a"]\nmicrobatches = {numbers}\ntarget_times = {numbers}\n',
        str(MAX_POINTS),
    )


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "nothere.toml")
    (tmp_path / "sweep.toml").write_bytes(b"[grid]\n\xff")
    with pytest.raises(InputError, match=r"sweep\.toml:2: is not UTF-8"):
        read_config(tmp_path / "sweep.toml")
