"""Profiles: reading, refusing, Pareto options and cost curves."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import statistics
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan import Pipeline
from envplan.errors import InputError
from envplan.profile import (
    ClockSetting,
    CostCurve,
    ExactCost,
    OptionTable,
    PartCosts,
    Profile,
    ProfileMetadata,
    builtin_paths,
    compose_options,
    cost_curve,
)
from envplan.profile.reading import _variance
from envplan.profile.summary import ProfileSummary
from envplan.units import ENERGY_UNITS_PER_J, MAX_INTEGER

HEADER = "stage,instruction,frequency,time,energy\n"
STAGE_0 = "0,forward,1740,0.1,30\n0,backward,1740,0.2,60\n"
STAGE_1, STAGE_2 = (STAGE_0.replace("0,f", f"{k},f").replace("0,b", f"{k},b") for k in (1, 2))


def read(folder: Path, text: str | bytes, name: str = "p.csv") -> Profile:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Profile.read_csv(path)


def refusal(folder: Path, text: str | bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        read(folder, text)
    assert caught.value.path == str(folder / "p.csv")
    assert "\n" not in str(caught.value)
    return caught.value


def table(*options: tuple[int, int]) -> OptionTable:
    rows = {
        ClockSetting(len(options) - k, ""): ExactCost(*cost)
        for k, cost in enumerate(sorted(options))
    }
    return compose_options(0, "forward", PartCosts.from_rows("", {"": rows}), None)


# ---- reading


def test_zeus_file_is_read_into_integer_units(tmp_path: Path) -> None:
    profile = read(tmp_path, HEADER + STAGE_0 + "0,forward,1725,0.0939,28.43\n")
    forward = profile.table(0, "forward")
    assert profile.num_stages == 1
    assert profile.instructions == ("forward", "backward")
    assert forward.time_ns.tolist() == [93_900_000, 100_000_000]
    assert forward.energy_10fj.tolist() == [2_843_000_000_000_000, 30 * ENERGY_UNITS_PER_J]
    assert forward.frequency_mhz.tolist() == [1725, 1740]
    assert profile.blocking_power_w is None
    # By time, energy and falling frequency.
    rows = "0,forward,900,2,5\n0,forward,950,1,7\n0,forward,990,1,7\n0,forward,980,1,6\n"
    forward = read(tmp_path, HEADER + rows + "0,backward,1,1,1\n").table(0, "forward")
    assert forward.frequency_mhz.tolist() == [980, 990, 950, 900]


def test_a_constant_time_and_a_time_that_grows_with_the_clock_have_no_slope(tmp_path: Path) -> None:
    rows = "0,load,0,0.01,1\n0,forward,1000,0.05,10\n"
    profile = read(tmp_path, HEADER + STAGE_0 + rows)
    load, forward = profile.table(0, "load"), profile.table(0, "forward")
    assert (len(load), load.max_frequency_option) == (1, 0)
    assert cost_curve(load, 0).hull_slope_10uw.size == 0
    assert forward.frequency_mhz[forward.max_frequency_option] == 1740
    assert cost_curve(forward, 0).option.tolist() == [0]


def test_configs_are_options_of_one_operation(tmp_path: Path) -> None:
    rows = (
        "0,forward,1740,0.2,30,big\n0,forward,1740,0.1,35,small\n0,forward,900,0.3,9,big\n"
        "0,backward,1740,0.2,60,\n"
    )
    profile = read(tmp_path, HEADER.strip() + ",config\n" + rows)
    forward = profile.table(0, "forward")
    assert forward.config == ("small", "big", "big")
    assert forward.max_frequency_option == 0
    assert profile.table(0, "backward").config == ("",)


def test_known_instructions_come_first(tmp_path: Path) -> None:
    rows = f"0,encode,9,1,1\n0,optimizer,9,1,1\n0,backward_weight,9,1,1\n{STAGE_0}"
    known = ("forward", "backward", "backward_weight", "optimizer", "encode")
    assert read(tmp_path, HEADER + rows).instructions == known


def test_stages_may_differ_in_their_operations(tmp_path: Path) -> None:
    some = "0,encode,9,1,1\n1,load,9,1,1\n1,recompute,9,1,1\n1,blocking,9,1,70\n"
    split = "1,forward,9,1,1\n1,backward_input,9,1,1\n1,backward_weight,9,2,1\n"
    profile = read(tmp_path, HEADER + STAGE_0 + split + some)
    assert [profile.has(stage, "encode") for stage in (0, 1)] == [True, False]
    with pytest.raises(InputError, match="no rows for backward on stage 1, only for forward"):
        profile.table(1, "backward")
    with pytest.raises(InputError, match="stages 0 to 1, no stage 3"):
        profile.table(3, "forward")
    fitted = profile.fitted(["forward", "backward"])
    assert fitted.table(0, "backward").time_ns.tolist() == [2 * 10**8]
    assert fitted.table(1, "backward").time_ns.tolist() == [3 * 10**9]


def test_blocking_power_is_the_mean_over_a_stages_rows(tmp_path: Path) -> None:
    rows = "0,blocking,1740,2,160\n0,blocking,210,1,60\n1,blocking,210,1,90\n"
    profile = read(tmp_path, HEADER + STAGE_0 + STAGE_1 + STAGE_2 + rows)
    assert profile.blocking_power_w == (70.0, 90.0, 80.0)
    assert "blocking" not in profile.instructions


def test_blocking_rows_are_no_operation_and_their_clocks_are_none_of_an_operation(
    tmp_path: Path,
) -> None:
    profile = read(tmp_path, HEADER + STAGE_0 + "0,blocking,210,1,60\n")
    assert profile.clocks_mhz == [1740]
    assert not profile.has(0, "blocking")
    with pytest.raises(InputError, match="no rows for blocking on stage 0"):
        profile.table(0, "blocking")


def test_adjusted_profile_differs_from_the_one_it_was_made_of(tmp_path: Path) -> None:
    profile = read(tmp_path, HEADER + STAGE_0)
    adjusted = profile.adjusted(recompute=True)
    assert profile != adjusted
    assert len({profile, adjusted, profile}) == 2


# ---- refusing


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        ("0,forward,1,1e400,1", "time", "a finite number"),
        ("0,forward,1,-2,1", "time", "or equal to 0.000000001"),
        ("0,forward,1,1,46117", "energy", "or equal to 46116"),
        ("0,forward,-15,1,1", "frequency", "or equal to 0;"),
        ("0,forward,1740000000,1,1", "frequency", "MHz"),
        (f"0,forward,{10**400},1,1", "frequency", "or equal to 1000000;"),
        ("0.5,forward,1,1,1", "stage", "a valid integer"),
        ("0,for ward,1,1,1", "instruction", "not a name"),
    ],
)
def test_bad_value_is_found_by_line_and_column(
    tmp_path: Path, row: str, column: str, words: str
) -> None:
    error = refusal(tmp_path, HEADER + STAGE_0 + "\n" + row + "\n")
    assert (error.line, error.column) == (5, column)
    assert words in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        (HEADER.strip() + ",time_std\n0,forward,1,1,1,-1\n", 2, "time_std", "or equal to 0"),
        (HEADER + STAGE_0 + "0,forward,1740,0.5,9\n", 4, "time", "repeats line 2"),
        (HEADER + STAGE_0 + STAGE_2, 4, "stage", "stage 1 has no rows"),
        (
            HEADER + STAGE_0 + "1,load,1,1,1\n1,forward,1,1,1\n",
            None,
            "instruction",
            "stage 1 has rows for forward, load only; every stage needs forward, and backward or",
        ),
        (
            HEADER + "0,forward,1,1,1\n0,backward_input,1,1,1\n",
            None,
            "instruction",
            "stage 0 has rows for forward, backward_input only",
        ),
    ],
)
def test_rows_that_are_no_profile_are_refused(
    tmp_path: Path, text: str, line: int | None, column: str | None, words: str
) -> None:
    error = refusal(tmp_path, text)
    assert (error.line, error.column) == (line, column)
    assert words in error.message


def test_missing_file_folder_and_impossible_name_are_refused(tmp_path: Path) -> None:
    known = {"none.csv": "No such file", "": "Is a directory", "a\0b": "not a usable file name"}
    for name, words in known.items():
        with pytest.raises(InputError, match=words):
            Profile.read_csv(tmp_path / name)


# ---- sidecar


def test_sidecar_is_read_and_unknown_fields_kept(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER + STAGE_0).metadata == ProfileMetadata()
    document = {"gpu": "NVIDIA A40", "source": "measured", "num_microbatches": 8, "room": 3}
    (tmp_path / "p.meta.json").write_text(json.dumps(document))
    metadata = read(tmp_path, HEADER + STAGE_0).metadata
    assert (metadata.gpu, metadata.num_microbatches, metadata.driver) == ("NVIDIA A40", 8, None)
    assert metadata.extra == {"room": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{\n "gpu": oops}', "p.meta.json:2, column 9: is not valid JSON"),
        ("[]", "one JSON object"),
        ('{"num_microbatches": "8"}', "num_microbatches should be"),
        ('{"source": "guessed"}', "source should be"),
        ('{"schedule": "gpipe", "schedule": "1f1b"}', "twice"),
        ('{"scheduel": "gpipe"}', "column scheduel: is not known; is schedule meant"),
        ('{"recompute": "no"}', "column recompute: must be true or false"),
        ('{"note": [1, -1e400]}', "beyond 1e308"),
        ('{"driver": ' + "[" * 9 + "]" * 9 + "}", "driver should be a valid string, not a list"),
        ('{"job": {"num_microbatches": 2}}', "job.num_microbatches is not a field"),
        ('{"job": {"microbatches": 2}, "num_microbatches": 3}', "microbatches twice"),
        ('{"job": {"replicas": 0}}', "job.replicas should be greater than 0"),
        ('{"job": [1]}', "job should be an object, not a list"),
    ],
)
def test_sidecar_that_would_be_misread_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.meta.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=words) as caught:
        read(tmp_path, HEADER + STAGE_0)
    assert caught.value.path == str(tmp_path / "p.meta.json")


# ---- the job


def test_the_job_of_a_sidecar_makes_its_pipeline(tmp_path: Path) -> None:
    job = {"schedule": "interleaved", "stages": 2, "microbatches": 4, "chunks": 2}
    job |= {"p2p_latency_s": 0.25, "gpus_per_stage": 16, "replicas": 8}
    job |= {"extras": {"optimizer": [0, 3]}}
    (tmp_path / "p.meta.json").write_text(json.dumps({"job": job, "tensor_parallel": 8}))
    stages = "".join(
        f"{stage},forward,9,1,1\n{stage},backward,9,2,1\n{stage},optimizer,0,3,1\n"
        for stage in range(4)
    )
    profile = read(tmp_path, HEADER + stages)
    pipeline = profile.pipeline()
    same = Pipeline("interleaved", 2, 4, num_chunks=2, p2p_latency=0.25, extras=job["extras"])  # type: ignore[arg-type]
    assert pipeline.operations == same.operations
    assert pipeline.succ_lag_ns.tolist() == same.succ_lag_ns.tolist()
    assert sum(op.instruction == "optimizer" for op in pipeline.operations) == 2
    assert profile.metadata.schedule == "interleaved"
    assert (profile.metadata.gpus_per_stage, profile.metadata.job.replicas) == (16, 8)
    profile.save_csv(tmp_path / "again.csv")
    assert Profile.read_csv(tmp_path / "again.csv").metadata == profile.metadata
    # Older sidecars say the job in fields of their own.
    old = {"schedule": "gpipe", "num_microbatches": 3, "tensor_parallel": 2}
    (tmp_path / "p.meta.json").write_text(json.dumps(old))
    profile = read(tmp_path, HEADER + STAGE_0 + STAGE_1)
    pipeline = profile.pipeline()
    assert (pipeline.schedule, pipeline.num_stages, pipeline.num_microbatches) == ("gpipe", 2, 3)
    assert (pipeline.p2p_latency_ns, profile.metadata.gpus_per_stage) == (0, 2)


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ({}, "how many microbatches has an iteration"),
        ({"job": {"microbatches": 2, "chunks": 2}}, "2 model stages, but profile p has 1 stage"),
        ({"job": {"microbatches": 2, "stages": 2}}, "2 pipeline stages .* has 1"),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    tmp_path: Path, sidecar: dict[str, object], words: str
) -> None:
    (tmp_path / "p.meta.json").write_text(json.dumps(sidecar))
    with pytest.raises(InputError, match=words):
        read(tmp_path, HEADER + STAGE_0).pipeline()


# ---- profiles with a row for each rank, as Zeus writes them

ZEUS = "rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy\n"


def zeus_rows(times: dict[int, float], frequency: int = 1410) -> str:
    """Rows of ranks with two of them on a stage; energies count up with the rank."""
    return "".join(
        f"{rank},{rank % 2},{rank // 2},0,{rank // 2},{name},{frequency},{scale * time},{rank}\n"
        for rank, time in times.items()
        for name, scale in (("forward", 1), ("backward", 2))
    )


def test_rows_of_ranks_make_one_with_the_largest_time_and_the_mean_energy(tmp_path: Path) -> None:
    profile = read(tmp_path, ZEUS + zeus_rows({0: 1.0, 1: 1.02, 2: 1.0, 3: 1.0}))
    assert profile.num_stages == 2
    forward = profile.table(0, "forward")
    assert forward.time_ns.tolist() == [1_020_000_000]
    assert forward.energy_10fj.tolist() == [ENERGY_UNITS_PER_J // 2]
    spread = np.std([1.0, 1.02], ddof=1) / 1.02
    assert profile.time_spread(0, "forward", 1410) == pytest.approx(spread)
    assert profile.time_spread(1, "forward", 1410) == 0.0
    assert profile.notes == (
        "largest times and mean energies per GPU of 4 ranks, whose times' spread is the noise",
    )


def test_a_straggler_among_ranks_is_named(tmp_path: Path) -> None:
    text = ZEUS + zeus_rows({0: 1, 1: 1, 2: 1, 3: 1.12}) + zeus_rows({2: 1.5, 3: 1.68}, 900)
    profile = read(tmp_path, text)
    assert profile.notes[1:] == (
        "rank 3 straggles: it takes 1.12 times as long as other ranks of stage 1",
    )
    alone = read(tmp_path, ZEUS + zeus_rows({0: 1.0, 2: 1.0}))
    assert len(alone.notes) == 1
    assert alone.time_spread(0, "forward", 1410) is None


def test_summary_takes_whatever_a_sidecar_says_was_identified(tmp_path: Path) -> None:
    (tmp_path / "p.meta.json").write_text('{"source": "measured", "identified": "energies"}')
    summary = ProfileSummary.of(read(tmp_path, HEADER + STAGE_0))
    assert (summary.time, summary.energy) == ("measured", "measured")


def test_rows_without_a_rank_are_of_no_rank(tmp_path: Path) -> None:
    slow = ",,,,0,forward,1410,1.5,1\n,,,,0,backward,1410,3,1\n"
    profile = read(tmp_path, ZEUS + zeus_rows({0: 1, 1: 1, 2: 1, 3: 1}) + slow)
    assert not any("straggles" in note for note in profile.notes)


def test_a_rank_that_comes_twice_with_other_times_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, ZEUS + zeus_rows({0: 1.0}) + zeus_rows({0: 2.0}))
    assert error.line == 4
    assert "repeats line 2 with quite another time" in error.message


# ---- making, saving, finding


def test_saved_profile_reads_back_the_same(tmp_path: Path) -> None:
    metadata = ProfileMetadata(gpu="NVIDIA A40", tensor_parallel=2, extra={"notes": ["a", "b"]})
    rows = [(0, "forward", 1740, 0.0937, 28.49), (0, "backward", 1740, 1e-5, 2 / 3)]
    made = Profile.from_rows(rows, name="mine", metadata=metadata)
    made.save_csv(tmp_path / "mine.csv")
    again = Profile.read_csv(tmp_path / "mine.csv")
    assert (again.sha256, again.name, again.metadata) == (made.sha256, "mine", metadata)
    assert [t.options() for t in again.tables()] == [t.options() for t in made.tables()]
    # Every byte is kept, however it was written.
    content = (HEADER + STAGE_0 + "\n").replace("\n", "\r\n").encode()
    read(tmp_path, content).save_csv(tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_bytes() == content
    assert Profile.read_csv(tmp_path / "copy.csv").sha256 == hashlib.sha256(content).hexdigest()


def test_rows_in_memory_are_checked_like_a_file_and_may_have_configs_and_spreads() -> None:
    with pytest.raises(InputError, match="line 3, column time"):
        Profile.from_rows([(0, "forward", 1, 1.0, 1.0), (0, "backward", 1, float("nan"), 1.0)])
    with pytest.raises(InputError, match="no rows"):
        Profile.from_rows([])
    rows = [(0, "forward", 9, 1.0, 1.0, "a"), (0, "backward", 9, 1.0, 1.0)]
    with pytest.raises(InputError, match="repeats line 2 with quite another energy, 2 instead of"):
        Profile.from_rows([rows[0], (0, "forward", 9, 1.0, 2.0, "a"), *rows])
    columns = ("stage", "instruction", "frequency", "time", "energy", "time_std")
    spread = [(0, "forward", 9, 1.0, 1.0, 0.1), (0, "backward", 9, 1.0, 1.0, 0.0)]
    assert Profile.from_rows(spread, columns=columns).num_stages == 1


def test_rows_that_measure_an_option_again_are_put_together() -> None:
    columns = ("stage", "instruction", "frequency", "time", "energy", "rank")
    rows = [
        *[(0, "forward", 900, time, 9 * time, 0) for time in (1.0, 1.02, 1.4)],
        *[(0, "forward", 900, time, 9.0, 1) for time in (1.1, 1.1)],
        (0, "backward", 900, 2.0, 20.0, 0),
        (0, "backward", 900, 2.0, 22.0, 1),
    ]
    profile = Profile.from_rows(rows, columns=columns)
    forward, backward = profile.tables()
    assert forward.options() == [(900, "", 1_100_000_000, 909_000_000_000_000)]
    assert backward.energy_10fj.tolist() == [21 * ENERGY_UNITS_PER_J]
    assert profile.notes[0] == "medians of up to 3 rows of the same"
    assert profile.spreads[0, "forward", 900, ""] > 0.1


def test_a_gzipped_table_is_read_and_half_a_one_refused(tmp_path: Path) -> None:
    zipped = gzip.compress((HEADER + STAGE_0).encode())
    (tmp_path / "profile.csv.gz").write_bytes(zipped)
    made = Profile.read_csv(tmp_path / "profile.csv.gz")
    assert made.sha256 == read(tmp_path, HEADER + STAGE_0).sha256
    assert (made.name, made.sidecar) == ("profile", tmp_path / "profile.meta.json")
    (tmp_path / "half.csv.gz").write_bytes(zipped[:-9])
    with pytest.raises(InputError, match=r"half.csv.gz: cannot be read \(it is no whole gzip file"):
        Profile.read_csv(tmp_path / "half.csv.gz")


def test_a_path_wins_over_a_builtin_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(builtin_paths()))
    assert Profile.open(name).num_stages > 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(HEADER + STAGE_0)
    assert Profile.open(name).num_stages == 1


@pytest.mark.parametrize("name", ["no-such-profile", "a\0b", "x" * 5000, "../profiles/a40"])
def test_neither_file_nor_builtin_names_both_possibilities(name: str) -> None:
    with pytest.raises(InputError, match=r"no such file, and no built-in profile of that name"):
        Profile.open(name)


def test_unknown_builtin_lists_those_there_are() -> None:
    with pytest.raises(InputError, match=r"a40-gpt3-1\.3b-8stage"):
        Profile.builtin("a40")


# ---- cost curves


def test_effective_cost_counts_what_waiting_would_draw() -> None:
    options = table((10, 100), (20, 90), (30, 89))
    curve = cost_curve(options, blocking_power_10uw=3)
    for array in (options.time_ns, curve.cost_10fj):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert curve.cost_10fj.tolist() == [70, 30, -1]
    assert curve.hull_time_ns.tolist() == [30, 20, 10]
    assert curve.hull_slope_10uw.tolist() == [3, 4]
    assert curve.base_cost_10fj == -1


def test_costs_beyond_the_integer_range_are_refused() -> None:
    with pytest.raises(InputError, match="64-bit"):
        cost_curve(table((10**18, 0)), blocking_power_10uw=10**8)
    with pytest.raises(InputError, match="64-bit"):
        cost_curve(table((1, 9 * 10**18), (2, 0)), blocking_power_10uw=10**3)


small = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=12)
large = st.lists(
    st.tuples(st.integers(1, 10**11), st.integers(0, 9 * 10**18)), min_size=1, max_size=12
)
tables = st.one_of(small, large)
powers = st.one_of(st.integers(0, 12), st.integers(0, 46_000_000))


def curve_value(curve: CostCurve, time: Fraction) -> Fraction:
    """The piecewise-linear curve at a duration, exactly; level beyond its slow end."""
    value = Fraction(curve.base_cost_10fj)
    vertices = curve.hull_time_ns.tolist()
    for (slow, fast), slope in zip(
        itertools.pairwise(vertices), curve.hull_slope_10uw.tolist(), strict=True
    ):
        value += slope * max(Fraction(0), slow - max(time, Fraction(fast)))
    return value


@given(tables, powers)
def test_the_curve_is_convex_below_every_option_and_the_pareto_ones_are_kept(
    options: list[tuple[int, int]], power: int
) -> None:
    curve = cost_curve(table(*options), power)
    points = {(time, energy - power * time) for time, energy in options}
    best = {
        (time, cost)
        for time, cost in points
        if not any(t <= time and c <= cost and (t, c) != (time, cost) for t, c in points)
    }
    assert list(zip(curve.time_ns.tolist(), curve.cost_10fj.tolist(), strict=True)) == sorted(best)
    slopes, vertices = curve.hull_slope_10uw.tolist(), curve.hull_time_ns.tolist()
    assert len(vertices) == len(slopes) + 1
    assert all(one < other for one, other in itertools.pairwise([0, *slopes, MAX_INTEGER + 1]))
    assert all(one > other for one, other in itertools.pairwise(vertices))
    assert set(vertices) <= {time for time, _ in options}
    for time, cost in points:
        assert curve_value(curve, Fraction(time)) <= cost
    assert vertices[-1] == min(time for time, _ in options)


@given(tables, powers)
def test_rounding_loses_less_than_a_unit_of_slope(
    options: list[tuple[int, int]], power: int
) -> None:
    curve = cost_curve(table(*options), power)
    slow = int(curve.time_ns[-1])
    points = list(zip(curve.time_ns.tolist(), curve.cost_10fj.tolist(), strict=True))
    for time in curve.time_ns.tolist():
        hull = min(
            Fraction(c0 * (t1 - time) + c1 * (time - t0), t1 - t0) if t1 > t0 else Fraction(c0)
            for t0, c0 in points
            for t1, c1 in points
            if t0 <= time <= t1
        )
        assert hull - curve_value(curve, Fraction(time)) <= slow - time


LATENCY = {
    "source": "measured",
    "by_mhz": {
        "210": {"median_s": 0.1, "p95_s": 0.2},
        "1740": {"median_s": 0.02, "p95_s": 0.03},
    },
}


def test_the_switch_latency_of_a_sidecar_is_read_and_written(tmp_path: Path) -> None:
    sidecar = tmp_path / "p.meta.json"
    sidecar.write_text(json.dumps({"switch_latency": LATENCY}))
    profile = read(tmp_path, HEADER + STAGE_0)
    assert profile.switch_latency is not None
    assert profile.switch_latency.by_mhz[210].p95_s == 0.2
    # No row is at 210 MHz, so that no plan changes to it.
    assert profile.measured_latency_s == 0.02
    profile.save_csv(tmp_path / "copy.csv")
    assert json.loads((tmp_path / "copy.meta.json").read_text())["switch_latency"] == LATENCY


def test_only_measured_latency_is_planned_with(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER + STAGE_0).measured_latency_s is None
    stated = LATENCY | {"source": "literature", "reference": "arXiv 2502.20075"}
    (tmp_path / "p.meta.json").write_text(json.dumps({"switch_latency": stated}))
    profile = read(tmp_path, HEADER + STAGE_0)
    assert profile.switch_latency is not None
    assert profile.switch_latency.reference == "arXiv 2502.20075"
    assert profile.measured_latency_s is None


@pytest.mark.parametrize(
    ("latency", "said"),
    [
        (LATENCY | {"by_mhz": {}}, "switch_latency.by_mhz"),
        (LATENCY | {"source": "guessed"}, "switch_latency.source should be 'measured'"),
        (LATENCY | {"by_mhz": {"210": {"median_s": -1.0, "p95_s": 0}}}, "210.median_s"),
        (LATENCY | {"by_mhz": {"fast": {"median_s": 1.0, "p95_s": 0}}}, "by_mhz.fast"),
        (LATENCY | {"unit": "s"}, "switch_latency.unit"),
    ],
)
def test_a_latency_that_cannot_be_is_refused(tmp_path: Path, latency: object, said: str) -> None:
    (tmp_path / "p.meta.json").write_text(json.dumps({"switch_latency": latency}))
    with pytest.raises(InputError) as caught:
        read(tmp_path, HEADER + STAGE_0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=12))
def test_variances_are_those_of_statistics(values: list[float]) -> None:
    expected = statistics.variance(values)
    assert _variance(values) == pytest.approx(expected, rel=1e-9, abs=1e-18 * max(values) ** 2)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-9, 123.456])
def test_equal_values_have_no_variance(value: float) -> None:
    assert _variance([value] * 3) == 0
