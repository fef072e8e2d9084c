"""The reader of tables: every complaint names line and column."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from envplan._io.tables import Table, parse_table, read_table
from envplan.errors import InputError


class Row(BaseModel):
    name: str = Field(description="a name")
    count: int = Field(ge=0, description="a whole number from 0 up")
    price: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def parsed(text: str) -> Table[Row]:
    return parse_table(text.encode(), Row, path="t.csv", kind="a list of prices")


def refusal(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parsed(text)
    assert caught.value.path == "t.csv"
    return caught.value


def test_rows_are_instances_of_the_model_and_other_columns_are_kept_as_text() -> None:
    table = parsed("name, count ,note,price\n\na,1,x,\n b ,2.0,y,0.5\n")
    assert [(row.name, row.count, row.price) for row in table.rows()] == [
        ("a", 1, None),
        ("b", 2, 0.5),
    ]
    assert table.texts["note"] == ["x", "y"]
    assert list(table.lines) == [3, 4]
    assert table.error(1, "is odd", "price").line == 4


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffname,count\r\na,1\r\n",
        "\ufeffname,count\ra,1\r",
        'count,"name"\n1,"a"\n\n',
        "name;count\na;1",
        " name\tcount\t\na\t 1\t\n",
    ],
    ids=["Windows", "old Mac", "other order, quoted", "semicolons", "tabs"],
)
def test_a_table_may_be_written_in_many_ways(text: str) -> None:
    assert [(row.name, row.count) for row in parsed(text).rows()] == [("a", 1)]


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        (
            "name,count\na,x\n",
            2,
            "count",
            "should be a valid integer, unable to parse string as an integer; expected a whole",
        ),
        ("name,count\na,1\nb,1.5\n", 3, "count", "a valid integer"),
        ("name,count\na,-1\nb,x\n", 2, "count", "or equal to 0"),
        ("name,count\na,1_0\n", 2, "count", "a valid integer"),
        ("name,count\na\n", 2, "count", "is empty"),
        ("name,count\n,x\n", 2, "name", "is empty"),
        ("name,count,price\na,1,0\n", 2, "price", "greater than 0"),
        ("name,count,price\na,1,nan\n", 2, "price", "a finite number"),
        ("name,price\na,1\n", 1, "count", "missing from the header"),
        ("name,count,count\na,1,1\n", 1, "count", "twice"),
        ("name,count,Prise\na,1,1\n", 1, "Prise", "is price meant"),
        ("name|count\na|1\n", 1, "name", 'missing from the header "name|count"'),
        ("", None, None, "is empty"),
        ("\ufeff", None, None, "is empty"),
        ("\n \n", None, None, "is empty"),
        ("\0\x01", 1, None, "not UTF-8 text"),
        ('\n{"schema": 1}', 2, "name", "missing from the header"),
        ("name,count\n", None, None, "no rows"),
        ("name,count\na,1,2\n", 2, None, "3 values where the header has 2"),
        ('name,count\n"a,1\n', 2, None, "never closed"),
        ('name,count\n"a\nb",1\n', 2, None, "line break"),
    ],
)
def test_the_first_problem_names_its_place(
    text: str, line: int | None, column: str | None, words: str
) -> None:
    error = refusal(text)
    assert (error.line, error.column) == (line, column)
    assert words in error.message


def test_binary_files_and_headers_of_a_million_columns_are_refused_at_once(tmp_path: Path) -> None:
    for data in (b"\x89PNG\xff", "name,count".encode("utf-16")):
        (tmp_path / "t.csv").write_bytes(data)
        with pytest.raises(InputError, match="not UTF-8 text"):
            read_table(tmp_path / "t.csv", Row, kind="a list of prices")
    assert "has more than" in refusal("name,count" + ",x" * 10**6 + "\na,1\n").message


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(cells, st.integers(0, 10**9)), min_size=1, max_size=5))
def test_any_text_is_read_back_or_refused(rows: list[tuple[str, int]]) -> None:
    text = "name,count\n" + "".join(f"{name},{count}\n" for name, count in rows)
    with suppress(InputError):
        table = parsed(text)
        assert len(table) <= len(rows)
        assert set(table.columns["count"]) <= {count for _, count in rows}
