"""What every command says, compared with a stored file: tests/golden/COMMAND.txt.

A file holds command lines that follow each other in one folder, and what each of them says. Of JSON
documents it holds the keys and the types of their values. After a change of words that was meant,
write the files anew and read the difference:

    ENVPLAN_GOLDEN=write .venv/bin/python -m pytest tests/test_cli_golden.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Ran, envplan
from test_cli_options import COMMANDS

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
WRITE = os.environ.get("ENVPLAN_GOLDEN") == "write"

#: A built-in profile; a small job of it.
SMALL = "a40-gpt3-1.3b-4stage -m 4"
MEASURED = "sosp24-a100-gpt3-xl-4stage"
SWEEP = """
[grid]
profiles = ["a40-gpt3-1.3b-4stage"]
microbatches = [4]
schedules = ["1f1b", "gpipe"]
slowdowns = [0, 2]
"""
STRAGGLERS = "iteration,replica,slowdown\n0,1,1.2\n1,0,1.1\n"
DAY = "hour,price,carbon\n" + "".join(f"{hour},{0.1 + hour / 100},300\n" for hour in range(24))

#: By command what is typed after `envplan`, beside --help. Where a line begins with "-q " it only
#: prepares those below it.
LINES = {
    "": ["fly"],
    "profile": [
        "profile --backend modelled --pp 2 --layers 4 --step 210",
        "profile --model llama3-8b --pp 4 --step 180 -o llama.csv",
        "profile --backend modelled --pp 2 --layers 4 --step 210 --json",
        "profile --backend rocm",
        "profile --backend modelled --heads 7",
    ],
    "frontier": [
        f"frontier {SMALL} --plans 9",
        f"frontier {MEASURED} -m 2 --plans 3 --plot -o frontier.csv",
        f"frontier {SMALL} --plans 3 --json",
        f"frontier {SMALL} --schedule zigzag",
        "frontier nothing.csv",
    ],
    "solve": [
        f"solve {SMALL}",
        f"solve {MEASURED} -m 2 --slowdown 5 --ladder 3",
        f"solve {SMALL} --straggler-time 20",
        f"solve {SMALL} --price 0.25 --currency EUR --carbon 380 --iterations 100000",
        f"solve {SMALL} --price 0.2 --iterations 20000 --deadline 7d",
        f"solve {SMALL} --slowdown 3 --robust 95 --noise 2",
        f"solve {SMALL} --slowdown 3 --switch-latency 5ms --min-dwell 20ms --peak-power-cap 1100",
        f"solve {SMALL} --power-cap 900",
        f"solve {SMALL} --planner envpipe",
        f"solve {SMALL} --replica-profile a40-gpt3-1.3b-4stage:2 -o mixed.json",
        f"solve {SMALL} --json",
        f"solve {SMALL} --target-time 0.5",
        f"solve {SMALL} --target-time 1 --slowdown 1",
        f"solve {SMALL} --planner zeus_global --power-cap 900",
        f"solve {SMALL} --slowdown two",
    ],
    "apply": [
        f"-q solve {SMALL} --dp 2 --ladder 2",
        "apply",
        "apply --dry-run",
        "apply --format zeus",
        "apply --min-dwell 20ms",
        "apply --clocks 800-2000:100",
        "apply --json",
        "apply --tp 4",
    ],
    "savings": [
        f"savings {SMALL}",
        f"savings {SMALL} --gpus 1024 --price 0.25 --currency EUR --gpu-hour 1.90 --carbon 380",
        f"savings {SMALL} --json",
    ],
    "advise": [f"advise {SMALL}", f"advise {SMALL} --json"],
    "compare": [
        f"compare {SMALL}",
        f"compare {SMALL} --straggler-slowdown 10 --price 0.25 --iterations 100000",
        f"compare {SMALL} --json",
    ],
    "simulate": [
        f"-q solve {SMALL} --slowdown 2 --dp 4",
        f"-q solve {SMALL} -o other.json",
        "simulate",
        "simulate --noise 2 --runs 20 --switch-latency 5ms",
        "simulate --replicas 128 --straggler 1.2 --price 0.2 --iterations 1000",
        "simulate --straggler-trace stragglers.csv --strong-scaling 2,4",
        "simulate --replica other.json --trace trace.json",
        "simulate --json",
        "simulate --straggler slow",
    ],
    "timeline": [f"-q solve {SMALL}", "timeline -o timeline.html", "timeline --json"],
    "report": [f"-q solve {SMALL}", "report", "report --no-compare --json"],
    "site": [
        f"-q frontier {SMALL} --plans 3 --slower -o small.json",
        "site . --power 600W",
        "site . --power 600W --shed --json",
        "site . --power 100W",
        "site . --power plenty",
    ],
    "sweep": ["sweep sweep.toml -j 1", "sweep sweep.toml -j 1 --json"],
    "devices": [
        "devices --backend modelled --gpu a40",
        "devices --backend modelled --gpu a40 --json",
        "devices --backend modelled --gpu a41",
    ],
    "preflight": [
        f"-q solve {SMALL}",
        "-q apply",
        "preflight run.freqplan.json --json",
        "preflight run.freqplan.json --node 7",
        "preflight plan.json",
    ],
    "guard": ["guard --unit --json"],
    "reset": ["reset", "reset --json"],
    "refine": [f"-q solve {SMALL}", "refine plan.json missing.jsonl"],
    "profiles": ["profiles", "profiles --json"],
    "smooth": [f"smooth {MEASURED}", f"smooth {MEASURED} --json"],
    "check": [
        f"-q solve {SMALL} --ladder 2",
        "-q apply",
        "-q schedule export 1f1b --pp 2 -m 2 --format dag",
        "check plan.json",
        "check run.freqplan.json",
        "check pipeline.dag.json",
        "check day.csv",
        "check sweep.toml",
        "check plan.json --json",
        "check missing.json",
    ],
    "schedule-list": ["schedule list", "schedule list --json"],
    "schedule-show": [
        "schedule show zb-v --pp 4 -m 8",
        "schedule show 1f1b --pp 2 -m 2 --json",
        "schedule show zb-v -m 8",
    ],
    "schedule-import": [
        "-q schedule export zb-v --pp 4 -m 8",
        "schedule import schedule.csv --format torch-csv",
        "schedule import schedule.csv --format torch-csv --json",
        "schedule import schedule.csv --format chrome-trace",
    ],
    "schedule-export": [
        "schedule export 1f1b --pp 4 -m 8 --format dag",
        "schedule export zb-v --pp 4 -m 8 --json",
    ],
    "serving-profile": ["serving profile", "serving profile --json"],
    "serving-solve": [
        "serving solve --load SS=20000,MM=8000 --gpus 64 --planner hierarchical",
        "serving solve --load SS=20000,MM=8000 --gpus 64 --planner hierarchical --json",
        "serving solve",
    ],
    "serving-simulate": [
        "serving simulate --trace azure-2023-code --policy static",
        "serving simulate --trace azure-2023-code --policy static --price 0.1 --json",
    ],
    "serving-compare": [
        "serving compare --trace azure-2023-code --policies SinglePool,static --price 0.1",
        "serving compare --trace azure-2023-code --policies SinglePool,static --json",
        "serving compare --policies nothing",
    ],
    "serving-apply": [
        "-q serving solve --load SS=2000,MM=800 --gpus 16 --planner hierarchical",
        "serving apply",
        "serving apply --json",
    ],
    "serving-reshard": [
        "-q serving solve --load SS=2000,MM=800 --gpus 16 --planner hierarchical",
        "-q serving apply -o old.json",
        "-q serving solve --load SS=200,LL=800 --gpus 16 --planner hierarchical",
        "-q serving apply -o new.json",
        "serving reshard old.json new.json",
        "serving reshard old.json new.json --json",
    ],
    "serving-hold": [
        "-q serving solve --load SS=2000,MM=800 --gpus 16 --planner hierarchical",
        "-q serving apply",
        "serving hold --backend modelled --seconds 10ms",
        "serving hold --backend modelled --seconds 10ms --json",
        "serving hold --backend modelled --node 9",
    ],
}

#: Commands that need the GPUs of a machine: these get four that are not there.
ON_GPUS = {"preflight", "reset"}

#: What differs from run to run.
VOLATILE = {
    r"took [\d.]+ s": "took N s",
    # The last column of `compare`: how long planning took.
    r"(?m)^((?:frontier|max_frequency|zeus_\w+|envpipe)\b.*  )\d\.\d\d$": r"\1N.NN",
    # How far long work is, on a machine that is slow.
    r"(?m)^.*% done after .*\n": "",
    re.escape(str(ROOT)): "ROOT",
}


def outline(value: Any, path: str) -> Iterator[str]:
    """The keys of a document, each with the type of its value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from outline(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value:
        lines = [line for inner in value for line in outline(inner, f"{path}[]")]
        yield from dict.fromkeys(lines)
    else:
        yield f"{path}: {'null' if value is None else type(value).__name__}"


def told(line: str) -> str:
    """What a command says, as it stands in a golden file."""
    ran = envplan(*shlex.split(line))
    text = f"$ envplan {line}\n"
    if ran.code:
        text += f"exit code {ran.code}\n"
    if line.endswith("--json") and ran.code == 0:
        text += "\n".join(dict.fromkeys(outline(json.loads(ran.out), ""))) + "\n"
    else:
        text += ran.out
    text += ran.err
    for pattern, replacement in VOLATILE.items():
        text = re.sub(pattern, replacement, text)
    return text


def prepare(folder: Path) -> None:
    """Write the files that command lines name."""
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "stragglers.csv").write_text(STRAGGLERS)
    (folder / "day.csv").write_text(DAY)


@pytest.mark.parametrize("command", LINES)
def test_a_command_says_what_its_golden_file_holds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    command: str,
) -> None:
    if command in ON_GPUS:
        request.getfixturevalue("fake_nvml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    prepare(tmp_path)
    sections = [told(" ".join([*command.split("-"), "--help"]).strip())]
    for line in LINES[command]:
        if line.startswith("-q "):
            assert envplan(*shlex.split(line.removeprefix("-q ")), "-q") == Ran(0, "", "")
        else:
            sections.append(told(line))
    text = "\n".join(sections)
    file = GOLDEN / f"{command or 'envplan'}.txt"
    if WRITE:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_every_command_has_a_golden_file() -> None:
    names = {path.removeprefix("envplan ").replace(" ", "-") for path, _ in COMMANDS}
    assert names | {""} == LINES.keys()
    files = {file.stem for file in GOLDEN.glob("*.txt")}
    assert files == {name or "envplan" for name in LINES}


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_help_fits_80_columns(name: str) -> None:
    words = [] if name == "envplan" else name.replace("-", " ", 1).split()
    ran = envplan(*words, "--help")
    assert ran.code == 0
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []
