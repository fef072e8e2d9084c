"""A training job of one rank whose operations take as long as their clocks say: run as a script.

    python live_worker.py FREQPLAN PROFILE ORDERS DEVICE STEPS

It appends a line for each iteration to STEPS: its number, when it began (CLOCK_MONOTONIC and since
1970, s) and the iteration time of the plan that it follows. It ends when SIGTERM comes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from envplan.profile import Profile
from envplan.runtime.shim import Shim


def main(freqplan: str, profile_path: str, orders: str, device: int, steps: Path) -> None:
    table_s: dict[tuple[str, int], float] = {}
    profile = Profile.read_csv(profile_path)
    for instruction in ("forward", "backward"):
        table = profile.table(0, instruction)
        for mhz, time_ns in zip(table.frequency_mhz.tolist(), table.time_ns.tolist(), strict=True):
            table_s[instruction, mhz] = time_ns / 1e9
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, end)
    with Shim(freqplan, rank=0, device=device, orders=orders) as shim, steps.open("a") as file:
        iteration = 0
        while not is_over:
            row = [iteration, time.monotonic(), time.time(), shim.followed_time]
            file.write(json.dumps(row) + "\n")
            file.flush()
            for key in shim.operations:
                shim.begin(*key)
                time.sleep(table_s[key.instruction, shim.requested_mhz])
                shim.end(*key)
            shim.step()
            iteration += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
