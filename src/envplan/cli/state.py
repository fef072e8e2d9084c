"""What the running command is, and how it answers: set once for a run, read where it prints."""

from __future__ import annotations

#: Its name, such as "solve" or "schedule-list".
command = ""
#: Whether the answer, errors included, is JSON on stdout.
json = False
#: Colours: None where the terminal decides.
color: bool | None = None
#: What was warned of, in order.
doubts: dict[str, None] = {}
