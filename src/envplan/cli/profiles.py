"""`envplan profiles`: what ships with envplan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envplan.cli.inputs import JsonOption

if TYPE_CHECKING:
    from envplan.profile import Profile


def profiles(json: JsonOption = False) -> None:
    """List the built-in profiles, those from measurements first.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier sosp24-a100-gpt3-xl-4stage
    """
    from envplan.cli.output import print_json, print_table, say
    from envplan.profile import builtin_profiles

    known = [_describe(profile) for profile in builtin_profiles()]
    known.sort(key=lambda profile: (profile["source"] != "measured", profile["name"]))
    if json:
        print_json(known)
    elif not known:
        say("no profiles are built in")
    else:
        headers = ("name", "time", "energy", "stages", "MHz", "GPU", "workload")
        rows = [[str(profile[field] or "-") for field in _SHOWN] for profile in known]
        print_table("", headers, rows, words=len(headers), wrap=("GPU", "workload"))
        say(
            "time and energy of operations are measured on real GPUs (interpolated at clocks that "
            "no run had), identified from measured iterations, or modelled"
        )


_SHOWN = ("name", "time", "energy", "stages", "frequency_mhz", "gpu", "workload")


def _describe(profile: Profile) -> dict[str, Any]:
    clocks = {int(mhz) for table in profile.tables() for mhz in table.frequency_mhz if mhz}
    source = profile.metadata.source
    # Sidecars of measured profiles say what about them was not measured operation by operation.
    identified = profile.metadata.extra.get("identified", {})
    energy = identified.get("energy", source)
    return {
        "name": profile.name,
        "stages": profile.num_stages,
        "frequency_mhz": f"{min(clocks)}-{max(clocks)}" if clocks else None,
        "gpu": profile.metadata.gpu,
        "source": source,
        "time": source,
        "energy": energy if energy == source else "identified",
        "workload": profile.metadata.workload,
        "instructions": list(profile.instructions),
        "schedule": profile.metadata.schedule,
        "microbatches": profile.metadata.num_microbatches,
        "sha256": profile.sha256,
    }
