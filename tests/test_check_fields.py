"""Every field of every file is proved by `check`, or is in the list of what it does not prove."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import envplan
from envplan.check.files import KINDS, check_file
from envplan.check.unproved import NOT_PROVED
from envplan.errors import EnvplanError

FIXTURES = Path(__file__).parent / "fixtures"

#: Of the fields of one name so many are edited.
EDITS = 3


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for release in ("v0.1", "v1"):
        shutil.copytree(FIXTURES / release, tmp_path / release)
    for name in ("site.json", "jobs.toml"):
        shutil.copy(FIXTURES / "now" / name, tmp_path / "v0.1")
    return tmp_path


Path_ = tuple[str | int, ...]


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))
    elif value is not None:
        yield path, value


def name_of(path: Path_) -> str:
    return ".".join("[]" if isinstance(step, int) else step for step in path).replace(".[]", "[]")


def edited(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.01 if abs(value) > 1e-6 else 0.01
        case str() if re.fullmatch("[0-9a-f]{64}", value):
            return ("1" if value[0] == "0" else "0") + value[1:]
    return f"{value}x"


def with_edit(document: Any, path: Path_) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = edited(place[path[-1]])
    return changed


def passes(path: Path, text: str, field: str | None = None) -> bool:
    """Whether a file holds without a word about a field."""
    path.write_text(text)
    try:
        checked = check_file(path)
    except EnvplanError:
        return False
    return field not in checked.not_proved


@pytest.mark.parametrize(
    "name",
    [
        "v0.1/plan.json", "v0.1/frontier.json", "v0.1/run.freqplan.json", "v0.1/site.json",
        "v0.1/serving-plan.json", "v0.1/serving.clocks.json", "v0.1/job.dag.json",
        "v0.1/profile.meta.json", "v1/plain.json", "v1/late-clocks.json", "v1/costs.json",
        "v1/ladder-and-straggler.json", "v1/robust.json", "v1/peak-power.json",
    ],
)  # fmt: skip
def test_edited_field_of_a_document_is_found_or_listed(files: Path, name: str) -> None:
    path = files / name
    text = path.read_text()
    trusted = check_file(path).not_proved
    edits: defaultdict[str, int] = defaultdict(int)
    missed = set()
    for place, _ in leaves(json.loads(text)):
        field = name_of(place)
        edits[field] += 1
        if edits[field] > EDITS or "*" in trusted or field in trusted:
            continue
        if passes(path, json.dumps(with_edit(json.loads(text), place)), field):
            missed.add(field)
    assert missed == set()


@pytest.mark.parametrize("name", ["frontier.csv", "sweep.csv"])
def test_edited_cell_of_a_table_is_found_or_listed(files: Path, name: str) -> None:
    path = files / "v0.1" / name
    header, *rows = csv.reader(io.StringIO(path.read_text()))
    trusted = check_file(path).not_proved
    missed = set()
    for row in range(min(EDITS, len(rows))):
        for column, field in enumerate(header):
            cell = rows[row][column]
            if not cell or field in trusted:
                continue
            changed = copy.deepcopy(rows)
            number = re.fullmatch(r"-?[\d.e+-]+", cell)
            changed[row][column] = str(edited(json.loads(cell))) if number else cell + "x"
            if passes(path, "\n".join(map(",".join, [header, *changed])) + "\n", field):
                missed.add(field)
    assert missed == set()


def test_every_kind_of_file_says_what_is_not_proved() -> None:
    assert {kind.name for kind in KINDS} == NOT_PROVED.keys()


def test_check_prints_what_is_not_proved(files: Path) -> None:
    ran = envplan("check", "plan.json", cwd=files / "v0.1")
    assert ran.code == 0
    assert "not proved: planner, profile.name" in ran.out
    measured = envplan("check", "profile.csv", cwd=files / "v0.1")
    assert "not proved: what it says, which is measured or asked for" in measured.out


def test_edited_savings_of_a_frontier_are_found(files: Path) -> None:
    path = files / "v0.1" / "frontier.json"
    document = json.loads(path.read_text())
    document["plans"][0]["savings_percent"] += 1
    assert not passes(path, json.dumps(document))
