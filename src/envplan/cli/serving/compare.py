"""`envplan serving compare`: all policies side by side on one trace."""

from __future__ import annotations

from typing import Any

from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.serving.replay import ReplayOptions, Replays
from envplan.cli.serving.service import ServiceOptions
from envplan.errors import InputError


@cmd.takes(
    """
    Most used:
      --policies NAME[,NAME...]  Only these, savings against the first; default: SinglePool,
          MultiPool, ScaleInst, ScaleShard, ScaleFreq, DynamoLLM, static, exact, envplan.
    """
)
def compare(service: ServiceOptions, replay: ReplayOptions, policies: str | None = None) -> None:
    """Set all policies side by side on one trace.

    Each is replayed request by request.

    \b
    Example:
      envplan serving compare --trace azure-2023-code
      envplan serving compare --trace AzureLLMInferenceTrace_conv.csv.gz --gpus 256 --plot
      envplan serving compare --trace azure-2023-conversation --policies SinglePool,envplan --plot
    """
    from envplan.serving.policies import POLICIES

    names = tuple(POLICIES) if policies is None else tuple(map(str.strip, policies.split(",")))
    if len(set(names)) < len(names):
        raise InputError(f"--policies names a policy twice: {policies}")
    replays = replay.run(service, names, left_out=ui.warn)
    replay.draw(replays)
    ui.answer(
        lambda: _document(replay, replays),
        lambda: _print(replay, replays),
        then=["envplan", "serving", "simulate", "--trace", replay.trace, "--plot"],
    )


def _document(replay: ReplayOptions, replays: Replays) -> dict[str, Any]:
    baseline = replays.simulations[0]
    return {
        "trace": replays.trace.name,
        "made": replays.trace.made,
        "profile": replays.profile.name,
        "source": replays.profile.source,
        "policies": [
            {**replay.document(result), "savings_percent": result.saved_percent(baseline)}
            for result in replays.simulations
        ],
    }


def _print(replay: ReplayOptions, replays: Replays) -> None:
    """A row for each policy, what each costs, and what each does."""
    from envplan.serving.metrics import COMPARED, saved_percent_text
    from envplan.serving.policies import POLICIES

    results = replays.simulations
    names = [result.policy for result in results]
    columns: dict[str, list[str]] = {
        "policy": names,
        "saved (%)": [saved_percent_text(result, results[0]) for result in results],
    }
    for metric in COMPARED:
        columns[metric.name] = [metric.text(result) for result in results]
    ui.print_columns(replays.title, columns)
    costs = [replay.costs_of(result) for result in results]
    if costs[0]:
        cost_columns = {name: [f"{each[name]:.6g}" for each in costs] for name in costs[0]}
        ui.print_columns("", {"policy": names, **cost_columns})
    for name in names:
        ui.say(f"{name}: {POLICIES[name].about}")
