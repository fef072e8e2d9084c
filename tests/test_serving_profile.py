"""Serving profiles: read strictly, interpolated between loads, cut to what meets the SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.serving.builtin import BUILTIN
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES, Slo
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import FleetController
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S, Trace
from serving_helpers import profile_of, small_serving_profile, write_profile


def test_the_built_in_profile_holds_the_measured_times_and_powers() -> None:
    """Points of Splitwise (prompts) and of ML.ENERGY (Llama-3.1-70B on four H100), as published."""
    profile = ServingProfile.builtin()
    for tp, tokens, milliseconds in ((2, 1024, 158.0), (4, 2048, 200.7), (8, 8192, 844.9)):
        phases = profile.performance[tp, 1980]
        assert 1e3 * phases.prompt_s_at(tokens) == pytest.approx(milliseconds, rel=0.01)
    four = profile.performance[4, 1980]
    for batch, milliseconds, watts in ((8, 16.57, 1765), (64, 22.43, 2002), (256, 39.84, 2354)):
        assert 1e3 * four.step_s_at(batch) == pytest.approx(milliseconds, rel=0.11)
        assert np.interp(batch, four.batch_sizes, four.step_w) == pytest.approx(watts, rel=0.06)
    assert profile.source == "identified"
    assert profile.modelled
    for (tp, _), phases in profile.performance.items():
        assert max(*phases.prompt_w, *phases.step_w) <= 700.5 * tp
    for curve in profile.curves.values():
        phases = profile.performance[curve.tp, curve.frequency_mhz]
        assert curve.power_w[0] == pytest.approx(phases.idle_w)
        assert max(curve.power_w) <= max(*phases.prompt_w, *phases.step_w)


def test_steady_loads_agree_with_the_replay() -> None:
    """Power and pace that follow from Little's law, against requests one by one."""
    profile = ServingProfile.builtin()
    random = np.random.default_rng(3)
    for name, tp, share in (("LL", 4, 0.3), ("MM", 8, 0.4)):
        request_class, curve = profile.classes[name], profile.curves[name, tp, 1980]
        load = share * curve.max_load
        arrival = np.cumsum(random.exponential(request_class.tokens / load, 4000))
        count = len(arrival)
        inputs = np.full(count, round(request_class.input_tokens), dtype=np.int32)
        outputs = np.full(count, round(request_class.output_tokens), dtype=np.int32)
        classes = np.full(count, CLASSES.index(name), dtype=np.uint8)
        trace = Trace("steady", arrival - arrival[0], inputs, outputs, classes)
        observed = ObservedTrace(trace, profile, classes)
        controller = FleetController(observed, Settings(max_gpus=8))
        pool = PoolSpec(name, frozenset({name}), tp, 1980, 1)
        controller.reconcile(Fleet({name: pool}), 0.0, prewarmed=True)
        controller.advance(trace.duration_s)
        power_w = controller.finish().slot_energy_j[: trace.num_slots] / SLOT_S
        middle = power_w[2:-2].mean()
        assert middle == pytest.approx(curve.power_at(load), rel=0.12)


GOOD = ["2,1980,idle,0,0,200", "2,1980,prefill,128,0.05,600", "2,1980,decode,4,0.02,500"]


@pytest.mark.parametrize(
    ("line", "column", "words"),
    [
        ("3,1980,decode,1,0.1,300", "tp", "1, 2, 4 or 8 GPUs"),
        ("8,1980,decode,1,0.1,300", "tp", "does not say in kv_tokens"),
        ("2,fast,decode,8,0.1,300", "frequency", "should be a valid integer"),
        ("2,1980,nothing,1,0.1,300", "phase", "should be 'prefill', 'decode', 'context' or 'idle'"),
        ("2,1980,decode,2,0.1,300", "size", "must be above 4"),
        ("2,1980,decode,4,0.1,300", "size", "must be above 4"),
        ("2,1980,decode,-5,0.1,300", "size", "or equal to 0"),
        ("2,1980,decode,nan,0.1,300", "size", "nan"),
        ("2,1980,decode,8,0,300", "time_s", "must be a number above 0"),
        ("2,1980,decode,8,0.1,90000", "power_w", "45000 W on each GPU"),
        ("2,1980,decode,8,0.1", "power_w", "is empty"),
        ("2,1500,decode,8,0.1,300", "", "has no rows of idle"),
        ("", {"classes": {"QQ": {}}}, "no class 'QQ'"),
        ("", {"classes": {"SS": {"ttft_slo_s": 0}}}, "classes.SS.ttft_slo_s"),
        ("", {"classes": {"SS": {"speed": 1}}}, "classes.SS"),
        ("", {"classes": []}, "at least 1 item"),
        ("", {"classes": 7}, "classes should be an object"),
        ("", {"source": "guessed"}, "measured"),
        ("", {"chunk_tokens": {"2": 2**20 + 1}}, "less than or equal to 1048576"),
        ("", {"chunk_tokens": {"2": 0.5}}, "greater than or equal to 1"),
        ("", {"gpu": 7}, "gpu should be a valid string, not 7"),
    ],
)
def test_a_bad_profile_or_sidecar_is_refused_with_its_place(
    tmp_path: Path, line: str, column: str | dict[str, Any], words: str
) -> None:
    path = write_profile(tmp_path / "my.csv", GOOD)
    assert ServingProfile.read_csv(path).performance
    sidecar = column if isinstance(column, dict) else {}
    write_profile(path, [*GOOD, line], **sidecar)
    with pytest.raises(InputError) as refused:
        ServingProfile.read_csv(path)
    where = f"my.csv:5, column {column}" if line and column else "my.csv"
    where = "my.meta.json" if sidecar else where
    assert str(refused.value).startswith(str(tmp_path / where))
    assert words in str(refused.value)


def test_classes_follow_lengths_and_slos_are_set_and_scaled() -> None:
    indices = DEFAULT_CLASSES.classify(np.array([255, 256, 1024]), np.array([99, 100, 350]))
    assert [CLASSES[k] for k in indices] == ["SS", "MM", "LL"]
    assert [DEFAULT_CLASSES.serves("LM", name) for name in ("SS", "SL")] == [True, False]
    classes = ServingProfile.builtin().with_slos({"LL": Slo(3.0, 0.2)}, 0.5).classes
    assert (classes["LL"].slo, classes["SS"].slo) == (Slo(1.5, 0.1), Slo(0.125, 0.05))


def test_power_is_exact_at_knots_and_straight_between() -> None:
    profile = small_serving_profile({("SS", 2, 1000): [(0, 100), (10, 200), (20, 500)]})
    curve = profile.curves["SS", 2, 1000]
    assert [curve.power_at(load) for load in (0, 50, 100, 150, 200)] == [100, 150, 200, 350, 500]
    assert not curve.meets(Slo(1, 1), 200.1)
    assert profile.energy_per_request(curve, 50) == pytest.approx(150 * 2 / 50)  # of two tokens


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 0.3)), min_size=2, max_size=6),
    st.floats(0.05, 1.5),
    st.floats(0.02, 0.25),
    st.floats(0, 1),
)
@example(latencies=[(0.01, 0.25), (1.01, 0.25)], ttft=0.05, tbt=0.25, share=0.0)
def test_segments_are_the_loads_that_meet_the_slo(
    latencies: list[tuple[float, float]], ttft: float, tbt: float, share: float
) -> None:
    rising = zip(*(sorted(values) for values in zip(*latencies, strict=True)), strict=True)
    points = [(100 * k, k, *pair) for k, pair in enumerate(rising)]
    curve = profile_of({("SS", 2, 1000): points}).curves["SS", 2, 1000]
    slo, load = Slo(ttft, tbt), share * curve.max_load
    segments = curve.segments(slo)
    assert [segment.low_tokens_s for segment in segments[1:]] == [
        part.high_tokens_s for part in segments[:-1]
    ]
    most = segments[-1].high_tokens_s if segments else 0.0
    assert most == curve.capacity(slo)
    assert curve.meets(slo, most) or most == 0
    first, between = curve.latencies_at(load)
    if load <= most - 1e-5:
        assert first <= ttft * (1 + 1e-9)
        assert between <= tbt * (1 + 1e-9)
    elif load > most + 1e-5:
        assert first > ttft or between > tbt


LINES = ("4,1000,idle,0,0,100", "4,1000,prefill,1000,0.1,700", "4,1000,decode,1,0.01,300",
         "4,1000,decode,64,0.01,300")  # fmt: skip


def test_contexts_make_steps_longer_where_a_profile_says_so(tmp_path: Path) -> None:
    flat = ServingProfile.read_csv(write_profile(tmp_path / "flat.csv", LINES))
    row = "4,1000,context,100000,0.005,500"
    limits = {"max_context_tokens": 4096, "kv_bytes_per_token": 327680}
    path = write_profile(tmp_path / "deep.csv", [*LINES, row], **limits)
    deep = ServingProfile.read_csv(path)
    instance = deep.performance[4, 1000]
    assert instance.context_s_at(300_000) == pytest.approx(0.015)
    # 10 ms at 300 W, then 10 ms at 500 W.
    assert instance.step_power_beside(8, 200_000) == pytest.approx(400)
    assert deep.max_context_tokens == 4096
    assert deep.kv_bytes_per_token == 327680
    assert flat.performance[4, 1000].context_s_at(300_000) == 0
    assert flat.max_context_tokens is None
    slower, quicker = (profile.curves["LS", 4, 1000] for profile in (deep, flat))
    assert slower.tbt_s[0] == quicker.tbt_s[0]
    assert slower.tbt_s[-1] > quicker.tbt_s[-1]


def test_a_second_row_of_contexts_is_refused(tmp_path: Path) -> None:
    rows = [*LINES, "4,1000,context,1000,0.001,500", "4,1000,context,2000,0.001,500"]
    with pytest.raises(InputError, match="TP4 at 1000 MHz has several rows of context"):
        ServingProfile.read_csv(write_profile(tmp_path / "twice.csv", rows))


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "p.csv", [])

    def refused(words: str, name: str = str(path)) -> None:
        with pytest.raises(InputError, match=words):
            ServingProfile.open(name)

    refused("no rows")
    path.write_text("class,tp,frequency,load,power_w,ttft_s,tbt_s\n")
    refused("column phase: the column is missing")
    path.with_suffix(".meta.json").unlink()
    refused(r"p\.meta\.json")
    refused(BUILTIN, "nothing-here")


def test_public_names_are_all_there() -> None:
    import envplan.serving as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
