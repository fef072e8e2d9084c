from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import small_profile
from envplan._model import Document
from envplan.costs import Run, priced
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan, find_profile
from envplan.profile import Profile, builtin_profiles
from envplan.solve import trace_frontier
from envplan.verify import verify_plan

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.schemas import DOCUMENTS, json_schema


@pytest.fixture(scope="module")
def profile() -> Profile:
    return small_profile()


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return Pipeline("1f1b", 2, 4)


@pytest.fixture(scope="module")
def plan(pipeline: Pipeline, profile: Profile) -> Plan:
    return trace_frontier(pipeline, profile).plan(slowdown=0.1)


def built(pipeline: Pipeline, profile: Profile, **options: Any) -> Plan:
    return trace_frontier(pipeline, profile, **options).max_frequency_plan()


# Pricing


def test_maximum_frequency_plan_is_its_own_baseline(pipeline: Pipeline, profile: Profile) -> None:
    plan = built(pipeline, profile)
    assert plan.predicted.baseline.energy_j == plan.energy
    assert plan.predicted.baseline.iteration_time_s == plan.iteration_time
    assert plan.predicted.savings_percent == plan.predicted.slowdown_percent == 0
    assert plan.frequencies == [[1740] * 8] * 2


def test_gpus_and_replicas_multiply_every_energy_and_no_time(
    pipeline: Pipeline, profile: Profile
) -> None:
    one = built(pipeline, profile)
    many = built(pipeline, profile, gpus_per_stage=4, replicas=3)
    assert many.iteration_time == one.iteration_time
    assert many.energy == pytest.approx(12 * one.energy, rel=1e-15)
    assert many.energy_lower_bound == pytest.approx(12 * one.energy_lower_bound, rel=1e-15)
    assert many.average_power == pytest.approx(12 * one.average_power)
    assert many.gap == pytest.approx(one.gap)
    assert many.stages == one.stages


def test_everything_free_has_no_gap_and_no_savings(pipeline: Pipeline) -> None:
    rows = [(s, i, 1000, 1.0, 0.0) for s in (0, 1) for i in ("forward", "backward")]
    plan = built(pipeline, Profile.from_rows(rows), blocking_power=0.0)
    assert (plan.energy, plan.gap, plan.predicted.savings_percent) == (0, 0, 0)


def test_blocking_power_is_said_to_come_from_where_it_comes(pipeline: Pipeline) -> None:
    silent, speaking = small_profile(), small_profile(blocking=82.5)
    for profile, argument, source in (
        (silent, None, "default"),
        (silent, 55.0, "argument"),
        (speaking, None, "profile"),
        (speaking, 55.0, "argument"),
    ):
        plan = trace_frontier(pipeline, profile, blocking_power=argument).plan()
        assert plan.job.blocking_power_source == source
        assert (
            plan.job.blocking_power_w == [argument or (82.5 if profile is speaking else 70.0)] * 2
        )
        verify_plan(plan, profile)


# Files


def test_file_has_one_operation_a_line(plan: Plan) -> None:
    lines = [line for line in plan.to_json().splitlines() if '"instruction"' in line]
    assert len(lines) == 16
    assert all(json.loads(line.rstrip(",")) for line in lines)


def test_plan_of_a_dag_carries_the_dag(profile: Profile, tmp_path: Path) -> None:
    document = {
        "schema": "envplan/dag/v1",
        "operations": [
            {"id": "a", "stage": 0, "instruction": "forward"},
            {"id": "b", "stage": 1, "instruction": "backward", "after": ["a"]},
        ],
    }
    plan = trace_frontier(Pipeline.from_dag(document), profile).plan()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert verify_plan(loaded, profile)


@pytest.mark.parametrize("model", DOCUMENTS)
def test_schema_file_is_the_one_the_models_give(model: type[Document]) -> None:
    assert model.schema_file().read_text() == json_schema(model), "run python -m tools.schemas"


def test_schema_names_every_field_of_a_saved_plan(plan: Plan) -> None:
    full = priced(plan.with_ladder([plan]), Run(price=Rate.fixed(0.3)))
    schema, document = json.loads(json_schema(Plan)), json.loads(full.to_json())
    assert set(document) == set(schema["properties"])
    operation = schema["$defs"]["PlannedOperation"]
    assert set(document["stages"][0][0]) == set(operation["required"])


Path_ = tuple[str | int, ...]


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        (("stages", 0, 3, "time_s"), "1e999", r"stages\[0\]\[3\]\.time_s should be .* finite"),
        (("stages", 0, 3, "time_s"), '"1"', r"stages\[0\]\[3\]\.time_s .* not \"1\""),
        (("stages", 0, 3, "time_s"), "-1.0", "greater than or equal to 0"),
        (("stages", 1, 0, "microbatch"), "1" + "0" * 30, r"stages\[1\]\[0\]\.microbatch"),
        (("stages", 1, 0, "frequency_mhz"), "true", r"frequency_mhz .* not true"),
        (("job", "blocking_power_w"), "[1e300, 70.0]", r"job\.blocking_power_w\[0\]"),
        (("profile", "sha256"), '"abc"', r"profile\.sha256"),
        (("target", "kind"), '"magic"', r"target\.kind"),
        (("extra",), "1", "extra is not a field of a plan"),
        (("predicted", "gap"), "null", r"predicted\.gap .* not null"),
    ],
)
def test_wrong_field_is_named_with_its_value(
    plan: Plan, tmp_path: Path, where: Path_, value: str, complaint: str
) -> None:
    document = json.loads(plan.to_json())
    put(document, where, "HERE")
    (tmp_path / "plan.json").write_text(json.dumps(document).replace('"HERE"', value))
    with pytest.raises(InputError, match=complaint) as caught:
        Plan.load(tmp_path / "plan.json")
    assert len(str(caught.value)) < 400


# Verification


def put(document: Any, where: Path_, value: Any) -> None:
    for step in where[:-1]:
        document = document[step]
    document[where[-1]] = value


def scaled(where: Path_, factor: float) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        found = document
        for step in where:
            found = found[step]
        put(document, where, found * factor)

    return change


def swapped(document: Any) -> None:
    stage = document["stages"][0]
    stage[0], stage[1] = stage[1], stage[0]


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (scaled(("stages", 0, 2, "time_s"), 1.01), r"stages\[0\]\[2\]\.time_s"),
    (scaled(("stages", 0, 2, "energy_j"), 0.99), r"stages\[0\]\[2\]\.energy_j"),
    (lambda d: put(d, ("stages", 1, 1, "frequency_mhz"), 999), "no row for .* at 999 MHz"),
    (lambda d: put(d, ("stages", 1, 1, "config"), "tp2"), "with config tp2"),
    (scaled(("stages", 1, 1, "start_s"), 1.5), r"stages\[1\]\[1\]\.start_s"),
    (swapped, r"stages\[0\]\[0\] is 'forward of microbatch 1"),
    (lambda d: d["stages"][0].pop(), r"stages\[0\] is a list of 7 values; .* of 8"),
    (lambda d: d["stages"][0].append(d["stages"][0][0]), r"stages\[0\] is a list of 9 values"),
    (lambda d: d["stages"].pop(), "stages is a list of 1 values"),
    (scaled(("predicted", "iteration_time_s"), 0.999), "iteration_time_s"),
    (scaled(("predicted", "energy_j"), 0.999), "energy_j"),
    (scaled(("predicted", "energy_lower_bound_j"), 1.1), "lies above energy_j"),
    (scaled(("predicted", "gap"), 0.5), r"predicted\.gap"),
    (scaled(("predicted", "savings_percent"), 1.1), "savings_percent"),
    (scaled(("predicted", "slowdown_percent"), 1.1), "slowdown_percent"),
    (scaled(("predicted", "average_power_w"), 1.1), "average_power_w"),
    (scaled(("predicted", "baseline", "energy_j"), 1.1), r"baseline\.energy_j|savings"),
    (scaled(("target", "time_s"), 0.9), "more than the target"),
    (scaled(("target", "deadline_s"), 1.01), "slowdown means"),
    (lambda d: put(d, ("target", "deadline_s"), 0.001), "more than the target"),
    (lambda d: put(d, ("target", "kind"), "no-slowdown"), "no-slowdown means"),
    (lambda d: put(d, ("target", "kind"), "min-energy"), "min-energy means"),
    (lambda d: d["target"].update(kind="time", time_s=9.0), "time means"),
    (lambda d: put(d, ("target", "energy_j"), 1.0), "differ from the plan's own fields"),
    (lambda d: put(d, ("target", "power_w"), 1.0), "differ from the plan's own fields"),
    (lambda d: put(d, ("job", "microbatches"), 5), "a list of 8 values; .* of 10"),
    (lambda d: put(d, ("job", "schedule"), "zigzag"), "unknown schedule"),
    (lambda d: put(d, ("job", "blocking_power_w"), [70.0]), "1 values for 2 stages"),
    (lambda d: put(d, ("job", "blocking_power_w"), [70.0, 60.0]), "energy_j"),
    (lambda d: put(d, ("job", "replicas"), 2), "energy_j"),
]


@pytest.mark.parametrize(("change", "complaint"), CHANGES, ids=[c for _, c in CHANGES])
def test_any_change_to_a_plan_is_found(
    plan: Plan, profile: Profile, change: Callable[[Any], None], complaint: str
) -> None:
    document = copy.deepcopy(json.loads(plan.to_json()))
    change(document)
    with pytest.raises(InputError, match=complaint):
        verify_plan(Plan.from_document(document), profile)


def test_bound_between_the_true_one_and_the_energy_is_found(plan: Plan, profile: Profile) -> None:
    bound = (plan.energy + plan.energy_lower_bound) / 2
    document = json.loads(plan.to_json())
    document["predicted"] |= {"energy_lower_bound_j": bound, "gap": plan.energy / bound - 1}
    with pytest.raises(InputError, match="can be proved"):
        verify_plan(Plan.from_document(document), profile)


def test_bound_of_cp_sat_is_reported_as_not_proved_again(plan: Plan, profile: Profile) -> None:
    document = json.loads(plan.to_json())
    document["predicted"]["bound"] = "cp-sat"
    proved = verify_plan(Plan.from_document(document), profile)
    assert any("CP-SAT" in line and "not proved" in line for line in proved)


def test_blocking_power_that_its_source_does_not_give_is_found(pipeline: Pipeline) -> None:
    profile = small_profile()
    document = json.loads(built(pipeline, profile, blocking_power=60.0).to_json())
    document["job"]["blocking_power_source"] = "default"
    with pytest.raises(InputError, match="blocking_power_w is not what its source"):
        verify_plan(Plan.from_document(document), profile)


def test_changed_profile_is_refused_unless_forced(plan: Plan, profile: Profile) -> None:
    changed = small_profile(microbatches=4, clocks=(1740, 1500, 1260, 1020, 780, 600))
    assert changed.sha256 != profile.sha256
    with pytest.raises(InputError, match=r"has changed .* --force"):
        verify_plan(plan, changed)
    document = json.loads(built(Pipeline("1f1b", 2, 4), profile).to_json())
    least = 0.9 * document["predicted"]["energy_lower_bound_j"]  # more clocks may save more
    gap = document["predicted"]["energy_j"] / least - 1
    document["predicted"] |= {"energy_lower_bound_j": least, "gap": gap}
    assert "HAS CHANGED" in verify_plan(Plan.from_document(document), changed, force=True)[0]


# Finding the profile


def test_profile_is_found_beside_the_plan_and_then_from_here(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    small_profile().save_csv(there / "profile.csv")
    monkeypatch.chdir(there)
    plan = trace_frontier(pipeline, Profile.read_csv("profile.csv")).plan()
    assert plan.profile.path == "profile.csv"
    monkeypatch.chdir(here)
    assert find_profile(plan.profile, there / "plan.json").sha256 == plan.profile.sha256
    monkeypatch.chdir(there)
    assert find_profile(plan.profile, here / "plan.json").sha256 == plan.profile.sha256
    monkeypatch.chdir(here)
    with pytest.raises(InputError, match=r"profile\.csv is not found"):
        find_profile(plan.profile, here / "plan.json")
    with pytest.raises(InputError, match="small is not found"):
        find_profile(trace_frontier(pipeline, small_profile()).plan().profile)


def test_builtin_profile_is_referred_to_by_name_alone() -> None:
    name = builtin_profiles()[0].name
    profile = Profile.builtin(name)
    plan = built(Pipeline("1f1b", profile.num_stages, 2), profile)
    assert (plan.profile.name, plan.profile.path) == (name, None)
    assert find_profile(plan.profile).sha256 == profile.sha256


def test_file_name_that_is_not_text_does_no_harm(pipeline: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "caf\udce9.csv"
    small_profile().save_csv(file)
    plan = built(pipeline, Profile.read_csv(file))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").profile.name == "caf?"
