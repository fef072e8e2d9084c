"""A serving plan for those who start instances: NVIDIA Dynamo, Kubernetes, vLLM's production stack.

Each group of alike instances of a plan is a deployment with so many replicas. Pods carry their
clock and power limit as annotations. Files are JSON, which kubectl and Helm take as they take YAML.

Dynamo: a DynamoGraphDeployment (nvidia.com/v1beta1) with a frontend and a component for each group.
Its power agent sets the limit that the annotation says; its planner reads it. vLLM's production
stack: values of its Helm chart, and for each of its deployments a ScaledObject of KEDA
(keda.sh/v1alpha1) or a HorizontalPodAutoscaler of Kubernetes itself (autoscaling/v2).

A new format is a function from a FleetOrder to a document, and a row of ORCHESTRATORS.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan.errors import InputError
from envplan.serving.performance import Configuration
from envplan.serving.plan import DECODE, PREFILL, Group, Pool, Role, ServingPlan
from envplan.serving.profile import ServingProfile
from envplan.serving.steady_state import CurveKey

if TYPE_CHECKING:
    from pydantic import JsonValue

    from envplan.serving.apply import ServingApplied

#: Annotation of pods for Dynamo: watts of each GPU. Its power agent sets the limit; its planner
#: reads it.
DYNAMO_POWER_LIMIT: Final = "dynamo.nvidia.com/gpu-power-limit"
#: Our own annotations of pods: MHz, W of each GPU, and names of classes.
CLOCK: Final = "envplan/gpu-clock-mhz"
POWER_LIMIT: Final = "envplan/gpu-power-limit-w"
CLASSES: Final = "envplan/classes"
#: Our own annotation of whole graphs and of autoscalers: the digest of the plan's file.
PLAN: Final = "envplan/plan-sha256"

#: Requests that run or wait in a pod, as an adapter gives them to Kubernetes' own autoscaler:
#: docs/serving.md has the rule for Prometheus' adapter.
REQUESTS_METRIC: Final = "vllm_requests_inside"

#: Letters of a deployment's name, before a number that tells it from others.
_MAX_NAME: Final = 28
#: Dynamo's limits: components of a graph, and letters of its name and a component's together.
_MAX_COMPONENTS: Final = 25
_MAX_BOTH_NAMES: Final = 45
#: What Kubernetes calls a GPU as a resource.
_GPU_RESOURCE: Final = "nvidia.com/gpu"
#: What pods of vLLM request beside GPUs: the Helm chart wants it said.
_CPUS_PER_GPU: Final = 4
_GIB_PER_GPU: Final = 16

Document = dict[str, "JsonValue"]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Alike instances, as an orchestrator knows them.

    Attributes:
        name: a DNS label, unlike that of any other deployment of the plan.
        classes: names of the request classes that come to it.
        replicas: how many instances the plan has.
        most_replicas: as many, and those for which the plan leaves GPUs.
        tp: GPUs of each instance.
        clock_mhz: clock to be set.
        power_limit_w: of each GPU: the most that it draws at the plan's clock, by the profile. A
            limit instead of the clock holds the power, not the clock.
        requests_inside: requests that run or wait in an instance at the planned load, by its load
            curve.
        role: the phase of requests that it runs; None: both.
    """

    name: str
    classes: list[str]
    replicas: int
    most_replicas: int
    tp: int
    clock_mhz: int
    power_limit_w: int
    requests_inside: float
    role: Role | None = None

    @property
    def annotations(self) -> dict[str, str]:
        """Our own annotations of its pods."""
        return {
            CLOCK: str(self.clock_mhz),
            POWER_LIMIT: str(self.power_limit_w),
            CLASSES: ",".join(self.classes),
        }


@dataclass(frozen=True, kw_only=True)
class FleetOrder:
    """What an orchestrator is to start.

    Attributes:
        name: name of the graph, or of the Helm release.
        model: the model that is served, as vLLM is to load it; None only for autoscalers.
        image: image that pods run.
        prometheus: URL of the server that has vLLM's metrics.
        plan_sha256: digest of the plan's file.
        deployments: the groups of instances of the plan.
    """

    name: str
    model: str | None
    image: str
    prometheus: str
    plan_sha256: str
    deployments: list[Deployment]


@dataclass(frozen=True, kw_only=True)
class Orchestrator:
    """A format for one who starts instances.

    Attributes:
        default_output: the file that is written where users name none.
        document: makes its content.
        command: makes the command that users are to type next, without the file, its last word.
        default_image: that pods run where users name none; empty where the document starts none.
    """

    default_output: Path
    document: Callable[[FleetOrder], Document]
    command: Callable[[FleetOrder], list[str]]
    default_image: str = ""

    def text(self, order: FleetOrder) -> str:
        """The content of the file."""
        return json.dumps(self.document(order), indent=2, allow_nan=False) + "\n"


def deployments_of(
    plan: ServingPlan, profile: ServingProfile, applied: ServingApplied
) -> list[Deployment]:
    """The groups of a plan as deployments.

    Args:
        plan: the plan.
        profile: what it was made from.
        applied: the clocks that its GPUs are to be set to.
    """
    clocks_mhz = {instance.planned_mhz: instance.clock_mhz for instance in applied.instances}
    free_gpus = plan.request.gpus - plan.gpus
    names = set[str]()
    deployments = []
    for pool in plan.pools:
        for group in pool.groups:
            words = [pool.request_class, group.role, f"tp{group.tp}", str(group.frequency_mhz)]
            name = _unused_name("-".join(word for word in words if word), names)
            names.add(name)
            deployments.append(
                Deployment(
                    name=name,
                    classes=pool.classes,
                    replicas=group.instances,
                    most_replicas=group.instances + free_gpus // group.tp,
                    tp=group.tp,
                    clock_mhz=clocks_mhz[group.frequency_mhz],
                    power_limit_w=_highest_w(profile, group),
                    requests_inside=_requests_inside(profile, pool, group),
                    role=group.role,
                )
            )
    return deployments


def _unused_name(text: str, used: set[str]) -> str:
    """A DNS label like the end of a text, with a number behind it where it is used already."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    label = label[-_MAX_NAME:].strip("-")
    if not label[0].isalpha():
        label = f"p-{label}"
    name = label
    number = 1
    while name in used:
        number += 1
        name = f"{label}-{number}"
    return name


def _highest_w(profile: ServingProfile, group: Group) -> int:
    """The most that a GPU of a group draws in any iteration at the plan's clock, rounded up, W."""
    performance = profile.performance[Configuration(group.tp, group.frequency_mhz)]
    highest_w = max(performance.prompt_w.max(), performance.step_w.max(), performance.context_w)
    return math.ceil(float(highest_w) / group.tp)


def _requests_inside(profile: ServingProfile, pool: Pool, group: Group) -> float:
    """Requests in an instance at its planned load, by Little's law: their rate times their stay.

    A request stays for the time to its first token, of which curves have the 99th percentile, and
    for the further tokens of its own class's output. Latencies are those of the pool's class.
    """
    curve = profile.curves[CurveKey(pool.request_class, group.tp, group.frequency_mhz)]
    latencies = curve.latencies_at(group.load_tokens_s)
    share = group.load_tokens_s / pool.carried_tokens_s
    inside = 0.0
    for served in pool.serves:
        request_class = profile.classes[served.request_class]
        stays_s = 0.0
        if group.role != DECODE:
            stays_s += latencies.ttft_s
        if group.role != PREFILL:
            stays_s += (request_class.output_tokens - 1) * latencies.tbt_s
        inside += share * served.load_tokens_s / request_class.tokens * stays_s
    return max(1.0, inside)


def _dynamo_graph(order: FleetOrder) -> Document:
    """A DynamoGraphDeployment: a frontend, and a component of vLLM for each deployment.

    In a graph that runs, Dynamo takes other numbers of replicas, but no other components, and no
    other power limits or GPUs of a component. Names of components have their clock and GPUs, so
    that a component of another plan is not taken for the same one.
    """
    model = _required_model(order)
    if len(order.deployments) >= _MAX_COMPONENTS:
        raise InputError(
            f"the plan has {len(order.deployments)} groups of instances; a graph of Dynamo has "
            f"{_MAX_COMPONENTS} components at most, one of them the frontend"
        )
    longest = max((deployment.name for deployment in order.deployments), key=len)
    if len(order.name) + len(longest) > _MAX_BOTH_NAMES:
        raise InputError(
            f"--name {order.name} is too long for Dynamo, which puts names of components behind "
            f"it, as {longest}: at most {_MAX_BOTH_NAMES - len(longest)} letters"
        )
    frontend: Document = {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": order.image}]}},
    }
    components: list[JsonValue] = [frontend]
    components += [_dynamo_worker(order, model, deployment) for deployment in order.deployments]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": order.name, "annotations": {PLAN: order.plan_sha256}},
        "spec": {"backendFramework": "vllm", "components": components},
    }


def _dynamo_worker(order: FleetOrder, model: str, deployment: Deployment) -> Document:
    """The component of a deployment."""
    arguments: list[JsonValue] = ["--model", model, "--tensor-parallel-size", str(deployment.tp)]
    if deployment.role is not None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        arguments += ["--disaggregation-mode", deployment.role]
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    container: Document = {
        "name": "main",
        "image": order.image,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": arguments,
        "resources": {"limits": {_GPU_RESOURCE: str(deployment.tp)}},
    }
    annotations: Document = {
        DYNAMO_POWER_LIMIT: str(deployment.power_limit_w),
        **deployment.annotations,
    }
    return {
        "name": deployment.name,
        "type": deployment.role or "worker",
        "replicas": deployment.replicas,
        "podTemplate": {
            "metadata": {"annotations": annotations},
            "spec": {"containers": [container]},
        },
    }


def _production_stack(order: FleetOrder) -> Document:
    """Values for the Helm chart of vLLM's production stack: a modelSpec for each deployment."""
    _refuse_roles(order)
    model = _required_model(order)
    repository, _, tag = order.image.rpartition(":")
    model_specs: list[JsonValue] = []
    for deployment in order.deployments:
        annotations: Document = {**deployment.annotations}
        model_specs.append(
            {
                "name": deployment.name,
                "repository": repository,
                "tag": tag,
                "modelURL": model,
                "replicaCount": deployment.replicas,
                "requestCPU": _CPUS_PER_GPU * deployment.tp,
                "requestMemory": f"{_GIB_PER_GPU * deployment.tp}Gi",
                "requestGPU": deployment.tp,
                "podAnnotations": annotations,
                "vllmConfig": {"tensorParallelSize": deployment.tp},
            }
        )
    return {"servingEngineSpec": {"modelSpec": model_specs}}


def _scaled_objects(order: FleetOrder) -> Document:
    """A ScaledObject for each deployment of vLLM's production stack.

    As many replicas are wanted as leave each with no more requests than it has at its planned load,
    but no fewer than the plan has.
    """
    _refuse_roles(order)
    scaled: list[JsonValue] = []
    for deployment in order.deployments:
        stack_name = _stack_deployment(order, deployment)
        trigger: Document = {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": order.prometheus,
                "query": _requests_query(stack_name),
                "threshold": f"{deployment.requests_inside:.4g}",
            },
        }
        scaled.append(
            {
                "apiVersion": "keda.sh/v1alpha1",
                "kind": "ScaledObject",
                "metadata": _scaler_metadata(order, deployment),
                "spec": {
                    "scaleTargetRef": _scale_target(stack_name),
                    "minReplicaCount": deployment.replicas,
                    "maxReplicaCount": deployment.most_replicas,
                    "triggers": [trigger],
                },
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": scaled}


def _pod_autoscalers(order: FleetOrder) -> Document:
    """A HorizontalPodAutoscaler for each deployment of vLLM's production stack.

    It wants as many replicas as KEDA's objects do, by a metric of its pods.
    """
    _refuse_roles(order)
    autoscalers: list[JsonValue] = []
    for deployment in order.deployments:
        metric: Document = {
            "type": "Pods",
            "pods": {
                "metric": {"name": REQUESTS_METRIC},
                "target": {
                    "type": "AverageValue",
                    # Kubernetes counts in thousandths.
                    "averageValue": f"{round(1000 * deployment.requests_inside)}m",
                },
            },
        }
        autoscalers.append(
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": _scaler_metadata(order, deployment),
                "spec": {
                    "scaleTargetRef": _scale_target(_stack_deployment(order, deployment)),
                    "minReplicas": deployment.replicas,
                    "maxReplicas": deployment.most_replicas,
                    "metrics": [metric],
                },
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": autoscalers}


def _stack_deployment(order: FleetOrder, deployment: Deployment) -> str:
    """What the chart of vLLM's production stack calls a deployment."""
    return f"{order.name}-{deployment.name}-deployment-vllm"


def _scale_target(deployment_name: str) -> Document:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment_name}


def _scaler_metadata(order: FleetOrder, deployment: Deployment) -> Document:
    annotations: Document = {**deployment.annotations, PLAN: order.plan_sha256}
    return {"name": f"{order.name}-{deployment.name}", "annotations": annotations}


def _required_model(order: FleetOrder) -> str:
    """The model that pods load; refused where the user did not say it."""
    if order.model is None:
        raise InputError("which model shall vLLM load? Say --model, as in --model org/name")
    return order.model


def _refuse_roles(order: FleetOrder) -> None:
    """Refuse instances that run one phase only: vLLM's production stack has none."""
    if any(deployment.role for deployment in order.deployments):
        raise InputError(
            "the plan has prefill and decode apart; --format dynamo writes such plans, those of "
            "vLLM's production stack have no place for it"
        )


def _requests_query(deployment_name: str) -> str:
    """The PromQL query for requests that run or wait in the pods of a deployment."""
    pods = f'{{pod=~"{deployment_name}-.*"}}'
    return f"sum(vllm:num_requests_running{pods}) + sum(vllm:num_requests_waiting{pods})"


#: Formats by the name that users type.
ORCHESTRATORS: Final[Mapping[str, Orchestrator]] = {
    "dynamo": Orchestrator(
        default_output=Path("serving.dynamo.json"),
        document=_dynamo_graph,
        command=lambda order: ["kubectl", "apply", "--server-side", "-f"],
        default_image="nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.4.0",
    ),
    "production-stack": Orchestrator(
        default_output=Path("serving.values.json"),
        document=_production_stack,
        command=lambda order: ["helm", "upgrade", "--install", order.name, "vllm/vllm-stack", "-f"],
        default_image="vllm/vllm-openai:latest",
    ),
    "keda": Orchestrator(
        default_output=Path("serving.keda.json"),
        document=_scaled_objects,
        command=lambda order: ["kubectl", "apply", "-f"],
    ),
    "hpa": Orchestrator(
        default_output=Path("serving.hpa.json"),
        document=_pod_autoscalers,
        command=lambda order: ["kubectl", "apply", "-f"],
    ),
}
