"""Measuring in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from envplan import Profile

ROOT = Path(__file__).resolve().parents[1]


def note(text: str) -> None:
    """Progress, to standard error."""
    print(f"... {text}", file=sys.stderr, flush=True)


def in_fresh_process(job: str, **arguments: Any) -> dict[str, Any]:
    """Run a job of benchmarks.worker in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; what it says stands on standard error.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", job, json.dumps(arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def profile_file(folder: Path, profile: Profile) -> str:
    """A CSV of a profile, for another process."""
    path = folder / f"{profile.sha256}.csv"
    if not path.exists():
        profile.save_csv(path)
    return str(path)
