"""`envplan check`: what a file is, and whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envplan.cli.options import ForceOption, OutputOptions, ProfileOption


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any file of envplan.")],
    show: OutputOptions,
    profile: ProfileOption = None,
    force: ForceOption = False,
) -> None:
    """Check any file of envplan and say what was proved. Exits with 2 if it does not hold.

    A plan is replayed, priced again from its profile, and its lower bound is proved anew.

    \b
    Example:
      envplan check plan.json
      envplan check profile.csv
    """
    from envplan.check import check_file
    from envplan.cli.output import answer, progress_bar, say

    with progress_bar("Tracing the frontier again", quiet=show.quiet) as progress:
        checked = check_file(file, profile=profile, force=force, progress=progress)

    def tell() -> None:
        say(f"{file}: {checked.kind}, holds")
        for line in checked.proved:
            say(f"  {line}")

    then = {
        "plan": ["envplan", "apply", str(file)],
        "profile": ["envplan", "frontier", str(file)],
        "sweep": ["envplan", "sweep", str(file)],
    }
    answer(
        show,
        lambda: {"file": str(file), **checked._asdict()},
        tell,
        then=then.get(checked.kind, ()),
    )
