"""`envplan reset`: every GPU's clock back to the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envplan.cli import output as ui
from envplan.cli import state

if TYPE_CHECKING:
    from envplan.runtime.locks import GivenBack


def reset() -> None:
    """Give every GPU's clock back to the driver.

    Clocks go back by themselves when training ends or dies. This is for a node where everything was
    killed at once, the processes that give clocks back included.

    \b
    Example:
      envplan reset
    """
    from dataclasses import asdict

    from envplan.devices import DeviceError, opened
    from envplan.runtime.locks import give_back_all

    with opened() as source:
        outcomes = give_back_all(source.devices())
    failed = [outcome for outcome in outcomes if outcome.problem is not None]

    def tell() -> None:
        for outcome in outcomes:
            if outcome.problem is None:
                ui.say(f"GPU {outcome.index} ({outcome.name}): {_said(outcome)}")

    if not (state.json and failed):  # there is one JSON document, and it is the error
        document = {"gpus": [asdict(outcome) for outcome in outcomes]}
        ui.respond(lambda: document, tell, then="envplan devices")
    if failed:
        others = f" (and {len(failed) - 1} more GPUs)" if len(failed) > 1 else ""
        raise DeviceError(f"{failed[0].problem}{others}")


def _said(outcome: GivenBack) -> str:
    if outcome.guard is not None:
        return (
            "clock given back, but a training that runs will set it again "
            f"(its guard is process {outcome.guard})"
        )
    if outcome.left_behind:
        return "clock given back; a training that was killed had left it set"
    return "clock given back"
