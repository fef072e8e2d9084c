"""Training jobs of several processes on this machine, for tests."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch_worker import work

RANKS = 4


def start(task: str, folder: Path, ranks: int = RANKS) -> list[BaseProcess]:
    # Forked, because importing torch takes seconds and has been done here.
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=work, args=(task, folder, rank, ranks)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return list(processes)


def run(task: str, folder: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    """What each rank says."""
    processes = start(task, folder, ranks)
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    stop(processes)
    assert codes == [0] * ranks, (folder / f"{task}.err").read_text()
    return [json.loads((folder / f"{task}.{rank}.json").read_text()) for rank in range(ranks)]


def stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
