"""What SECURITY.md says of files that somebody else wrote."""

from __future__ import annotations

import ast
import gzip
import json
import re
import tomllib
from pathlib import Path

import pytest

from cli_helpers import envplan, small_profile
from envplan.errors import InputError
from envplan.pipeline.imports import chrome, trace_events
from envplan.serving.trace import Trace

ROOT = Path(__file__).parent.parent
RELEASED = ROOT / "tests" / "fixtures" / "v0.1"

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "joblib"}


def test_nothing_unpickles_or_evaluates_what_it_reads() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "yaml":
                assert node.attr in ("safe_load", "YAMLError"), file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS_CODE, file
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                modules = {
                    *names,
                    *([node.module or ""] if isinstance(node, ast.ImportFrom) else []),
                }
                assert not {name.split(".")[0] for name in modules} & UNPICKLES, file


@pytest.mark.parametrize(
    "text",
    [
        "[[__import__('os').system('touch ran')]]",
        "[[(lambda: 1)()]]",
        "[['forward'.__class__]]",
        '[[f\'{open("ran", "w")}\']]',
    ],
)
def test_lists_in_python_are_data_and_no_programs(text: str, tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    (tmp_path / "clocks.py").write_text(text)
    ran = envplan("solve", "--clocks", "clocks.py", cwd=tmp_path)
    assert ran.code == 2
    assert "clocks.py" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "clocks.py",
        "profile.csv",
        "profile.meta.json",
    ]


def test_a_small_gzip_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**24))
    assert bomb.stat().st_size < 2**16
    monkeypatch.setattr(trace_events, "MAX_TRACE_BYTES", 2**23)
    with pytest.raises(InputError, match="larger than 8 MiB"):
        chrome.read_chrome_traces([bomb], chrome.TraceMapping.of(instructions={"forward": "F"}))
    with pytest.raises(InputError):
        Trace.read_csv(bomb.rename(tmp_path / "bomb.csv.gz"))


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "9" * 10**6, '"\\ud800"', "[1e999999999]"]
)
def test_deep_or_endless_json_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    ran = envplan("check", "plan.json", cwd=tmp_path)
    assert ran.code == 2
    assert ran.err.count("\n") == 1


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = "stage,instruction,frequency,time,energy\n0,\x1b]0;owned\x07\x1b[2J,1740,x,1\n"
    (tmp_path / "profile.csv").write_text(text)
    for arguments in (("check", "profile.csv"), ("solve", "profile.csv", "-m", "2")):
        ran = envplan(*arguments, cwd=tmp_path)
        assert ran.code == 2
        assert "\x1b" not in ran.out + ran.err
    document = json.loads((RELEASED / "plan.json").read_text())
    document["profile"]["name"] = "\x1b[2Jname"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert "\x1b" not in envplan("check", "plan.json", cwd=tmp_path).err


def test_names_in_a_plan_are_no_script_in_its_report(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    profile = small_profile()
    profile.save_csv(tmp_path / "profile.csv")
    sidecar = tmp_path / "profile.meta.json"
    known = {**json.loads(sidecar.read_text()), "gpu": evil, "workload": f'"><img onerror={evil}>'}
    sidecar.write_text(json.dumps(known))
    assert envplan("solve", "-m", "3", "-o", "plan.json", cwd=tmp_path).code == 0
    for command in (
        ["report", "plan.json", "-o", "report.html"],
        ["timeline", "plan.json", "-o", "t.svg"],
    ):
        ran = envplan(*command, cwd=tmp_path)
        assert ran.code == 0, ran.err
        page = (tmp_path / command[-1]).read_text()
        assert evil not in page
        assert not re.search(r"<img[^>]*onerror", page)


def test_a_plan_that_names_a_secret_file_shows_nothing_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("user,password\nroot,hunter2\n")
    document = json.loads((RELEASED / "plan.json").read_text())
    document["profile"]["path"] = str(secret)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    for arguments in (("check", "plan.json"), ("apply", "plan.json")):
        ran = envplan(*arguments, cwd=tmp_path)
        assert ran.code == 2
        assert "hunter2" not in ran.out + ran.err
    assert secret.read_text().endswith("hunter2\n")


def test_a_plan_that_names_what_no_file_can_be_called_is_refused_in_a_line(tmp_path: Path) -> None:
    document = json.loads((RELEASED / "plan.json").read_text())
    document["profile"]["path"] = "9" * 400
    (tmp_path / "plan.json").write_text(json.dumps(document))
    ran = envplan("check", "plan.json", cwd=tmp_path)
    assert ran.code == 2
    assert ran.err.startswith("envplan: error: plan.json: its profile 999")
    assert ran.err.count("\n") == 1


ROOT = Path(__file__).parents[1]


def test_actions_are_pinned_by_digest() -> None:
    used = []
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        used += re.findall(r"uses: (\S+)", workflow.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action


def test_lock_file_names_all_that_development_needs_by_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    wanted += project["project"]["optional-dependencies"]["yaml"]
    for group in ("test", "docs", "package", "lint"):
        wanted += project["dependency-groups"][group]
    lock = (ROOT / "requirements" / "dev.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==\S+.*\\\n    --hash=(sha256:[0-9a-f]{64})", lock, re.M))
    names = {re.split(r"[\[<>=!~; ]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names - pinned.keys() == set()
    # Nothing is in the lock file without a hash.
    assert len(re.findall(r"^[\w.-]+==", lock, re.M)) == len(
        re.findall(r"^[\w.-]+==.*\\$", lock, re.M)
    )
