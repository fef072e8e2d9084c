"""The parts of docs/profiles.md that scripts write, so that it says what the files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envplan._io.files import atomic_write
from envplan.errors import InputError

__all__ = ["block", "markdown_table", "update_block"]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def block(text: str, name: str) -> str:
    """What stands between the marks of a block.

    Args:
        text: the document.
        name: of the block; its marks are HTML comments "NAME: begin" and "NAME: end".

    Raises:
        InputError: the document has no such block.
    """
    begin, end = _marks(name)
    _, found, rest = text.partition(begin)
    inside, closed, _ = rest.partition(end)
    if not found or not closed:
        raise InputError(f"the document has no block from {begin} to {end}")
    return inside.strip("\n")


def update_block(path: Path, name: str, content: str) -> None:
    """Put `content` between the marks of a block of a document.

    Raises:
        InputError: the document cannot be read or written, or has no such block.
    """
    begin, end = _marks(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error
    block(text, name)
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    atomic_write(path, f"{before}{begin}\n\n{content}\n\n{end}{after}")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
