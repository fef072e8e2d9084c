"""Reading within bounds, JSON that says one thing, and outputs that can be written."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from envplan._io.files import (
    atomic_write,
    check_writable,
    parse_json,
    read_bounded,
    refuse_slip,
    same_file,
)
from envplan.check.files import check_file
from envplan.errors import InputError


def refused(data: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_json(data, "x.json")
    assert caught.value.path == "x.json"
    return caught.value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', 'field "a" twice'),
        (b'{"a": {"' + b"x" * 10**6 + b'": 1, "' + b"x" * 10**6 + b'": 1}}', "twice"),
        (b'"\\ud800"', "half a character"),
        (b'{"\\uDFFF": 1}', "half a character"),
        (b"[NaN]", "NaN is not a number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "too many digits"),
    ],
    ids=["twice", "long", "surrogate", "key", "nan", "deep", "digits"],
)
def test_json_that_is_none_is_refused(data: bytes, words: str) -> None:
    error = refused(data)
    assert words in error.message
    assert len(error.message) < 200


def test_json_is_what_it_says_and_what_is_no_text_names_its_line() -> None:
    text = b'\xef\xbb\xbf{"a": [1, 2.5, "\\ud83d\\ude00"]}'
    assert parse_json(text, "x.json") == {"a": [1, 2.5, "\U0001f600"]}
    error = refused(b'{\n"a": "\xff"}')
    assert (error.line, error.message) == (2, "is not UTF-8 text")


def test_line_of_a_null_is_counted_in_characters_of_any_width() -> None:
    error = refused("\ufeffäöüäöüäöü\n\0".encode())
    assert (error.line, error.message) == (2, "is not UTF-8 text")


@pytest.mark.parametrize("name", ["request", "Requests", "reqeusts"])
def test_a_slip_of_the_hand_is_not_passed_over(name: str) -> None:
    with pytest.raises(InputError, match="is requests meant") as caught:
        refuse_slip(name, ["class", "requests"], "t.csv", 1)
    assert (caught.value.line, caught.value.column) == (1, name)
    refuse_slip("comment", ["class", "requests"], "t.csv")


def test_same_file_is_never_an_error(tmp_path: Path) -> None:
    one, link, loop = tmp_path / "one", tmp_path / "link", tmp_path / "loop"
    one.write_text("")
    link.symlink_to(one)
    loop.symlink_to(loop)
    assert same_file(one, link)
    for other in (loop, tmp_path / "gone", tmp_path / ("x" * 5000), "a\0b"):
        assert not same_file(one, other)


@pytest.mark.parametrize("name", ["gone/a.txt", ".", "a\0b", "x" * 5000, "loop", "file/a.txt"])
def test_a_path_that_cannot_be_written_is_known_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    for attempt in (check_writable, lambda path: atomic_write(path, "text")):
        with pytest.raises(InputError, match=r"cannot be written|not a usable file name"):
            attempt(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_paths_that_can_be_written_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for path in (tmp_path / "there", tmp_path / "new", tmp_path / "dangling", Path(os.devnull)):
        check_writable(path)
    assert (tmp_path / "there").read_text() == "old"
    assert not (tmp_path / "new").exists()


def test_atomic_write_replaces_goes_through_links_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    atomic_write(path, "nëw")
    assert path.read_bytes() == "nëw".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    atomic_write(link, b"\x00")
    assert link.is_symlink()
    assert path.read_bytes() == b"\x00"
    assert sorted(tmp_path.iterdir()) == [path, link]
    # A device cannot be replaced.
    atomic_write(os.devnull, "gone")
    assert Path(os.devnull).is_char_device()


def test_failed_atomic_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (
            "stage,instruction,frequency,time,energy\n0,forward,900,1,100\n0,backward,900,2,200",
            "profile",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,10\n1,20,20", "requests"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,10\n1,20,20", "requests"),
        ("arrival_timestamp,prompt_size,token_size\n0,10,10\n1,20,20", "requests"),
    ],
)
def test_check_tells_tables_by_their_columns_gzipped_or_not(
    tmp_path: Path, table: str, kind: str
) -> None:
    plain, zipped = tmp_path / "plain.csv", tmp_path / "zipped.csv.gz"
    plain.write_text(table)
    zipped.write_bytes(gzip.compress(table.encode()))
    assert [check_file(file).kind for file in (plain, zipped)] == [kind, kind]


def test_check_finds_the_gzipped_table_of_a_sidecar(tmp_path: Path) -> None:
    sidecar = tmp_path / "a.meta.json"
    sidecar.write_text("{}")
    with pytest.raises(InputError, match=r"a\.csv: cannot be read"):
        check_file(sidecar)
    table = b"stage,instruction,frequency,time,energy\n0,forward,900,1,100\n0,backward,900,2,200\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(table))
    assert "a.csv.gz" in check_file(sidecar).proved[0]


def test_error_about_a_file_whose_name_has_a_line_break_is_one_line() -> None:
    with pytest.raises(InputError) as caught:
        read_bounded("no\nsuch")
    assert str(caught.value).startswith("no\\nsuch: cannot be read")
