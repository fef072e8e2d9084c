"""Runs the benchmarks and prints their tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks import (
    against_flow,
    against_lowtime,
    growth,
    large,
    parts,
    quality,
    schedules,
    serving_speed,
)
from benchmarks.machine import describe_machine
from benchmarks.report import Section, Target, table
from benchmarks.running import ROOT, note

SECTIONS = {
    "a": against_lowtime.run,
    "b": against_flow.run,
    "c": growth.run,
    "d": quality.run,
    "e": schedules.run,
    "f": parts.run,
    "g": serving_speed.run,
    "h": large.run,
}


def main() -> None:
    """Run the sections that were asked for, and write their report."""
    options = _arguments()
    begin = time.monotonic()
    machine = describe_machine()
    loads = [os.getloadavg()[0]]
    print(_machine_text(machine), flush=True)
    sections: dict[str, Section] = {}
    path = _results_path(machine["CPU"], options)
    with tempfile.TemporaryDirectory(prefix="envplan-bench-") as folder:
        for letter in options.only:
            note(f"section {letter}")
            sections[letter] = SECTIONS[letter](options.quick, Path(folder))
            loads.append(os.getloadavg()[0])
            print(f"\n## ({letter}) {sections[letter].markdown}", flush=True)
            _save(path, machine, sections, loads)
    print("\n## Targets\n\n" + _targets_table([t for s in sections.values() for t in s.targets]))
    spent = time.monotonic() - begin
    print(f"\nLoad of the machine from section to section: {', '.join(f'{x:.1f}' for x in loads)}.")
    print(f"Took {spent / 60:.1f} minutes; raw numbers in {path.relative_to(ROOT)}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=_letters,
        default=list(SECTIONS),
        metavar=",".join(SECTIONS),
        help="sections to run (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes more than a minute"
    )
    return parser.parse_args()


def _letters(text: str) -> list[str]:
    letters = text.split(",")
    if unknown := [letter for letter in letters if letter not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"there is no section {unknown[0]!r}")
    return letters


def _machine_text(machine: dict[str, str]) -> str:
    facts = "; ".join(f"{name} {value}" for name, value in machine.items())
    return f"Measured {date.today().isoformat()} on: {facts}."


def _targets_table(targets: list[Target]) -> str:
    rows = [[t.what, t.limit, t.measured, "yes" if t.met else "**no**"] for t in targets]
    return table(["target", "limit", "measured", "met"], rows)


def _results_path(cpu: str, options: argparse.Namespace) -> Path:
    words = [date.today().isoformat(), *re.findall("[a-z0-9]+", cpu.lower())]
    if options.only != list(SECTIONS):
        words.append("only-" + "".join(options.only))
    if options.quick:
        words.append("quick")
    return ROOT / "out" / "bench" / ("-".join(words) + ".json")


def _save(
    path: Path, machine: dict[str, str], sections: dict[str, Section], loads: list[float]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine,
        "load_averages": loads,
        **{letter: section.raw for letter, section in sections.items()},
        "targets": [t._asdict() for s in sections.values() for t in s.targets],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
