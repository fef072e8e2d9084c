"""Damages files of every kind for as long as it is told, and reads them: `make fuzz`.

An input has five seconds of processor time, a minute of the clock's, and a gigabyte. What it does
beside being read or refused in a line is a finding: an exception that is not ours, too much time or
memory, or the death of the process. The input is kept, and the run goes on. The readers work in a
process of their own, which is begun anew when it dies.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from envplan.check.files import check_file
from envplan.errors import EnvplanError
from envplan.sweep.table import read_rows, write_table
from test_fuzzing import CHECKED, READERS, RELEASED, damage, lay_out

INPUT_SECONDS = 5
WAITING_SECONDS = 60
INPUT_BYTES = 2**30


class Target(NamedTuple):
    """A kind of file, a sample of it at its path, and what reads it."""

    kind: str
    path: Path
    sample: bytes
    read: Callable[[Path], Any]


class TooLong(BaseException):
    """An input took longer than it may. No reader catches it."""


def targets(folder: Path) -> list[Target]:
    """All kinds of files, each in a folder of its own."""
    found = []
    for number, (kind, (sample, suffix, read)) in enumerate(READERS.items()):
        own = folder / f"reader{number}"
        own.mkdir()
        found.append(Target(kind, own / f"file{suffix}", sample, read))
    for number, name in enumerate(CHECKED):
        own = folder / f"check{number}"
        lay_out(own)
        found.append(Target(f"check {name}", own / name, (own / name).read_bytes(), check_file))
    path = folder / "sweep.parquet"
    write_table(read_rows(RELEASED / "sweep.csv"), path)
    found.append(Target("Parquet", path, path.read_bytes(), read_rows))
    return found


def interrupt(*_: object) -> None:
    raise TooLong


def problem_of(target: Target) -> str | None:
    """What is wrong with how a file is read, in a line; None: nothing."""
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)  # a busy machine is no finding
    signal.setitimer(signal.ITIMER_REAL, WAITING_SECONDS)
    try:
        target.read(target.path)
    except EnvplanError as error:
        return None if "\n" not in str(error) else f"a message of several lines: {error!r}"
    except TooLong:
        return f"took more than {INPUT_SECONDS} s of processor time, or {WAITING_SECONDS} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} at {where.filename}:{where.lineno}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def work(found: list[Target], seconds: float, seed: int, log: str) -> None:
    """Read damaged files until the time is over; a line of the log for each finding and kind."""
    warnings.simplefilter("ignore")
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, interrupt)
    random, end = Random(seed), time.monotonic() + seconds
    with Path(log).open("a", buffering=1) as lines:
        for target in found:  # modules are loaded before memory is counted
            target.path.write_bytes(target.sample)
            target.read(target.path)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + INPUT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while time.monotonic() < end:
            for target in found:
                until = min(end, time.monotonic() + 0.5)
                tried = 0
                slowest = 0.0
                while tried == 0 or time.monotonic() < until:
                    target.path.write_bytes(damage(target.sample, random))
                    print(json.dumps({"reading": target.kind}), file=lines, flush=True)
                    begin = time.process_time()
                    problem = problem_of(target)
                    slowest = max(slowest, time.process_time() - begin)
                    tried += 1
                    if problem is not None:
                        keep(target, problem, lines)
                print(json.dumps({"kind": target.kind, "n": tried, "s": slowest}), file=lines)
                target.path.write_bytes(target.sample)


def keep(target: Target, problem: str, lines: Any) -> None:
    """Note a finding, and keep the input beside the log."""
    folder = Path(lines.name).parent
    kept = folder / f"{len(list(folder.iterdir()))}{target.path.suffix}"
    kept.write_bytes(target.path.read_bytes())
    line = {"finding": problem, "kind": target.kind, "input": str(kept)}
    print(json.dumps(line), file=lines, flush=True)


def main() -> int:
    """Fuzz, and print how many inputs of each kind were read, and what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="of what is found")
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    log = arguments.keep / f"{arguments.seed}.log"
    end, deaths = time.monotonic() + arguments.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        found = targets(Path(folder))
        while (left := end - time.monotonic()) > 0:
            worker = mp.get_context("fork").Process(
                target=work, args=(found, left, arguments.seed + deaths, str(log))
            )
            worker.start()
            worker.join()
            if worker.exitcode == 0:
                break
            deaths += 1
            print(f"the process died with {worker.exitcode}; see the end of {log}", flush=True)
    return report(log, deaths)


def report(log: Path, deaths: int) -> int:
    """Print the figures; 1 if there were findings."""
    tried: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    findings: Counter[tuple[str, str]] = Counter()
    for text in log.read_text().splitlines():
        line = json.loads(text)
        if "n" in line:
            tried[line["kind"]] += line["n"]
            slowest[line["kind"]] = max(slowest.get(line["kind"], 0.0), line["s"])
        elif "finding" in line:
            findings[line["kind"], line["finding"]] += 1
    for kind, number in sorted(tried.items()):
        print(f"{kind}: {number} damaged files, the slowest {slowest[kind]:.2f} s")
    for (kind, finding), number in findings.most_common():
        print(f"FOUND {number} times, {kind}: {finding}")
    print(f"{sum(tried.values())} files, {sum(findings.values())} findings, {deaths} deaths")
    return 1 if findings or deaths else 0


if __name__ == "__main__":
    sys.exit(main())
