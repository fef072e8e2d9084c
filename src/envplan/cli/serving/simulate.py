"""`envplan serving simulate`: a trace under one policy, request by request."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from envplan._io.files import atomic_write
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.serving.replay import ReplayOptions, Replays
from envplan.cli.serving.service import ServiceOptions

_BASELINE: Final = "SinglePool"
_HOUR_S: Final = 3600.0


@cmd.takes(
    """
    Most used:
      --policy NAME  One of those that `serving compare` names.
    Output:
      -o, --output FILE  Write what happens over time: .csv.
    """,
)
def simulate(
    service: ServiceOptions,
    replay: ReplayOptions,
    policy: str = "envplan",
    output: Path | None = None,
) -> None:
    """Replay a trace under one policy, request by request.

    Says how much energy the fleet uses, how many SLOs it meets, and how often it changes.

    \b
    Example:
      envplan serving simulate --trace azure-2023-conversation
      envplan serving simulate --trace azure-2023-code --policy static -o hour.csv --plot
      envplan serving simulate --trace AzureLLMInferenceTrace_code.csv.gz --price 0.12 --carbon 380
    """
    needs_baseline = replay.plot is not None and policy != _BASELINE  # a picture has it in it
    policies = [_BASELINE, policy] if needs_baseline else [policy]
    replays = replay.run(service, policies)
    replay.draw(replays)
    result = replays.simulations[-1]
    if output is not None:
        atomic_write(output, result.to_frame().to_csv(index=False, float_format="%.10g"))
    ui.answer(
        lambda: {
            **replay.document(result),
            "trace": replays.trace.name,
            "profile": replays.profile.name,
        },
        lambda: _print(replay, replays),
        then=["envplan", "serving", "compare", "--trace", replay.trace],
    )


def _print(replay: ReplayOptions, replays: Replays) -> None:
    from envplan.serving.metrics import METRICS

    result = replays.simulations[-1]
    ui.say(f"{result.policy}: {replays.title}, {result.duration_s / _HOUR_S:.3g} hours")
    rows = [(metric.name, metric.text(result)) for metric in METRICS]
    rows += [(name, f"{cost:.6g}") for name, cost in replay.costs_of(result).items()]
    ui.print_table("", ("", "in all"), rows)
