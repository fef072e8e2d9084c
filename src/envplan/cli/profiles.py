"""`envplan profiles`: what ships with envplan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envplan.cli.inputs import JsonOption

if TYPE_CHECKING:
    from envplan.profile import Profile


def profiles(json: JsonOption = False) -> None:
    """List the built-in profiles.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier a40-gpt3-1.3b-4stage --microbatches 32
    """
    from envplan.cli.output import print_json, print_table, say
    from envplan.profile import builtin_profiles

    known = [_describe(profile) for profile in builtin_profiles()]
    if json:
        print_json(known)
    elif not known:
        say("no profiles are built in")
    else:
        headers = ("name", "stages", "MHz", "GPU", "source", "workload")
        rows = [[str(profile[field] or "-") for field in _SHOWN] for profile in known]
        print_table("", headers, rows, words=len(headers), wrap=("GPU", "workload"))


_SHOWN = ("name", "stages", "frequency_mhz", "gpu", "source", "workload")


def _describe(profile: Profile) -> dict[str, Any]:
    clocks = {
        int(mhz)
        for stage in range(profile.num_stages)
        for name in profile.instructions
        if profile.has(stage, name)
        for mhz in profile.table(stage, name).frequency_mhz
        if mhz
    }
    return {
        "name": profile.name,
        "stages": profile.num_stages,
        "frequency_mhz": f"{min(clocks)}-{max(clocks)}" if clocks else None,
        "gpu": profile.metadata.gpu,
        "source": profile.metadata.source,
        "workload": profile.metadata.workload,
        "instructions": list(profile.instructions),
        "schedule": profile.metadata.schedule,
        "microbatches": profile.metadata.num_microbatches,
        "sha256": profile.sha256,
    }
