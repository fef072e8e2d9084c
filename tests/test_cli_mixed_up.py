"""What a user mixes up is named: files of other commands, and misspelled keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import assert_refused, done, envplan, small_profile


@pytest.fixture
def files(folder: Path) -> Path:
    """A file of each kind that people mix up."""
    small_profile(2, blocking=60.0).save_csv("profile.csv")
    done("frontier -o frontier.json")
    done("solve --slowdown 0 --ladder 3 -o plan.json")
    done("apply plan.json -o run.freqplan.json")
    done("site . --power 400W -o site.json")
    done("timeline plan.json -o picture.png")
    done("report plan.json --no-compare -o page.html")
    return folder


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("solve plan.json", "is a plan; solve takes a profile | envplan apply plan.json?"),
        ("solve plan.json -o other.json", "is a plan; solve takes a profile"),
        ("frontier run.freqplan.json", "is a frequency plan; frontier takes a profile"),
        ("compare frontier.json", "is a frontier; compare takes a profile"),
        ("apply profile.csv", "is a profile; apply takes a plan | envplan solve profile.csv?"),
        ("report --force site.json", "is a site plan; report takes a plan | envplan check"),
        ("simulate frontier.json", "is a frontier; simulate takes a plan"),
        ("sweep plan.json", "is a plan; sweep takes a sweep's configuration"),
        ("site plan.json --power 1kW", "is a plan; site takes a TOML file of jobs or a folder"),
        ("savings plan.json", "is a plan; savings takes a profile"),
        ("preflight plan.json", "is a plan; preflight takes a frequency plan | envplan apply"),
        ("preflight profile.csv", "is a profile; preflight takes a frequency plan"),
        ("schedule show plan.json", "is a plan; schedule takes a schedule"),
        ("solve page.html", "is a web page; solve takes a profile"),
        ("apply picture.png", "is a picture; apply takes a plan"),
        ("check page.html", "is a web page, which states nothing that can be proved"),
        ("check picture.png", "is a picture, which states nothing that can be proved"),
    ],
)
def test_a_mixed_up_file_is_named(files: Path, line: str, words: str) -> None:
    ran = envplan(*line.split())
    assert_refused(ran, 2, *words.split(" | "))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("solve none.csv", "none.csv: no such file"),
        ("solve --clocks site.json profile.csv", "site.json"),
        ("solve profile.csv -o profile.csv", "is an input itself"),
        ("simulate run.freqplan.json", "give the plan that it was made from"),
        ("apply empty.json", "empty.json"),
    ],
)
def test_other_errors_are_told_as_they_are(files: Path, line: str, words: str) -> None:
    (files / "empty.json").write_text("")
    ran = envplan(*line.split())
    assert ran.code == 2
    assert words in ran.err
    assert "did you mean envplan" not in ran.err


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (
            "sweep",
            '[grid]\nprofiles = ["profile.csv"]\nmicrobatchs = [4]',
            "microbatchs is not a field | did you mean microbatches?",
        ),
        ("sweep", "[gird]", "gird is not a field of a sweep; did you mean grid?"),
        (
            "site --power 1kW",
            '[[jobs]]\nname = "a"\nfrontier = "frontier.json"\nwieght = 2',
            "jobs[0].wieght is not a field | did you mean weight?",
        ),
    ],
)
def test_a_misspelled_key_is_named_with_the_nearest(
    files: Path, command: str, text: str, words: str
) -> None:
    (files / "keys.toml").write_text(text)
    name, *options = command.split()
    assert_refused(envplan(name, "keys.toml", *options), 2, *words.split(" | "))


def test_a_sweep_does_not_write_over_a_profile_that_its_configuration_names(folder: Path) -> None:
    small_profile(2).save_csv("profile.csv")
    before = Path("profile.csv").read_bytes()
    config = '[grid]\nprofiles = ["profile.csv"]\nmicrobatches = [2]\nslowdowns = [1]\n'
    (folder / "sweep.toml").write_text(config)
    for output in ("profile.csv", "sweep.toml"):
        ran = envplan("sweep", "sweep.toml", "-o", output)
        assert ran.code == 2, output
    assert Path("profile.csv").read_bytes() == before
    assert (folder / "sweep.toml").read_text() == config
