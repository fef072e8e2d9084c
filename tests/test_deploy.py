"""deploy/: rules that promtool proves, manifests that fit their schemas, scripts that parse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import import_module, util
from pathlib import Path

import pytest
from tools.dashboard import dashboard

from envplan.runtime.node_metrics import NodeMetrics
from envplan.runtime.service import unit_file
from fake_nvml import FakeNvml

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Debian's prometheus"
)


def run(*command: object, cwd: Path = DEPLOY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False
    )


@needs_promtool
def test_rules_hold() -> None:
    folder = DEPLOY / "prometheus"
    for command in ("check", "test"):
        file = "envplan.rules.yml" if command == "check" else "envplan.rules.test.yml"
        done = run("promtool", command, "rules", file, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_name_only_metrics_that_there_are(fake_nvml: FakeNvml) -> None:
    module = import_module(NodeMetrics.__module__)
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    there_are = set(re.findall(r'"(envplan_\w+)"', text))
    for file in ("prometheus/envplan.rules.yml", "grafana/envplan.json"):
        if not (DEPLOY / file).exists():
            continue
        named = set(re.findall(r"\benvplan_\w+", (DEPLOY / file).read_text(encoding="utf-8")))
        assert named - there_are == set(), file


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_of_kubernetes(manifest: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))
    assert documents
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_own_client_reads_the_manifests(manifest: Path) -> None:
    if util.find_spec("kubernetes") is None:
        pytest.skip("needs kubernetes")
    from kubernetes import client  # type: ignore[import-not-found, unused-ignore]

    yaml = pytest.importorskip("yaml")

    for document in yaml.safe_load_all(manifest.read_text(encoding="utf-8")):
        kind = f"V1{document['kind']}"
        text = json.dumps(document)
        read = client.ApiClient().deserialize(text, kind, "application/json")
        written = client.ApiClient().sanitize_for_serialization(read)
        assert written == document  # a field that the client does not know would be gone


def test_the_unit_is_what_guard_prints() -> None:
    def settings(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return [line.partition(" guard")[0] for line in lines]

    ours = (DEPLOY / "systemd" / "envplan-guard.service").read_text(encoding="utf-8")
    printed = re.sub(r"=\S+/envplan guard", "=/opt/envplan/bin/envplan guard", unit_file())
    assert settings(ours) == settings(printed)
    assert "RestartSec=1s" in ours


def test_scripts_parse() -> None:
    for script in [*(DEPLOY / "slurm").glob("*.sh"), DEPLOY / "slurm" / "train.sbatch"]:
        done = run("bash", "-n", script)
        assert done.returncode == 0, done.stderr


def test_the_dashboard_is_current() -> None:
    text = (DEPLOY / "grafana" / "envplan.json").read_text(encoding="utf-8")
    assert json.loads(text) == dashboard()


def test_recorded_series_of_the_dashboard_have_rules() -> None:
    rules = (DEPLOY / "prometheus" / "envplan.rules.yml").read_text(encoding="utf-8")
    recorded = set(re.findall(r"record: (\S+)", rules))
    named = set(re.findall(r"\benvplan:[\w:]+", json.dumps(dashboard())))
    assert named
    assert named <= recorded
