"""Classes of requests that a user states: who is of which, and who may serve whom."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import assert_refused, done, envplan, told
from envplan.errors import InputError
from envplan.serving.class_file import read_classes
from envplan.serving.classes import (
    CLASSES,
    DEFAULT_CLASSES,
    RequestClass,
    RequestClasses,
    check_classes,
)
from envplan.serving.given_fleet import parse_fleet
from envplan.serving.observed_trace import observe_trace
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import compare_policies, replay_fixed, simulate
from envplan.serving.settings import Settings
from envplan.serving.trace import Trace

TOKENS = st.integers(1, 30)
BOUND = st.none() | TOKENS

CHAT_AND_REST = """
[[classes]]
name = "chat"
input_tokens_up_to = 2000
output_tokens_up_to = 500
ttft_slo_s = 0.5

[[classes]]
name = "rest"
input_tokens = 4000
output_tokens = 800
ttft_slo_s = 4
tbt_slo_s = 0.2
"""


def class_with(name: str, inputs: int | None, outputs: int | None) -> RequestClass:
    return RequestClass(
        name=name,
        input_tokens=100.0,
        output_tokens=10.0,
        ttft_slo_s=1.0,
        input_tokens_up_to=inputs,
        output_tokens_up_to=outputs,
    )


@st.composite
def some_classes(draw: st.DrawFn) -> RequestClasses:
    """Classes of which each gets some requests, and the last one the rest."""
    accepted: list[RequestClass] = []
    for bounds in [*draw(st.lists(st.tuples(BOUND, BOUND), max_size=12)), (None, None)]:
        candidate = class_with(f"c{len(accepted)}", *bounds)
        if bounds == (None, None) or not any(
            takes(earlier, *largest(candidate)) for earlier in accepted
        ):
            accepted.append(candidate)
        if bounds == (None, None):
            break
    return RequestClasses(accepted)


def takes(request_class: RequestClass, inputs: float, outputs: float) -> bool:
    most_inputs, most_outputs = largest(request_class)
    return inputs <= most_inputs and outputs <= most_outputs


def largest(request_class: RequestClass) -> tuple[float, float]:
    inputs, outputs = request_class.input_tokens_up_to, request_class.output_tokens_up_to
    return (math.inf if inputs is None else inputs, math.inf if outputs is None else outputs)


@given(some_classes(), st.lists(st.tuples(TOKENS, TOKENS), min_size=1))
def test_a_request_is_of_the_first_class_that_takes_it(
    classes: RequestClasses, requests: list[tuple[int, int]]
) -> None:
    check_classes(classes.to_list())
    inputs, outputs = np.array(requests).T
    for found, lengths in zip(classes.classify(inputs, outputs), requests, strict=True):
        listed = classes.to_list()
        assert takes(listed[found], *lengths)
        assert not any(takes(earlier, *lengths) for earlier in listed[:found])


@given(some_classes())
def test_hosts_take_whatever_a_class_takes_and_come_after_it(classes: RequestClasses) -> None:
    for name, request_class in classes.items():
        hosts = classes.hosts(name)
        assert hosts[0] == name
        assert classes.names[-1] in hosts
        for host in classes:
            assert classes.serves(host, name) == takes(classes[host], *largest(request_class))
            assert (host in hosts) == classes.serves(host, name)
        assert all(classes.index(host) > classes.index(name) for host in hosts[1:])
    assert classes.lowest_host(classes) == classes.names[-1]


@given(some_classes(), st.sampled_from([-1, 1]))
def test_a_mispredicted_output_is_one_length_off(classes: RequestClasses, step: int) -> None:
    bounds = sorted({largest(request_class)[1] for request_class in classes.values()} | {math.inf})
    for found, request_class in zip(classes.one_length_off(step), classes.values(), strict=True):
        inputs, outputs = largest(request_class)
        place = min(max(bounds.index(outputs) + step, 0), len(bounds) - 1)
        wanted = next(
            number
            for number, other in enumerate(classes.values())
            if takes(other, inputs, bounds[place])
        )
        assert found == wanted


def test_the_default_classes_are_dynamo_llms_nine() -> None:
    assert CLASSES == ("SS", "SM", "SL", "MS", "MM", "ML", "LS", "LM", "LL")
    check_classes(DEFAULT_CLASSES.to_list())
    inputs, outputs = np.meshgrid([1, 255, 256, 1023, 1024, 10**7], [1, 99, 100, 349, 350, 10**7])
    found = DEFAULT_CLASSES.classify(inputs.ravel(), outputs.ravel())
    wanted = [
        "SML"[int(np.digitize(given, (256, 1024)))] + "SML"[int(np.digitize(made, (100, 350)))]
        for given, made in zip(inputs.ravel(), outputs.ravel(), strict=True)
    ]
    assert [CLASSES[number] for number in found] == wanted
    up, down = DEFAULT_CLASSES.one_length_off(1), DEFAULT_CLASSES.one_length_off(-1)
    assert [CLASSES[number] for number in up[:3]] == ["SM", "SL", "SL"]
    assert [CLASSES[number] for number in down[-3:]] == ["LS", "LS", "LM"]


def test_a_file_states_bounds_and_means_lie_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CHAT_AND_REST)
    classes = read_classes(tmp_path / "c.toml")
    assert classes.names == ("chat", "rest")
    assert (classes["chat"].input_tokens, classes["chat"].output_tokens) == (1000, 250)
    assert (classes["rest"].ttft_slo_s, classes["rest"].tbt_slo_s) == (4, 0.2)
    stated = [{"name": "a", "input_tokens_up_to": 100, "output_tokens": 5, "ttft_slo_s": 1}]
    stated += [{"name": "b", "input_tokens_up_to": 300, "output_tokens": 5, "ttft_slo_s": 1}]
    stated += [{"name": "c", "input_tokens": 1000, "output_tokens": 5, "ttft_slo_s": 1}]
    (tmp_path / "c.json").write_text(json.dumps({"classes": stated}))
    assert read_classes(tmp_path / "c.json")["b"].input_tokens == 200


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.toml", "[[classes]\n", "is not valid TOML"),
        ("c.json", "[]", "must hold one JSON object"),
        ("c.toml", "", "classes is missing"),
        ("c.toml", "classes = []", "at least 1 item"),
        ("c.toml", CHAT_AND_REST.replace("ttft_slo_s = 0.5", ""), "classes[0].ttft_slo_s is miss"),
        ("c.toml", CHAT_AND_REST.replace("0.5", "-1"), "classes[0].ttft_slo_s"),
        ("c.toml", CHAT_AND_REST.replace("_up_to = 2", "_upto = 2"), "input_tokens_up_to?"),
        ("c.toml", CHAT_AND_REST.replace('"chat"', '"a=b"'), "classes[0].name"),
        ("c.toml", CHAT_AND_REST.replace('"chat"', '"rest"'), "class rest is there twice"),
        ("c.toml", CHAT_AND_REST.replace("input_tokens = 4000", ""), "rest needs input_tokens"),
        (
            "c.toml",
            CHAT_AND_REST.replace("input_tokens = 4000", "input_tokens_up_to = 9000"),
            "requests longer than class rest would have no class",
        ),
        (
            "c.toml",
            CHAT_AND_REST.replace("input_tokens_up_to = 2000\noutput_tokens_up_to = 500", "")
            + "input_tokens_up_to = 7000\n",
            "class chat needs input_tokens",
        ),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        read_classes(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name}: ")
    assert words in str(refused.value)
    assert_refused(envplan("serving", "profile", "--classes", tmp_path / name), 2, words)


def test_a_class_that_another_leaves_nothing_is_refused() -> None:
    shadowed = [class_with("a", 10, None), class_with("b", 5, 5), class_with("c", None, None)]
    with pytest.raises(ValueError, match="class b gets no requests: a, before it"):
        check_classes(shadowed)
    with pytest.raises(ValueError, match="1 to 64 classes, not 65"):
        check_classes([class_with(f"c{number}", None, None) for number in range(65)])


def test_a_trace_is_sorted_into_the_classes_of_the_profile() -> None:
    hour = Trace.open("azure-2023-conversation").before(600.0)
    one = RequestClasses([class_with("all", None, None).model_copy(update={"ttft_slo_s": 5.0})])
    profile = ServingProfile.builtin().with_classes(one)
    result = simulate(profile, hour, "envplan")
    assert result.slo_attainment_by_class.keys() == {"all"}
    assert result.requests == len(hour)


@given(some_classes())
@settings(max_examples=8, deadline=None)
def test_classes_of_one_slo_replay_alike_where_outputs_are_known(classes: RequestClasses) -> None:
    """Then a request's class says nothing that matters to routing, admission or the order."""
    apart = RequestClasses(
        request_class.model_copy(
            update={
                "ttft_slo_s": 4.0,
                "input_tokens_up_to": times_100(request_class.input_tokens_up_to),
                "output_tokens_up_to": times_100(request_class.output_tokens_up_to),
            }
        )
        for request_class in classes.values()
    )
    together = RequestClasses([apart[apart.names[-1]]])
    hour = Trace.open("azure-2023-conversation").before(300.0)
    known = Settings(predicted_lengths="true")
    replayed = []
    for stated in (apart, together):
        profile = ServingProfile.builtin().with_classes(stated)
        observed = observe_trace(profile, hour, known)
        fleet = parse_fleet("1xTP4@1200", profile.classes)
        replayed.append(replay_fixed("", fleet, observed, known))
    found, expected = replayed
    assert found.energy_j == pytest.approx(expected.energy_j)
    assert found.slo_attainment == expected.slo_attainment
    assert 0 < found.slo_attainment < 1
    assert (found.ttft_s, found.tbt_s) == (expected.ttft_s, expected.tbt_s)


def times_100(bound: int | None) -> int | None:
    return None if bound is None else 100 * bound


def test_as_many_classes_as_there_may_be_run_under_every_policy() -> None:
    bounds = [(50 * number, None) for number in range(1, 64)]
    classes = [class_with(f"c{inputs}", inputs, outputs) for inputs, outputs in bounds]
    profile = ServingProfile.builtin()
    many = RequestClasses([*classes, class_with("rest", None, None)])
    assert len(many) == 64
    hour = Trace.open("azure-2023-conversation").before(600.0)
    found = compare_policies(profile.with_classes(many), hour)
    assert [result.requests for result in found] == [len(hour)] * len(found)
    (one_pool,) = (result for result in found if result.policy == "SinglePool")
    assert len(one_pool.slo_attainment_by_class) > 30


def test_a_trace_of_other_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("timestamp,class\n0,SS\n1,LL\n")
    trace = Trace.read_csv(tmp_path / "t.csv")
    classes = RequestClasses([class_with("all", None, None)])
    with pytest.raises(InputError, match="gives classes instead of lengths: SS, SM"):
        trace.in_classes(classes)
    assert trace.in_classes(DEFAULT_CLASSES).class_index.tolist() == [0, 8]


def test_a_plan_for_own_classes_carries_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CHAT_AND_REST)
    loads = ["--load", "chat=4000,rest=2000", "--gpus", "16"]
    plan = told("serving", "solve", "--classes", "c.toml", *loads, "-o", "plan.json")
    assert [entry["name"] for entry in plan["asked"]["classes"]] == ["chat", "rest"]
    assert plan["predicted"]["attainment_by_class"].keys() == {"chat", "rest"}
    assert "holds" in done("check plan.json")
    done("serving apply plan.json -o clocks.json")
    (tmp_path / "t.csv").write_text("timestamp,class\n0,chat\n1,rest\n2,chat\n")
    trace = ["--trace", "t.csv", "--classes", "c.toml"]
    assert told("serving", "simulate", *trace, "--fleet", "3xTP4@1200")["requests"] == 3
    (tmp_path / "t.csv").write_text(
        "timestamp,input_tokens,output_tokens\n0,100,10\n1,9000,10\n2,100,600\n"
    )
    replayed = told("serving", "simulate", "--trace", "t.csv", "--fleet", "plan.json")
    assert replayed["slo_attainment_by_class"].keys() == {"chat", "rest"}
    assert [entry["name"] for entry in replayed["classes"]] == ["chat", "rest"]
    (tmp_path / "d.toml").write_text(CHAT_AND_REST.replace("chat", "talk"))
    other = ["--classes", "d.toml", "--trace", "t.csv", "--fleet", "plan.json"]
    ran = envplan("serving", "simulate", *other)
    assert_refused(ran, 2, "plan.json: was planned for other classes: chat, rest")


def test_a_plan_that_names_no_class_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done("serving solve --load SS=2000 --planner hierarchical -o plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["asked"]["classes"] = plan["asked"]["classes"][3:]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ran = envplan("check", "plan.json")
    assert_refused(ran, 2, "plan.json: asked.loads_tokens_s: there is no class 'SS'")
    del plan["asked"]["classes"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert "holds" in done("check plan.json")


def test_a_profile_keeps_the_classes_that_it_is_copied_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CHAT_AND_REST)
    done("serving profile --classes c.toml -o my.csv")
    assert ServingProfile.read_csv("my.csv").classes == read_classes(Path("c.toml"))
    document = told("serving", "profile", "my.csv", "--slo", "rest=2,0.15")
    assert document["classes"]["rest"]["tbt_slo_s"] == 0.15
    ran = envplan("serving", "profile", "my.csv", "--slo", "LL=2,0.1")
    assert_refused(ran, 2, "there is no class 'LL'; the classes are chat, rest")


def test_check_says_how_to_go_on_with_files_of_own_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CHAT_AND_REST)
    (tmp_path / "own.csv").write_text("timestamp,class\n0,chat\n1,rest\n")
    (tmp_path / "common.csv").write_text("timestamp,class\n0,SS\n1,LL\n")
    done("serving profile --classes c.toml -o my.csv")
    own_trace = done("check own.csv")
    assert "envplan serving compare --trace own.csv --classes CLASSES\n" in own_trace
    assert "envplan serving compare --trace common.csv\n" in done("check common.csv")
    assert "envplan serving solve my.csv --load chat=20000,rest=8000\n" in done("check my.csv")


def test_commands_suggest_the_next_one_for_the_same_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CHAT_AND_REST)
    (tmp_path / "t.csv").write_text("timestamp,class\n0,chat\n1,rest\n")
    service = ["--classes", "c.toml", "--slo", "rest=2,0.15"]
    shown = told("serving", "profile", *service)
    loads = "--load chat=20000,rest=8000"
    assert shown["next"] == f"envplan serving solve {' '.join(service)} {loads}"
    copied = told("serving", "profile", *service, "-o", "my.csv")
    assert copied["next"] == f"envplan serving solve my.csv --slo rest=2,0.15 {loads}"
    replayed = told("serving", "simulate", *service, "--trace", "t.csv", "--policy", "SinglePool")
    assert replayed["next"] == f"envplan serving compare {' '.join(service)} --trace t.csv"


def test_a_load_of_no_class_is_refused() -> None:
    ran = envplan("serving", "solve", "--load", "chat=9")
    assert_refused(ran, 2, "there is no class 'chat'; the classes are SS, SM")
