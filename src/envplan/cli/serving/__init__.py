"""`envplan serving`: plans for inference fleets, beside those for training. A file each command."""

from __future__ import annotations

from envplan.cli.help import command_group
from envplan.cli.serving.apply import apply
from envplan.cli.serving.compare import compare
from envplan.cli.serving.hold import hold
from envplan.cli.serving.profile import profile
from envplan.cli.serving.reshard import reshard
from envplan.cli.serving.simulate import simulate
from envplan.cli.serving.solve import solve

serving = command_group(
    """Plan clocks, parallelism and instance counts of inference fleets, within latency SLOs.

    \b
    Example:
      envplan serving profile
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving apply serving-plan.json
      envplan serving compare --trace azure-2023-code --plot
    """,
    {
        "profile": profile,
        "solve": solve,
        "simulate": simulate,
        "compare": compare,
        "apply": apply,
        "reshard": reshard,
        "hold": hold,
    },
)
