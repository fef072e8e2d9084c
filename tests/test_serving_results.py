"""The pages of results say the same as each other, and as what tests hold the planners to."""

from __future__ import annotations

from pathlib import Path

from envplan.serving.policies import POLICIES
from test_serving_hierarchy import STATED

DOCS = Path(__file__).parents[1] / "docs"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    text = (DOCS / page).read_text().split(f"\n{heading}", 1)[1]
    lines = text[text.index("\n|") :].strip().split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_headline_is_that_of_the_page_about_serving() -> None:
    headline = rows_of("results.md", "## Inference fleets: a week")
    assert [row[0] for row in headline] == ["coding-week", "conversation-week"]
    for name, *saved, least in headline:
        week = rows_of("results-serving.md", f"### {name} (modelled)")
        assert [row[0] for row in week] == list(POLICIES)
        assert saved == [row[2] for row in week[1:]]
        assert least == min((row[3] for row in week[1:]), key=float)


def test_what_is_stated_of_the_hierarchical_planner_is_the_most_that_was_found() -> None:
    gaps = rows_of("results-serving.md", "## The hierarchical planner against the exact one")
    assert max(float(row[2]) for row in gaps) == 100 * STATED
    assert f"up to {100 * STATED:g}% more" in " ".join((DOCS / "serving.md").read_text().split())


def test_single_requests_come_near_the_flows() -> None:
    hours = rows_of("results-serving.md", "## Request by request")
    assert len(hours) == 12
    for row in hours:
        flows, one_by_one = float(row[4]), float(row[5])
        assert abs(one_by_one / flows - 1) < 0.015
        assert abs(float(row[8]) - float(row[7])) < 1.5
