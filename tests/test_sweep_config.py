from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.planners import PLANNERS
from envplan.sweep import read_config
from envplan.sweep.config import MAX_POINTS, Grid, Point

EXAMPLE = Path(__file__).parents[1] / "examples" / "sweep.toml"


def points(folder: Path, text: str) -> list[Point]:
    (folder / "sweep.toml").write_text(text)
    return read_config(folder / "sweep.toml").all_points()


def refused(folder: Path, text: str, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        points(folder, text)
    for word in ("sweep.toml: ", *words):
        assert word in str(caught.value)


def test_a_grid_is_every_combination_once_and_in_order(tmp_path: Path) -> None:
    made = points(
        tmp_path,
        """
        [grid]
        profiles = ["a.csv", "b.csv"]
        microbatches = [4, 8]
        slowdowns = [0, 2.5]
        """,
    )
    assert [(p.profile, p.microbatches, p.slowdown) for p in made] == [
        (profile, microbatches, slowdown)
        for profile in ("a.csv", "b.csv")
        for microbatches in (4, 8)
        for slowdown in (0, 2.5)
    ]


def test_all_kinds_of_targets_follow_each_other(tmp_path: Path) -> None:
    made = points(
        tmp_path,
        """
        [grid]
        profiles = ["a"]
        slowdowns = [1]
        target_times = [9.5]
        min_energy = true
        energy_budgets = [9]
        power_caps = [8, 7.5]
        peak_power_caps = [6]
        """,
    )
    assert [p.target for p in made] == [
        ("slowdown", 1),
        ("time", 9.5),
        ("min-energy", None),
        ("energy-budget", 9),
        ("power-cap", 8),
        ("power-cap", 7.5),
        ("peak-power-cap", 6),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('planners = ["frontier", "zeus_global"]\nswitch_latency = 5', "zeus_global"),
        ('planners = ["zeus_global"]\npower_caps = [5]', "power_cap, which goes with planner"),
        ("robust = 100", "grid.robust"),
        ('extra = "coffee"', "load, all_reduce, reduce_scatter, optimizer, all_gather"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, text: str, words: str) -> None:
    refused(tmp_path, f'[grid]\nprofiles = ["a"]\n{text}\n', words)


def test_without_a_target_ours_is_t_min_and_others_choose(tmp_path: Path) -> None:
    made = points(tmp_path, '[grid]\nprofiles = ["a"]\nplanners = ["frontier", "zeus_global"]\n')
    assert [p.target for p in made] == [("slowdown", 0.0), ("own", None)]


def test_a_planner_that_takes_no_target_gets_one_point_for_all_of_them(tmp_path: Path) -> None:
    made = points(
        tmp_path,
        '[grid]\nprofiles = ["a"]\nplanners = ["max_frequency", "frontier"]\nslowdowns = [0, 1]\n',
    )
    assert [(p.planner, p.target[0]) for p in made] == [
        ("max_frequency", "own"),
        ("frontier", "slowdown"),
        ("frontier", "slowdown"),
    ]


def test_stages_take_their_place_in_names(tmp_path: Path) -> None:
    made = points(tmp_path, '[grid]\nprofiles = ["x-{stages}stage", "y"]\nstages = [4, 8]\n')
    assert [p.profile for p in made] == ["x-4stage", "x-8stage", "y"]


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


def test_what_a_grid_has_one_of_goes_to_all_its_points(tmp_path: Path) -> None:
    made = points(
        tmp_path,
        """
        [grid]
        profiles = ["a"]
        p2p_latency = 0.001
        blocking_power = 65
        gpus_per_stage = 2
        replicas = 3
        recompute = true
        noise = 1
        seeds = [1, 2]
        """,
    )
    assert [p.seed for p in made] == [1, 2]
    shared = {(p.p2p_latency, p.blocking_power, p.gpus_per_stage, p.replicas) for p in made}
    assert shared == {(0.001, 65, 2, 3)}
    assert all(p.recompute and p.noise == 1 for p in made)


def test_the_example_is_a_sweep() -> None:
    config = read_config(EXAMPLE)
    assert config.folder == EXAMPLE.parent
    assert len({p.profile for p in config.all_points()}) == 2


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
    grid = Grid.model_validate(
        {
            "profiles": profiles,
            "microbatches": microbatches,
            "planners": planners,
            "slowdowns": slowdowns,
        }
    )
    made = list(grid.points())
    free = sum(PLANNERS[planner].takes_target for planner in planners)
    each = free * max(1, len(slowdowns)) + len(planners) - free
    assert len(set(made)) == len(profiles) * len(microbatches) * each
    assert len(made) == grid.size()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[grid]\nprofiles = ["a"]\nmicrobatch = [2]\n', ("grid.microbatch is not a field",)),
        ("[grid]\nmicrobatches = [2]\n", ("grid.profiles is missing",)),
        ("[grid]\nprofiles = []\n", ("grid.profiles", "at least 1")),
        ('[grid]\nprofiles = "a"\n', ("grid.profiles", "list")),
        ('[grid]\nprofiles = ["a"]\nmicrobatches = [2.5]\n', ("grid.microbatches[0]", "2.5")),
        ('[grid]\nprofiles = ["a"]\nschedules = ["1f1b", "x"]\n', ("grid.schedules[1]", "gpipe")),
        ('[grid]\nprofiles = ["a"]\nplanners = ["x"]\n', ("grid.planners[0]", "zeus_global")),
        ('[grid]\nprofiles = ["a"]\ntarget_times = [inf]\n', ("grid.target_times[0]", "finite")),
        ('[grid]\nprofiles = ["a"]\nstages = [4]\n', ("grid should have", "{stages}")),
        ('[grid]\nprofiles = ["{stages}"]\n', ("grid should have", "{stages}")),
        ('[grid]\nprofiles = ["a"]\nseeds = [1, 2]\n', ("a point of grid has a seed", "noise")),
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
