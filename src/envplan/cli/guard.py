"""`envplan guard`: give back the clocks that killed trainings left set, as a service."""

from __future__ import annotations

import typer

from envplan.cli.command import takes

#: Seconds between looks, and how long one last look may take.
_EVERY_S = 1.0
_LAST_S = 60.0


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

    from envplan.cli.output import say
    from envplan.devices import DeviceError
    from envplan.runtime.service import Service, unit_file

    if unit:
        typer.echo(unit_file(), nl=False)
        return
    service = Service(say)
    service.look()
    while not once:
        time.sleep(_EVERY_S)
        service.look()
    if not service.finish(_LAST_S):
        raise DeviceError("some clocks could not be given back; see the lines above")
