"""`envplan guard`: give back the clocks that killed trainings left set, as a service."""

from __future__ import annotations

import typer

from envplan.cli import output as ui
from envplan.cli import state
from envplan.cli.command import takes

#: Seconds between looks, and how long one last look may take.
_EVERY_S = 1.0
_LAST_S = 60.0
_INSTALL = "systemctl enable --now envplan-guard"


@takes(
    """
    Most used:
      --once  Give back what there is now, and end: for an epilog.
      --unit  Print a systemd unit and a Slurm epilog, and end.
    """
)
def guard(once: bool = False, unit: bool = False) -> None:
    """Give back the clocks that killed trainings left set, until it is stopped.

    A training gives its clocks back by itself, however it ends. Only where the guard process that
    does so is killed together with it, as by a scheduler, the clock stays. Run this as root to look
    after all users, or as a user to look after your own trainings. Those that run are left alone.

    \b
    Example:
      envplan guard --unit > /etc/systemd/system/envplan-guard.service
      systemctl enable --now envplan-guard
    """
    import time

    from envplan.devices import DeviceError
    from envplan.runtime.service import Service, unit_file

    def tell(line: str) -> None:
        if not state.quiet:
            typer.echo(line, err=state.json)

    if unit:
        text = unit_file().rstrip()
        ui.respond(lambda: {"unit": text}, lambda: ui.say(text))
        if not state.json:  # the unit is for a file
            typer.echo(f"next: {_INSTALL}", err=True)
        return
    service = Service(tell)
    service.look()
    if not once:
        tell("giving back what killed trainings leave set, until interrupted")
        tell("next: envplan guard --unit (makes it a service)")
    while not once:
        time.sleep(_EVERY_S)
        service.look()
    if not service.finish(_LAST_S):
        raise DeviceError("some clocks could not be given back; see the lines above")
    ui.respond(lambda: {"left_set": 0}, then="envplan devices")
