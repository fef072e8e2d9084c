from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import put, small_profile
from envplan._io.documents import Document
from envplan.check.plans import verify_plan
from envplan.costs import Run
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan, find_profile
from envplan.plan.costs import priced
from envplan.profile import Profile, builtin_profiles
from envplan.solve import trace_frontier

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.schemas import DOCUMENTS, json_schema

PIPELINE = Pipeline("1f1b", 2, 4)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return small_profile()


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return trace_frontier(PIPELINE, profile).plan(slowdown=0.1)


def built(profile: Profile, pipeline: Pipeline = PIPELINE, **options: Any) -> Plan:
    return trace_frontier(pipeline, profile, **options).max_frequency_plan()


# Pricing


def test_gpus_and_replicas_multiply_every_energy_and_no_time(profile: Profile) -> None:
    one = built(profile)
    assert one.predicted.baseline.energy_j == one.energy
    assert one.predicted.baseline.iteration_time_s == one.iteration_time
    assert one.predicted.savings_percent == one.predicted.slowdown_percent == 0
    assert one.frequencies == [[1740] * 8] * 2
    many = built(profile, gpus_per_stage=4, replicas=3)
    assert many.iteration_time == one.iteration_time
    assert many.energy == pytest.approx(12 * one.energy, rel=1e-15)
    assert many.energy_lower_bound == pytest.approx(12 * one.energy_lower_bound, rel=1e-15)
    assert many.average_power == pytest.approx(12 * one.average_power)
    assert many.gap == pytest.approx(one.gap)
    assert many.stages == one.stages


def test_everything_free_has_no_gap_and_no_savings() -> None:
    rows = [(s, i, 1000, 1.0, 0.0) for s in (0, 1) for i in ("forward", "backward")]
    plan = built(Profile.from_rows(rows), blocking_power=0.0)
    assert (plan.energy, plan.gap, plan.predicted.savings_percent) == (0, 0, 0)


@pytest.mark.parametrize(
    ("speaking", "argument", "source"),
    [
        (None, None, "default"),
        (None, 55.0, "argument"),
        (82.5, None, "profile"),
        (82.5, 55.0, "argument"),
    ],
)
def test_blocking_power_is_said_to_come_from_where_it_comes(
    speaking: float | None, argument: float | None, source: str
) -> None:
    profile = small_profile(blocking=speaking)
    plan = trace_frontier(PIPELINE, profile, blocking_power=argument).plan()
    assert plan.job.blocking_power_source == source
    assert plan.job.blocking_power_w == [argument or speaking or 70.0] * 2
    verify_plan(plan, profile)
    if source == "argument" and speaking is None:
        document = json.loads(plan.to_json())
        document["job"]["blocking_power_source"] = "default"
        with pytest.raises(InputError, match="blocking_power_w is not what its source"):
            verify_plan(Plan.from_document(document), profile)


# Files


def test_file_has_one_operation_a_line(plan: Plan) -> None:
    lines = [line for line in plan.to_json().splitlines() if '"instruction"' in line]
    assert len(lines) == 16
    assert all(json.loads(line.rstrip(",")) for line in lines)


def test_plan_of_a_dag_carries_the_dag(profile: Profile, tmp_path: Path) -> None:
    operations = [
        {"id": "a", "stage": 0, "instruction": "forward"},
        {"id": "b", "stage": 1, "instruction": "backward", "after": ["a"]},
    ]
    dag = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    plan = trace_frontier(dag, profile).plan()
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


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("stages.0.3.time_s", "1e999", r"stages\[0\]\[3\]\.time_s should be .* finite"),
        ("stages.0.3.time_s", '"1"', r"stages\[0\]\[3\]\.time_s .* not \"1\""),
        ("stages.0.3.time_s", "-1.0", "greater than or equal to 0"),
        ("stages.1.0.microbatch", "1" + "0" * 30, r"stages\[1\]\[0\]\.microbatch"),
        ("stages.1.0.frequency_mhz", "true", r"frequency_mhz .* not true"),
        ("job.blocking_power_w", "[1e300, 70.0]", r"job\.blocking_power_w\[0\]"),
        ("profile.sha256", '"abc"', r"profile\.sha256"),
        ("target.kind", '"magic"', r"target\.kind"),
        ("extra", "1", "extra is not a field of a plan"),
        ("predicted.gap", "null", r"predicted\.gap .* not null"),
    ],
)
def test_wrong_field_is_named_with_its_value(
    plan: Plan, tmp_path: Path, where: str, value: str, complaint: str
) -> None:
    document = json.loads(plan.to_json())
    put(document, where, "HERE")
    (tmp_path / "plan.json").write_text(json.dumps(document).replace('"HERE"', value))
    with pytest.raises(InputError, match=complaint) as caught:
        Plan.load(tmp_path / "plan.json")
    assert len(str(caught.value)) < 400


# Verification


def times(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


CHANGES: list[tuple[str, Any, str]] = [
    ("stages.0.2.time_s", times(1.01), r"stages\[0\]\[2\]\.time_s"),
    ("stages.0.2.energy_j", times(0.99), r"stages\[0\]\[2\]\.energy_j"),
    ("stages.1.1.frequency_mhz", 999, "no row for .* at 999 MHz"),
    ("stages.1.1.config", "tp2", "with config tp2"),
    ("stages.1.1.start_s", times(1.5), r"stages\[1\]\[1\]\.start_s"),
    ("stages.0", lambda s: [s[1], s[0], *s[2:]], r"stages\[0\]\[0\] is 'forward of microbatch 1"),
    ("stages.0", lambda stage: stage[:-1], r"stages\[0\] is a list of 7 values; .* of 8"),
    ("stages.0", lambda stage: [*stage, stage[0]], r"stages\[0\] is a list of 9 values"),
    ("stages", lambda stages: stages[:-1], "stages is a list of 1 values"),
    ("predicted.iteration_time_s", times(0.999), "iteration_time_s"),
    ("predicted.energy_j", times(0.999), "energy_j"),
    ("predicted.energy_lower_bound_j", times(1.1), "lies above energy_j"),
    ("predicted.gap", times(0.5), r"predicted\.gap"),
    ("predicted.savings_percent", times(1.1), "savings_percent"),
    ("predicted.slowdown_percent", times(1.1), "slowdown_percent"),
    ("predicted.average_power_w", times(1.1), "average_power_w"),
    ("predicted.baseline.energy_j", times(1.1), r"baseline\.energy_j|savings"),
    ("target.time_s", times(0.9), "more than the target"),
    ("target.deadline_s", times(1.01), "slowdown means"),
    ("target.deadline_s", 0.001, "more than the target"),
    ("target.kind", "no-slowdown", "the request means 'slowdown'"),
    ("target.kind", "min-energy", "the request means 'slowdown'"),
    (
        "target",
        lambda target: target | {"kind": "time", "time_s": 9.0},
        "the request means 'slowdown'",
    ),
    ("target.energy_j", 1.0, "the request means None"),
    ("target.power_w", 1.0, "the request means None"),
    ("job.microbatches", 5, "a list of 8 values; .* of 10"),
    ("job.schedule", "zigzag", "unknown schedule"),
    ("job.blocking_power_w", [70.0], "1 values for 2 stages"),
    ("job.blocking_power_w", [70.0, 60.0], "energy_j"),
    ("job.replicas", 2, "energy_j"),
]


@pytest.mark.parametrize(("where", "value", "complaint"), CHANGES)
def test_any_change_to_a_plan_is_found(
    plan: Plan, profile: Profile, where: str, value: Any, complaint: str
) -> None:
    document = json.loads(plan.to_json())
    put(document, where, value)
    with pytest.raises(InputError, match=complaint):
        verify_plan(Plan.from_document(document), profile)


def test_a_bound_that_cannot_be_proved_is_found_or_said_to_be_cp_sats(
    plan: Plan, profile: Profile
) -> None:
    least, document = plan.energy_lower_bound, json.loads(plan.to_json())
    for bound in (1.000001 * least, (plan.energy + least) / 2):
        document["predicted"] |= {"energy_lower_bound_j": bound, "gap": plan.energy / bound - 1}
        with pytest.raises(InputError, match="can be proved"):
            verify_plan(Plan.from_document(document), profile)
    document["predicted"]["bound"] = "cp-sat"
    proved = verify_plan(Plan.from_document(document), profile)
    assert any("CP-SAT" in line and "not proved" in line for line in proved)


def test_changed_profile_is_refused_unless_forced(plan: Plan, profile: Profile) -> None:
    changed = small_profile(microbatches=4, clocks=(1740, 1500, 1260, 1020, 780, 600))
    assert changed.sha256 != profile.sha256
    with pytest.raises(InputError, match=r"has changed .* --force"):
        verify_plan(plan, changed)
    document = json.loads(built(profile).to_json())
    least = 0.9 * document["predicted"]["energy_lower_bound_j"]  # more clocks may save more
    gap = document["predicted"]["energy_j"] / least - 1
    document["predicted"] |= {"energy_lower_bound_j": least, "gap": gap}
    assert "HAS CHANGED" in verify_plan(Plan.from_document(document), changed, force=True)[0]


# Finding the profile


def test_profile_is_found_beside_the_plan_and_then_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    small_profile().save_csv(there / "profile.csv")
    monkeypatch.chdir(there)
    plan = trace_frontier(PIPELINE, Profile.read_csv("profile.csv")).plan()
    assert plan.profile.path == "profile.csv"
    for where, file in ((here, there), (there, here)):
        monkeypatch.chdir(where)
        assert find_profile(plan.profile, file / "plan.json").sha256 == plan.profile.sha256
    monkeypatch.chdir(here)
    with pytest.raises(InputError, match=r"profile\.csv is not found"):
        find_profile(plan.profile, here / "plan.json")
    with pytest.raises(InputError, match="small is not found"):
        find_profile(trace_frontier(PIPELINE, small_profile()).plan().profile)


def test_builtin_profile_is_referred_to_by_name_alone() -> None:
    name = builtin_profiles()[0].name
    profile = Profile.builtin(name)
    plan = built(profile, Pipeline("1f1b", profile.num_stages, 2))
    assert (plan.profile.name, plan.profile.path) == (name, None)
    assert find_profile(plan.profile).sha256 == profile.sha256


def test_file_name_that_is_not_text_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "caf\udce9.csv"
    small_profile().save_csv(file)
    built(Profile.read_csv(file)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").profile.name == "caf?"


#: A change of a plan's request, by the options that the plan was made with, and what `check` says.
CONTRADICTIONS = {
    "slowdown": ({"slowdown": 0.05}, {"deadline": {"kind": "slowdown", "slowdown": 0.1}}, "target"),
    "deadline": ({"slowdown": 0.05}, {"deadline": {"kind": "min-energy"}}, "target.kind"),
    "objective": ({"slowdown": 0.05}, {"objective": "time"}, "request.objective time"),
    "latency": ({"switch_latency": 0.01}, {"switch_latency_s": 0.02}, "job.switch_latency_s"),
    "no latency": ({"switch_latency": 0.01}, {"switch_latency_s": 0.0}, "job.switch_latency_s"),
    "straggler": ({"straggler_time": 9.0}, {"straggler_time_s": 8.0}, "target"),
    "no straggler": ({"straggler_time": 9.0}, {"straggler_time_s": None}, "target"),
    "min dwell": (
        {"min_dwell": 0.01},
        {"limits": [{"kind": "min-hold", "time_s": 0.02}]},
        "job.min_dwell_s",
    ),
    "noise": (
        {"probability": 0.9, "noise": 0.01, "slowdown": 0.05},
        {"limits": [{"kind": "probability", "probability": 0.9, "noise": 0.5}]},
        "predicted.robustness.noise",
    ),
    "probability": (
        {"probability": 0.9, "noise": 0.01, "slowdown": 0.05},
        {"limits": [{"kind": "probability", "probability": 0.5, "noise": 0.01}]},
        "predicted.robustness.probability",
    ),
    "no probability": (
        {"probability": 0.9, "noise": 0.01, "slowdown": 0.05},
        {"limits": []},
        "predicted.robustness",
    ),
    "iterations": (
        {"run": Run(iterations=100, deadline_s=900.0)},
        {"run": {"iterations": 50, "deadline_s": 900.0}},
        "costs.iterations",
    ),
    "what is least": (
        {"run": Run(iterations=100, deadline_s=900.0, carbon=Rate.fixed(0.4))},
        {"objective": "energy"},
        "request.objective energy",
    ),
    "peak": (
        {"peak_power_cap": 5000.0, "slowdown": 0.05},
        {"limits": [{"kind": "peak-power", "power_w": 6000.0}]},
        "target.peak_power_w",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_check_refuses_a_plan_whose_fields_contradict_its_request(name: str) -> None:
    asked, change, complaint = CONTRADICTIONS[name]
    profile = small_profile(2)
    plan = trace_frontier(Pipeline("1f1b", 2, 3), profile).plan(**asked, moves=0.1)
    document = json.loads(plan.to_json())
    assert verify_plan(Plan.from_document(document), profile)
    document["request"] |= change
    for field, value in change.items():
        if value is None:
            del document["request"][field]
    with pytest.raises(InputError, match=complaint):
        verify_plan(Plan.from_document(document), profile)
