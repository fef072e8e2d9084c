"""What the running command is, and how it answers: set once for a run, read where it prints."""

from __future__ import annotations

from pathlib import Path

#: Its name, such as "solve" or "schedule-list".
command = ""
#: Whether the answer, errors included, is JSON on stdout; whether nothing but errors is printed.
json = quiet = False
#: Colours: None where the terminal decides.
color: bool | None = None
#: What was warned of, in order.
doubts: dict[str, None] = {}
#: What the command may read, as far as options and arguments name files.
inputs: list[str | Path] = []
#: What it writes.
outputs: list[Path] = []
