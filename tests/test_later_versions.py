"""Files that a later envplan wrote are told as such."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli_helpers import envplan
from envplan.check.files import check_file
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError
from envplan.plan import Plan
from envplan.plan.frontier_file import FrontierFile
from envplan.runtime.run_log_reader import read_run_log

RELEASED = Path(__file__).parent / "fixtures" / "v0.1"
READERS = {
    "plan.json": Plan.load,
    "run.freqplan.json": FrequencyPlan.load,
    "frontier.json": FrontierFile.load,
}


def of_version(folder: Path, name: str, version: str) -> Path:
    text = (RELEASED / name).read_text()
    path = folder / name
    path.write_text(text.replace('/v1"', f'/{version}"', 1))
    return path


@pytest.mark.parametrize("name", [*READERS, "serving-plan.json", "job.dag.json"])
def test_file_of_a_later_version_says_what_to_upgrade(tmp_path: Path, name: str) -> None:
    path = of_version(tmp_path, name, "v2")
    for read in filter(None, [READERS.get(name), check_file]):
        with pytest.raises(InputError, match=r"of version 2 .*pip install --upgrade envplan"):
            read(path)


def test_schema_that_is_no_version_is_no_later_one(tmp_path: Path) -> None:
    for version in ("v0", "vx", "v", "v99999999999999999999"):
        with pytest.raises(InputError, match="is not a plan"):
            Plan.load(of_version(tmp_path, "plan.json", version))


@pytest.mark.parametrize(("version", "words"), [("v2", "upgrade"), ("vx", "of schema")])
def test_refine_refuses_a_run_log_of_another_version(
    tmp_path: Path, version: str, words: str
) -> None:
    log = of_version(tmp_path, "run.jsonl", version)
    with pytest.raises(InputError, match=words):
        list(read_run_log([log]))
    for name in ("plan.json", "profile.csv", "profile.meta.json"):
        shutil.copy(RELEASED / name, tmp_path)
    ran = envplan("refine", "plan.json", "run.jsonl", cwd=tmp_path)
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
