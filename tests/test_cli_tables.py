"""Tables: as wide as the terminal at most, and no number is ever cut."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from envplan.cli.tables import (
    Column,
    change_column,
    number_column,
    percent_column,
    table_lines,
    text_column,
    value_column,
)

COLUMNS = (
    Column(header="", cells=["maximum frequency", ""], is_text=True),
    Column(header="iteration time (s)", cells=["4.14904", "14.22638"]),
    Column(header="energy of all GPUs (J)", cells=["3677.2", "3104.6"]),
)


def test_a_table_is_as_wide_as_its_cells_where_there_is_room() -> None:
    assert table_lines("Two plans", COLUMNS) == [
        "Two plans",
        "                   iteration time (s)  energy of all GPUs (J)",
        "─────────────────────────────────────────────────────────────",
        "maximum frequency             4.14904                  3677.2",
        "                             14.22638                  3104.6",
    ]


@pytest.mark.parametrize("width", [40, 60, 200])
def test_words_wrap_and_no_number_is_cut(width: int) -> None:
    lines = table_lines("", COLUMNS, width=width)
    words = " ".join(lines).split()
    assert max(map(cell_len, lines)) <= width
    assert {"4.14904", "14.22638", "3677.2", "3104.6"} <= set(words)


def test_columns_that_matter_least_are_omitted_first_and_named() -> None:
    first, second = (
        Column(header="kept", cells=["1234567"], keep=0),
        Column(header="first to go", cells=["1234567"], keep=-1),
    )
    *table, last = table_lines("", [first, second], width=12)
    assert table == ["   kept", "───────", "1234567"]
    assert last == "columns omitted (terminal too narrow): first to go; --json has them"


def test_a_number_alone_is_not_cut_on_the_narrowest_terminal() -> None:
    assert table_lines("", [Column(header="J", cells=["1234567"])], width=3)[-1] == "1234567"


def test_long_words_are_broken_only_where_they_may_be() -> None:
    column = Column(header="order", cells=["interleaved-zero-bubble"], is_text=True, may_fold=True)
    assert table_lines("", [column], width=12)[2:] == ["interleaved-", "zero-bubble"]


def test_wide_characters_take_two_columns() -> None:
    lines = table_lines("", [Column(header="GPU", cells=["漢字", "ab"], is_text=True)])
    assert lines[1] == "────"


def test_headers_are_bold_where_colours_are_wanted() -> None:
    plain, bold = (table_lines("t", COLUMNS, bold=wanted) for wanted in (False, True))
    assert "\x1b" not in "".join(plain)
    assert bold[0] == "\x1b[1mt\x1b[0m"
    assert all("\x1b" not in line for line in bold[2:])


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    assert table_lines("[bold]", [Column(header="[red]", cells=["[x]"])])[-1].strip() == "[x]"


def test_a_column_shows_its_kind_of_values_and_a_dash_for_none() -> None:
    assert number_column("J", [1234.5678, None, 0.5]).cells == ["1,235", "-", "0"]
    assert number_column("s", [0.25, 1.5]).cells == ["0.250", "1.500"]
    assert percent_column("%", [2.0, None]).cells == ["2.00", "-"]
    assert percent_column("%", [2.0], decimals=3).cells == ["2.000"]
    assert change_column("%", [2.0, -1.5, 0.0, None]).cells == ["+2.00", "-1.50", "0.00", "-"]
    assert value_column("N", [8, "x2", None]).cells == ["8", "x2", "-"]
    assert text_column("stage", [0, None]) == Column(header="stage", cells=["0", "-"], is_text=True)
