"""Serving profiles: read strictly, interpolated between loads, cut to what meets the SLO."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.serving.classes import CLASSES, Slo, classify_all, serves
from envplan.serving.policies import simulate
from envplan.serving.profile import BUILTIN, ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.simulation import Fleet, Machines, PoolSpec
from envplan.serving.sizing import Stream
from envplan.serving.trace import Trace
from serving_helpers import profile_of, row, small_serving_profile, write_profile


def test_the_built_in_profile_holds_the_measured_times_and_powers() -> None:
    """Points of Splitwise (prompts) and of ML.ENERGY (Llama-3.1-70B on four H100), as published."""
    profile = ServingProfile.builtin()
    for tp, tokens, milliseconds in ((2, 1024, 158.0), (4, 2048, 200.7), (8, 8192, 844.9)):
        phases = profile.phases[tp, 1980]
        assert 1e3 * phases.prompt_time(tokens) == pytest.approx(milliseconds, rel=0.01)
    four = profile.phases[4, 1980]
    for batch, milliseconds, watts in ((8, 16.57, 1765), (64, 22.43, 2002), (256, 39.84, 2354)):
        assert 1e3 * four.step_time(batch) == pytest.approx(milliseconds, rel=0.11)
        assert np.interp(batch, four.batch, four.step_w) == pytest.approx(watts, rel=0.06)
    assert profile.source == "identified"
    assert profile.modelled


def test_no_gpu_draws_more_than_it_may_and_steady_loads_lie_between_idle_and_busy() -> None:
    profile = ServingProfile.builtin()
    for (tp, _), phases in profile.phases.items():
        assert max(*phases.prompt_w, *phases.step_w) <= 700.5 * tp
    for curve in profile.curves.values():
        phases = profile.phases[curve.tp, curve.frequency_mhz]
        assert curve.power_w[0] == pytest.approx(phases.idle_w)
        assert max(curve.power_w) <= max(*phases.prompt_w, *phases.step_w)


def test_steady_loads_agree_with_the_replay() -> None:
    """Power and pace that follow from Little's law, against requests one by one."""
    profile = ServingProfile.builtin()
    random = np.random.default_rng(3)
    for name, tp, share in (("LL", 4, 0.3), ("MM", 8, 0.4)):
        known, curve = profile.classes[name], profile.curves[name, tp, 1980]
        load = share * curve.max_load
        arrival = np.cumsum(random.exponential(known.tokens / load, 4000))
        count = len(arrival)
        given = np.full(count, round(known.input_tokens), dtype=np.int32)
        made = np.full(count, round(known.output_tokens), dtype=np.int32)
        classes = np.full(count, CLASSES.index(name), dtype=np.uint8)
        trace = Trace("steady", arrival - arrival[0], given, made, classes)
        machines = Machines(Stream(trace, profile, classes), Settings(gpus=8))
        pool = PoolSpec(name, frozenset({name}), tp, 1980, 1)
        machines.adopt(Fleet({name: pool}), 0.0, warm=True)
        slots = int(trace.duration_s / 60)
        for slot in range(slots):
            machines.advance(60.0 * (slot + 1))
        result = machines.result("steady", [tp] * slots)
        middle = result.series.power_w[2:-2].mean()
        assert middle == pytest.approx(curve.power_at(load), rel=0.12)


def test_a_profile_by_load_cannot_be_replayed() -> None:
    profile = small_serving_profile({("SS", 2, 1000): [(0, 100), (10, 200), (20, 500)]})
    with pytest.raises(InputError, match="a replay needs a profile by phases"):
        simulate(profile, Trace.open("azure-2023-code"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3,1980,decode,1,0.1,300", "should be '1', '2', '4' or '8'"),
        ("8,1980,decode,1,0.1,300", "does not say in kv_tokens"),
        ("2,1980,nothing,1,0.1,300", "should be 'prefill', 'decode' or 'idle'"),
        ("2,1980,decode,2,0.1,300", "must be above 4, which line 4 has"),
        ("2,1980,decode,8,0,300", "must be a number above 0"),
        ("2,1980,decode,8,0.1,90000", "which none draws"),
        ("2,1500,decode,8,0.1,300", "has no rows of idle"),
    ],
)
def test_a_bad_profile_by_phases_is_refused(tmp_path: Path, line: str, words: str) -> None:
    good = ["2,1980,idle,0,0,200", "2,1980,prefill,128,0.05,600", "2,1980,decode,4,0.02,500"]
    file = tmp_path / "my.csv"
    file.write_text("\n".join(["tp,frequency,phase,size,time_s,power_w", *good]) + "\n")
    (tmp_path / "my.meta.json").write_text('{"kv_tokens": {"2": 9000}}')
    assert ServingProfile.read_csv(file).phases
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(InputError, match=words):
        ServingProfile.read_csv(file)


def test_classes_follow_lengths() -> None:
    place = classify_all(np.array([255, 256, 1024]), np.array([99, 100, 350]))
    assert [CLASSES[k] for k in place] == ["SS", "MM", "LL"]
    assert serves("LM", "SS")
    assert not serves("LM", "SL")


def test_power_is_exact_at_knots_and_straight_between() -> None:
    profile = small_serving_profile({("SS", 2, 1000): [(0, 100), (10, 200), (20, 500)]})
    curve = profile.curves["SS", 2, 1000]
    assert [curve.power_at(load) for load in (0, 50, 100, 150, 200)] == [100, 150, 200, 350, 500]
    with pytest.raises(InputError, match="up to 200 tokens/s"):
        curve.power_at(200.1)


def test_blanks_that_no_slo_explains_are_named() -> None:
    points = [(0, 10), (10, 20)]
    full = {("SS", tp, clock): points for tp in (2, 4) for clock in (1000, 2000)}
    assert small_serving_profile(full).gaps() == []
    # Too slow on few GPUs and at low clocks: that is what blanks are for.
    slow = {("LL", 4, 2000): points, ("MM", 2, 2000): points}
    slow |= {("MM", 4, 1000): points, ("MM", 4, 2000): points}
    assert small_serving_profile(full | slow).gaps() == []
    without = {key: full[key] for key in full if key != ("SS", 2, 2000)}
    assert small_serving_profile(without).gaps() == [("SS", 2, 2000)]
    fewer = full | {("LL", 2, 1000): points, ("LL", 2, 2000): points}
    assert small_serving_profile(fewer).gaps() == [("LL", 4, 1000), ("LL", 4, 2000)]
    assert ServingProfile.builtin().gaps() == []


def test_below_the_lowest_load_an_instance_draws_as_at_it() -> None:
    profile = small_serving_profile({("SS", 2, 1000): [(10, 200), (20, 500)]})
    assert profile.curves["SS", 2, 1000].power_at(1) == 200
    assert profile.curves["SS", 2, 1000].capacity(Slo(1, 1)) == 200


def test_energy_per_request_becomes_power_and_back() -> None:
    rows = [row("SS", 2, 1000, load, energy_per_request_j=50) for load in (100, 200)]
    classes = {"SS": {"input_tokens": 150, "output_tokens": 50, "shared_by": 2.0}}
    profile = profile_of(rows, sidecar={"classes": classes})
    curve = profile.curves["SS", 2, 1000]
    assert curve.power_at(200) == pytest.approx(50 * (200 / 200) / 2)
    assert profile.energy_per_request(curve, 150) == pytest.approx(50)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 0.3)), min_size=2, max_size=6),
    st.floats(0.05, 1.5),
    st.floats(0.02, 0.25),
    st.floats(0, 1),
)
@example(latencies=[(1.01, 0.25), (0.01, 0.25)], ttft=0.05, tbt=0.25, share=0.0)
def test_a_load_lies_in_a_segment_only_if_it_meets_the_slo(
    latencies: list[tuple[float, float]], ttft: float, tbt: float, share: float
) -> None:
    rows = [
        row("SS", 2, 1000, 100 * k, power_w=k, ttft_s=first, tbt_s=between)
        for k, (first, between) in enumerate(latencies)
    ]
    curve = profile_of(rows).curves["SS", 2, 1000]
    slo = Slo(ttft, tbt)
    segments = curve.segments(slo)
    for segment in segments:
        for load in (segment.low, segment.high, segment.low + share * (segment.high - segment.low)):
            first, between = curve.latencies_at(load)
            assert first <= ttft * (1 + 1e-9)
            assert between <= tbt * (1 + 1e-9)
        assert curve.meets(slo, segment.low)
        assert curve.meets(slo, segment.high)
    load = share * curve.max_load
    inside = any(s.low - 1e-5 <= load <= s.high + 1e-5 for s in segments)
    first, between = curve.latencies_at(load)
    clearly = first < 0.999 * ttft and between < 0.999 * tbt
    assert inside or not clearly


def test_slos_can_be_set_and_scaled() -> None:
    profile = ServingProfile.builtin().with_slos({"LL": Slo(3.0, 0.2)}, 0.5)
    assert profile.classes["LL"].slo == Slo(1.5, 0.1)
    assert profile.classes["SS"].slo == Slo(0.125, 0.05)


GOOD = "SS,2,1000,0,,100,0.1,0.01"


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (["XS,2,1000,0,,100,0.1,0.01"], ":2, column class", "no class 'XS'"),
        (["SS,3,1000,0,,100,0.1,0.01"], ":2, column tp", "1, 2, 4 or 8 GPUs"),
        (["SS,2,fast,0,,100,0.1,0.01"], ":2, column frequency", "should be a valid integer"),
        (["SS,2,1000,-5,,100,0.1,0.01"], ":2, column load", "or equal to 0"),
        (["SS,2,1000,nan,,100,0.1,0.01"], ":2, column load", "nan"),
        (["SS,2,1000,0,,100,,0.01"], ":2, column ttft_s", "is empty"),
        (["SS,2,1000,0,,100,0.1,0"], ":2, column tbt_s", "above 0"),
        ([GOOD, "SS,2,1000,10,,,0.1,0.01"], ":3, column energy_per_request_j", "blank"),
        ([GOOD, "SS,2,1000,10,5,5,0.1,0.01"], ":3, column energy_per_request_j", "both"),
        (["SS,2,1000,0,5,,0.1,0.01"], ":2, column energy_per_request_j", "without load"),
        ([GOOD, GOOD], ":3, column load", "line 2"),
        (
            [GOOD, "SS,2,1000,20,,1,0.1,0.01", "SS,2,1000,10,,1,0.1,0.01"],
            ":4, column load",
            "must be above 20, which line 3 has",
        ),
        (
            [GOOD, "SS,2,3000,0,,1,0.1,0.01", "SM,2,2000,0,,1,0.1,0.01"],
            ", column frequency",
            "2000 MHz but none",
        ),
        (["SS,2,1000,0,,12000,0.1,0.01"], ":2, column power_w", "6000 W on each GPU"),
        (["SS,2,1000"], ":2, column load", "is empty"),
        ([], "", "no rows"),
    ],
)
def test_a_bad_profile_is_refused_with_its_place(
    tmp_path: Path, lines: list[str], where: str, words: str
) -> None:
    path = write_profile(tmp_path / "bad.csv", lines)
    with pytest.raises(InputError) as refused:
        ServingProfile.read_csv(path)
    assert str(refused.value).startswith(f"{path}{where}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ({"classes": {"QQ": {}}}, "no class 'QQ'"),
        ({"classes": {"SS": {"ttft_slo_s": 0}}}, "classes.SS.ttft_slo_s"),
        ({"classes": {"SS": {"speed": 1}}}, "classes.SS"),
        ({"classes": []}, "classes should be an object"),
        ({"source": "guessed"}, "measured"),
        ({"gpu": 7}, "gpu should be a valid string, not 7"),
    ],
)
def test_a_bad_sidecar_is_refused(tmp_path: Path, sidecar: object, words: str) -> None:
    path = write_profile(tmp_path / "p.csv", [GOOD])
    (tmp_path / "p.meta.json").write_text(json.dumps(sidecar))
    with pytest.raises(InputError, match=r"p\.meta\.json") as refused:
        ServingProfile.read_csv(path)
    assert words in str(refused.value)


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("class,tp,frequency,load,power_w,ttft_s\n")
    with pytest.raises(InputError, match="column tbt_s: the column is missing"):
        ServingProfile.open(str(tmp_path / "p.csv"))
    with pytest.raises(InputError, match=BUILTIN):
        ServingProfile.open("nothing-here")


def test_public_names_are_all_there() -> None:
    import envplan.serving as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
