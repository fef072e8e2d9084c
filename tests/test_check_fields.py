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

from cli_helpers import done, envplan, small_profile
from envplan.check.files import KINDS, check_file
from envplan.check.unproved import NOT_PROVED
from envplan.errors import EnvplanError, InputError

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


def edits(document: Any, path: Path_, others: list[Any]) -> Iterator[Any]:
    """Documents with another value at a place: a made-up one, and one of its field elsewhere."""
    value = dict(leaves(document))[path]
    replacements = [edited(value), *[other for other in others if other != value][:1]]
    for replacement in replacements:
        changed = copy.deepcopy(document)
        place = changed
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = replacement
        yield changed


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
    assert missed_fields(files / name, EDITS) == set()


#: The commands that write today's files, one of each kind and of each option that adds fields.
COMMANDS = """
frontier profile.csv --plans 4 --slower -o frontier.json
frontier profile.csv --plans 4 -o frontier.csv
solve profile.csv --slowdown 3 --ladder 2 -o plan.json
solve profile.csv --slowdown 3 --switch-latency 20ms -o late.json
solve profile.csv --slowdown 5 --min-dwell 150ms -o held.json
solve profile.csv --slowdown 3 --straggler-time 2s -o straggler.json
solve profile.csv --slowdown 3 --dp 2 --tp 2 --power-cap 2500W -o capped.json
solve profile.csv --slowdown 3 --ramp-limit 2000W -o ramp.json
solve profile.csv --price 0.2 --carbon 300 --gpu-hour 2 --iterations 1000 -o cheapest.json
solve profile.csv --planner zeus_global -o zeus.json
apply plan.json --clocks 780,1100,1260,1500,1740 --tp 2 --dp 2 -o plan.freqplan.json
apply late.json --gpu a40 -o late.freqplan.json
apply plan.json --min-dwell 150ms -o held.freqplan.json
apply plan.json --format csv -o clocks.csv
apply plan.json --format zeus -o clocks.py
apply plan.json --format power-limits -o run.power.json
apply plan.json --format job-power -o run.power.jsonl
schedule export 1f1b --pp 2 -m 4 --format dag -o job.dag.json
schedule export 1f1b --pp 2 -m 4 -o schedule.csv
simulate plan.json --trace timeline.json
site jobs.toml --power budget.csv -o site.json
site running.toml --power 2kW -o running.json --orders orders
sweep sweep.toml -o sweep.csv
"""
TODAY = [
    "frontier.json", "plan.json", "late.json", "held.json", "straggler.json", "capped.json",
    "ramp.json", "cheapest.json", "zeus.json", "plan.freqplan.json", "late.freqplan.json",
    "held.freqplan.json", "run.power.json", "job.dag.json", "site.json", "running.json",
    "profile.meta.json", "timeline.json", "orders/a.order.json",
]  # fmt: skip
TODAYS_TABLES = ["frontier.csv", "sweep.csv", "profile.csv", "budget.csv", "clocks.csv"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each kind, as this version writes it."""
    folder = tmp_path_factory.mktemp("today")
    small_profile(clocks=(1740, 1260, 780)).save_csv(folder / "profile.csv")
    (folder / "budget.csv").write_text("hour,power\n0,2000\n6,1500\n12,1800\n")
    jobs = '[[jobs]]\nname = "a"\nfrontier = "frontier.json"\n'
    (folder / "jobs.toml").write_text(f"{jobs}flexible = '50%'\nmay_pause = true\n")
    (folder / "running.toml").write_text(f'{jobs}freqplan = "plan.freqplan.json"\n')
    (folder / "sweep.toml").write_text(
        '[grid]\nprofiles = ["profile.csv"]\nmicrobatches = [2, 4]\nslowdowns = [1, 5]\n'
    )
    for line in COMMANDS.strip().splitlines():
        done(line, cwd=folder)
    return folder


def missed_fields(path: Path, edits_of_a_name: int) -> set[str]:
    """Fields of a document that can be edited without `check` failing or listing them."""
    text = path.read_text()
    document = json.loads(text)
    trusted = check_file(path).not_proved
    places: defaultdict[str, list[Path_]] = defaultdict(list)
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for place, value in leaves(document):
        places[name_of(place)].append(place)
        values[name_of(place)].append(value)
    missed = set()
    for field in [] if "*" in trusted else set(places).difference(trusted):
        for place in places[field][:edits_of_a_name]:
            for changed in edits(document, place, values[field]):
                if passes(path, json.dumps(changed), field):
                    missed.add(field)
    path.write_text(text)
    return missed


@pytest.mark.parametrize("name", TODAY)
def test_edited_field_of_a_file_of_today_is_found_or_listed(written: Path, name: str) -> None:
    # What was planned again for longer clocks is planned again for every edit.
    assert missed_fields(written / name, 1 if name.startswith("held") else 2) == set()


@pytest.mark.parametrize("name", ["plan.freqplan.json", "late.freqplan.json"])
def test_edited_field_without_the_plan_is_found_or_listed(
    written: Path, name: str, tmp_path: Path
) -> None:
    shutil.copy(written / name, tmp_path)
    assert missed_fields(tmp_path / name, 2) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serving-plan.json", "serving.clocks.json"])
def test_edited_field_of_a_serving_plan_of_today_is_found_or_listed(
    tmp_path: Path, name: str
) -> None:
    done("serving solve --load SS=2000,LL=300 --gpus 16 -o serving-plan.json", cwd=tmp_path)
    done("serving apply serving-plan.json -o serving.clocks.json", cwd=tmp_path)
    assert missed_fields(tmp_path / name, 1) == set()


def test_a_budget_and_the_jobs_of_a_site_are_known(written: Path) -> None:
    assert check_file(written / "budget.csv").kind == "power over time"
    assert check_file(written / "jobs.toml").kind == "jobs of a site"
    assert check_file(written / "sweep.toml").kind == "sweep configuration"
    assert check_file(written / "sweep.csv.journal").kind == "journal of a sweep"
    assert check_file(written / "run.power.jsonl").kind == "power of jobs"


def test_a_frequency_plan_beside_its_plan_is_made_anew(written: Path, tmp_path: Path) -> None:
    path = written / "plan.freqplan.json"
    assert "energy_j" not in check_file(path).not_proved
    document = json.loads(path.read_text())
    document["energy_j"] *= 1.01
    changed = written / "changed.freqplan.json"
    changed.write_text(json.dumps(document))
    with pytest.raises(EnvplanError, match=r"energy_j is .*; recomputed it is"):
        check_file(changed)
    alone = tmp_path / "alone.freqplan.json"
    alone.write_text(json.dumps(document))
    assert "energy_j" in check_file(alone).not_proved


def test_serving_clocks_that_a_user_named_are_not_proved(files: Path) -> None:
    folder = files / "v0.1"
    done("serving apply serving-plan.json --clocks 795,1980 -o given.clocks.json", cwd=folder)
    assert "instances[].clock_mhz" in check_file(folder / "given.clocks.json").not_proved
    assert "instances[].clock_mhz" not in check_file(folder / "serving.clocks.json").not_proved


def missed_columns(path: Path) -> set[str]:
    """Columns of a table that can be edited without `check` failing or listing them."""
    original = path.read_text()
    header, *rows = csv.reader(io.StringIO(original))
    trusted = check_file(path).not_proved
    missed: set[str] = set()
    if "*" in trusted:
        return missed
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
    path.write_text(original)
    return missed


@pytest.mark.parametrize("name", ["frontier.csv", "sweep.csv"])
def test_edited_cell_of_a_table_is_found_or_listed(files: Path, name: str) -> None:
    assert missed_columns(files / "v0.1" / name) == set()


@pytest.mark.parametrize("name", TODAYS_TABLES)
def test_edited_cell_of_a_table_of_today_is_found_or_listed(written: Path, name: str) -> None:
    assert missed_columns(written / name) == set()


def test_every_kind_of_file_says_what_is_not_proved() -> None:
    assert {kind.name for kind in KINDS} == NOT_PROVED.keys()


def test_a_frontier_table_does_not_say_whose_energies_it_has(written: Path) -> None:
    checked = check_file(written / "frontier.csv")
    assert checked.kind == "frontier table"
    assert {"iteration_time_s", "energy_j", "lower_bound_j"} <= set(checked.not_proved)


@pytest.mark.parametrize(
    ("column", "value"), [("savings_percent", 100), ("slowdown_percent", -100)]
)
def test_percents_that_no_baseline_has_are_refused(
    written: Path, tmp_path: Path, column: str, value: int
) -> None:
    with (written / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows[0][column] = str(value)
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (tmp_path / "edited.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match="no baseline has such"):
        check_file(tmp_path / "edited.csv")


def test_a_site_plan_without_jobs_or_value_is_refused(files: Path, tmp_path: Path) -> None:
    text = (files / "v0.1" / "site.json").read_text()
    for change in ({"jobs": []}, {"jobs": [{**json.loads(text)["jobs"][0], "weight": 0}]}):
        (tmp_path / "site.json").write_text(json.dumps({**json.loads(text), **change}))
        with pytest.raises(InputError):
            check_file(tmp_path / "site.json")


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
