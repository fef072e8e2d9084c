"""python -m tools.sosp24 profiles [FOLDER]: writes the measured profiles and their sidecars."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.sosp24.stages import STAGE_PROFILES, stage_profile

_PROFILES = Path(__file__).resolve().parents[2] / "profiles"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sosp24", description=__doc__)
    parser.add_argument("what", choices=["profiles"])
    parser.add_argument("folder", nargs="?", type=Path, default=_PROFILES)
    folder = parser.parse_args().folder
    for name in STAGE_PROFILES:
        stage_profile(name).save_csv(folder / f"{name}.csv")
        print(folder / f"{name}.csv")


if __name__ == "__main__":
    main()
