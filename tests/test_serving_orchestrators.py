"""Serving plans for those who start instances: as their schemas want them, and as the plan says.

With ENVPLAN_CRDS, a folder that has keda.sh_scaledobjects.yaml (kedacore/keda, config/crd/bases),
values.schema.json (vllm-project/production-stack, helm) or
nvidia.com_dynamographdeployments.yaml (ai-dynamo/dynamo, deploy/operator/config/crd/bases), all of
them Apache-2.0, documents are held against these as they are published. With the packages
kubernetes-validate and kubernetes, autoscalers are held against the schemas of Kubernetes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import assert_refused, done, envplan, told
from envplan.errors import InputError
from envplan.serving.apply import apply_serving_plan
from envplan.serving.hierarchical_planner import hierarchical_plan
from envplan.serving.orchestrators import (
    ORCHESTRATORS,
    Deployment,
    FleetOrder,
    _unused_name,
    deployments_of,
)
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile

LOADS = {"SS": 20_000.0, "LL": 3_000.0}
GPUS = 64
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
MODEL = ["--model", "org/name"]
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"

ANNOTATIONS = {"type": "object", "additionalProperties": {"type": "string"}}
NAME = {"type": "string", "pattern": f"^{DNS_LABEL.pattern}$"}
#: What the reference of nvidia.com/v1beta1 says of the fields that we write.
DYNAMO = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "nvidia.com/v1beta1"},
        "kind": {"const": "DynamoGraphDeployment"},
        "metadata": {"properties": {"name": NAME, "annotations": ANNOTATIONS}},
        "spec": {
            "additionalProperties": False,
            "properties": {
                "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                "components": {
                    "type": "array",
                    "maxItems": 25,
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "additionalProperties": False,
                        "properties": {
                            "name": NAME,
                            "type": {"enum": ["frontend", "worker", "prefill", "decode"]},
                            "replicas": {"type": "integer", "minimum": 0},
                            "podTemplate": {
                                "properties": {
                                    "metadata": {"properties": {"annotations": ANNOTATIONS}}
                                }
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServingPlan:
    """A plan, in a file of the current folder."""
    monkeypatch.chdir(tmp_path)
    made = hierarchical_plan(ServingProfile.builtin(), LOADS, GPUS)
    made.save(tmp_path / "serving-plan.json")
    return made


def applied(format_name: str, *options: str) -> Any:
    return told("serving", "apply", "--format", format_name, *options)["document"]


def strict(schema: Any) -> Any:
    """A schema of Kubernetes that refuses fields it does not know, as the API server drops them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(part) for name, part in schema.items()}
    keeps = found.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(found.get("properties"), Mapping) and not keeps:
        found.setdefault("additionalProperties", False)
    return found


def published(file_name: str) -> Any:
    folder = os.environ.get("ENVPLAN_CRDS")
    if not folder or not (Path(folder) / file_name).is_file():
        pytest.skip(f"needs ENVPLAN_CRDS with {file_name}")
    text = (Path(folder) / file_name).read_text()
    if file_name.endswith(".json"):
        return json.loads(text)
    return pytest.importorskip("yaml").safe_load(text)


def versions(crd: Any) -> Iterator[tuple[str, Any]]:
    for version in crd["spec"]["versions"]:
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        yield version["name"], schema


def groups_of(plan: ServingPlan) -> list[tuple[int, int, int]]:
    return [
        (group.instances, group.tp, group.frequency_mhz)
        for pool in plan.pools
        for group in pool.groups
    ]


def test_dynamo_gets_a_component_with_a_power_limit_for_each_group(plan: ServingPlan) -> None:
    document = applied("dynamo", "--name", "my-graph", *MODEL)
    jsonschema.validate(document, DYNAMO)
    assert document["metadata"]["name"] == "my-graph"
    profile = ServingProfile.builtin()
    frontend, *components = document["spec"]["components"]
    assert frontend["type"] == "frontend"
    for component, (instances, tp, mhz) in zip(components, groups_of(plan), strict=True):
        pods = component["podTemplate"]
        annotations = pods["metadata"]["annotations"]
        assert component["replicas"] == instances
        assert annotations["envplan/gpu-clock-mhz"] == str(mhz)
        limit_w = int(annotations["dynamo.nvidia.com/gpu-power-limit"])
        performance = profile.performance[tp, mhz]
        drawn_w = max([*performance.prompt_w, *performance.step_w]) / tp
        assert drawn_w <= limit_w < drawn_w + 1
        (container,) = pods["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": str(tp)}}
        assert container["args"] == ["--model", "org/name", "--tensor-parallel-size", str(tp)]


def test_the_production_stack_gets_a_model_spec_for_each_group(plan: ServingPlan) -> None:
    document = applied("production-stack", *MODEL, "--image", "host:5000/vllm:v1")
    specs = document["servingEngineSpec"]["modelSpec"]
    for spec, (instances, tp, mhz) in zip(specs, groups_of(plan), strict=True):
        assert (spec["replicaCount"], spec["requestGPU"]) == (instances, tp)
        assert spec["vllmConfig"] == {"tensorParallelSize": tp}
        assert spec["podAnnotations"]["envplan/gpu-clock-mhz"] == str(mhz)
        assert (spec["repository"], spec["tag"]) == ("host:5000/vllm", "v1")


def test_keda_scales_each_deployment_of_the_stack_at_its_planned_load(plan: ServingPlan) -> None:
    stack = applied("production-stack", *MODEL)["servingEngineSpec"]["modelSpec"]
    scaled = applied("keda", "--name", "prod")["items"]
    spare = GPUS - plan.gpus
    for entry, spec in zip(scaled, stack, strict=True):
        wanted = entry["spec"]
        deployment = f"prod-{spec['name']}-deployment-vllm"
        assert wanted["scaleTargetRef"]["name"] == deployment
        assert wanted["minReplicaCount"] == spec["replicaCount"]
        assert wanted["maxReplicaCount"] == spec["replicaCount"] + spare // spec["requestGPU"]
        (trigger,) = wanted["triggers"]
        assert f'pod=~"{deployment}-.*"' in trigger["metadata"]["query"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
    profile = ServingProfile.builtin()
    group = plan.pools[0].groups[0]
    request_class = profile.classes[plan.pools[0].request_class]
    # By Little's law: requests a second times how long each stays.
    rate = group.load_tokens_s / request_class.tokens
    stays_s = group.ttft_s + (request_class.output_tokens - 1) * group.tbt_s
    threshold = float(scaled[0]["spec"]["triggers"][0]["metadata"]["threshold"])
    assert threshold == pytest.approx(max(1.0, rate * stays_s), rel=1e-3)


def test_short_requests_in_the_pool_of_a_longer_class_stay_as_long_as_they_are(
    plan: ServingPlan,
) -> None:
    profile = ServingProfile.builtin()
    pool = next(pool for pool in plan.pools if pool.request_class == "LL")
    (long,) = pool.serves
    group = pool.groups[0].model_copy(update={"instances": 1, "load_tokens_s": 3000.0})
    # As many requests, of which half are short.
    short_tokens = 1500.0 / profile.load_conversion_factor("SS", "LL")
    serves = [
        long.model_copy(update={"request_class": "SS", "load_tokens_s": short_tokens}),
        long.model_copy(update={"load_tokens_s": 1500.0}),
    ]
    inside = []
    for served in (serves, [long.model_copy(update={"load_tokens_s": 3000.0})]):
        shared = pool.model_copy(update={"groups": [group], "serves": served})
        (deployment,) = deployments_of(
            plan.model_copy(update={"pools": [shared]}),
            profile,
            apply_serving_plan(plan, profile),
        )
        inside.append(deployment.requests_inside)
    both, only_long = inside
    latencies = profile.curves["LL", group.tp, group.frequency_mhz].latencies_at(3000.0)
    shorter_s = latencies.tbt_s * (
        profile.classes["LL"].output_tokens - profile.classes["SS"].output_tokens
    )
    num_short_s = 1500.0 / profile.classes["LL"].tokens
    assert only_long - both == pytest.approx(num_short_s * shorter_s)


def test_kubernetes_own_autoscalers_want_what_kedas_objects_want(plan: ServingPlan) -> None:
    scaled = applied("keda", "--name", "prod")["items"]
    autoscalers = applied("hpa", "--name", "prod")["items"]
    for autoscaler, entry in zip(autoscalers, scaled, strict=True):
        assert autoscaler["metadata"] == entry["metadata"]
        wanted, spec = autoscaler["spec"], entry["spec"]
        assert wanted["scaleTargetRef"] == spec["scaleTargetRef"]
        assert wanted["minReplicas"] == spec["minReplicaCount"]
        assert wanted["maxReplicas"] == spec["maxReplicaCount"]
        (metric,), (trigger,) = wanted["metrics"], spec["triggers"]
        assert metric["pods"]["metric"]["name"] in PAGE.read_text(encoding="utf-8")
        average = metric["pods"]["target"]["averageValue"]
        assert average.endswith("m")
        threshold = float(trigger["metadata"]["threshold"])
        assert int(average.removesuffix("m")) == pytest.approx(1000 * threshold, rel=1e-3)


def test_autoscalers_fit_the_schemas_of_kubernetes(plan: ServingPlan) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for autoscaler in applied("hpa")["items"]:
        validator.validate(autoscaler, validator.latest_version(), strict=True)
        unknown = json.loads(json.dumps(autoscaler).replace("minReplicas", "minReplicaCount"))
        with pytest.raises(validator.ValidationError):
            validator.validate(unknown, validator.latest_version(), strict=True)


def test_kubernetes_own_client_reads_the_autoscalers(plan: ServingPlan) -> None:
    if util.find_spec("kubernetes") is None:
        pytest.skip("needs kubernetes")
    from kubernetes import client  # type: ignore[import-not-found, unused-ignore]

    for autoscaler in applied("hpa")["items"]:
        text = json.dumps(autoscaler)
        kind = "V2HorizontalPodAutoscaler"
        read = client.ApiClient().deserialize(text, kind, "application/json")
        # A field that the client does not know would be gone.
        assert client.ApiClient().sanitize_for_serialization(read) == autoscaler


def test_instances_with_roles_are_dynamos_prefill_and_decode(plan: ServingPlan) -> None:
    pool = plan.pools[0]
    group = pool.groups[0]
    both = [group.model_copy(update={"role": role}) for role in ("prefill", "decode")]
    apart = plan.model_copy(update={"pools": [pool.model_copy(update={"groups": both})]})
    instances = apply_serving_plan(plan, ServingProfile.builtin())
    deployments = deployments_of(apart, ServingProfile.builtin(), instances)
    order = order_of(deployments, "g")
    document = ORCHESTRATORS["dynamo"].document(order)
    jsonschema.validate(document, DYNAMO)
    _, *components = document["spec"]["components"]
    assert [component["type"] for component in components] == ["prefill", "decode"]
    for component in components:
        (container,) = component["podTemplate"]["spec"]["containers"]
        mode = container["args"].index("--disaggregation-mode")
        assert container["args"][mode + 1] == component["type"]
    (whole,) = (
        deployment.requests_inside
        for deployment in deployments_of(plan, ServingProfile.builtin(), instances)
        if deployment.name == f"{pool.request_class.lower()}-tp{group.tp}-{group.frequency_mhz}"
    )
    inside = sum(deployment.requests_inside for deployment in deployments)
    assert whole <= inside <= whole + 1
    for name in ("production-stack", "keda", "hpa"):
        with pytest.raises(InputError, match="prefill and decode apart"):
            ORCHESTRATORS[name].document(order)


def test_scaled_objects_fit_kedas_definition(plan: ServingPlan) -> None:
    ((_, schema),) = versions(published("keda.sh_scaledobjects.yaml"))
    for entry in applied("keda")["items"]:
        jsonschema.validate(entry, schema)
    unknown = json.loads(json.dumps(entry).replace("minReplicaCount", "minReplicas"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(unknown, schema)


def test_values_fit_the_schema_of_the_production_stack(plan: ServingPlan) -> None:
    schema = strict(published("values.schema.json"))
    document = applied("production-stack", *MODEL)
    jsonschema.validate(document, schema)
    unknown = json.loads(json.dumps(document).replace("replicaCount", "replicas"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(unknown, schema)


def test_a_graph_fits_dynamos_definition(plan: ServingPlan) -> None:
    schemas = dict(versions(published("nvidia.com_dynamographdeployments.yaml")))
    document = applied("dynamo", *MODEL)
    jsonschema.validate(document, schemas["v1beta1"])
    unknown = json.loads(json.dumps(document).replace("replicas", "replicaCount"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(unknown, schemas["v1beta1"])


def order_of(deployments: list[Deployment], name: str) -> FleetOrder:
    return FleetOrder(
        name=name,
        model="org/name",
        image="vllm:1",
        prometheus="",
        plan_sha256="",
        deployments=deployments,
    )


def test_what_dynamo_does_not_take_is_refused(plan: ServingPlan) -> None:
    instances = apply_serving_plan(plan, ServingProfile.builtin())
    deployments = deployments_of(plan, ServingProfile.builtin(), instances)
    with pytest.raises(InputError, match="25 groups of instances"):
        ORCHESTRATORS["dynamo"].document(order_of((deployments * 25)[:25], "g"))
    long = replace(deployments[0], name="x" * 30)
    with pytest.raises(InputError, match="at most 15 letters"):
        ORCHESTRATORS["dynamo"].document(order_of([long], "g" * 16))
    ORCHESTRATORS["dynamo"].document(order_of([long], "g" * 15))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "production-stack"], "which model shall vLLM load? Say --model"),
        (["--format", "dynamo"], "which model shall vLLM load? Say --model"),
        (["--format", "dynamo", "--name", "My_Graph"], "small letters, digits and dashes"),
        (["--format", "production-stack", "--image", "vllm", *MODEL], "vllm/vllm-openai:latest"),
        (["--format", "slurm"], "clocks, dynamo, production-stack, keda or hpa"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    plan: ServingPlan, tmp_path: Path, options: list[str], words: str
) -> None:
    assert_refused(envplan("serving", "apply", *options), 2, words)
    assert [path.name for path in tmp_path.iterdir()] == ["serving-plan.json"]


def test_the_command_that_comes_next_is_named(plan: ServingPlan) -> None:
    assert "next: kubectl apply --server-side -f g.json" in done(
        "serving apply --format dynamo --model org/name -o g.json"
    )
    out = done("serving apply --format production-stack --name prod --model org/name")
    assert "next: helm upgrade --install prod vllm/vllm-stack -f serving.values.json" in out


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)))
def test_deployments_have_different_names_that_kubernetes_takes(names: list[str]) -> None:
    used = set[str]()
    for name in names:
        used.add(_unused_name(f"{name}-tp4-1200", used))
    assert len(used) == len(names)
    for name in used:
        assert DNS_LABEL.fullmatch(name)
        assert len(name) <= 36
