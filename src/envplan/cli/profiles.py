"""`envplan profiles`: what ships with envplan."""

from __future__ import annotations

from typing import Any, Final

import envplan
from envplan.cli import output as ui

#: The columns of the table, and what they show of the document.
_COLUMNS: Final = {
    "name": "name", "time": "time", "energy": "energy", "stages": "stages",
    "MHz": "frequency_mhz", "GPU": "gpu", "workload": "workload",
}  # fmt: skip


def profiles() -> None:
    """List the built-in profiles, those from measurements first.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier sosp24-a100-gpt3-xl-4stage
    """

    known = [_describe(profile) for profile in envplan.builtin_profiles()]
    known.sort(key=lambda profile: (profile["source"] != "measured", profile["name"]))

    def tell() -> None:
        columns = {name: [one[field] for one in known] for name, field in _COLUMNS.items()}
        ui.print_columns("", columns, words=len(columns), wrap=("GPU", "workload"))
        ui.say(
            "time and energy of operations are measured on real GPUs (interpolated at clocks that "
            "no run had), identified from measured iterations, or modelled"
        )

    first = known[0]["name"]
    ui.respond(lambda: {"profiles": known}, tell, then=["envplan", "savings", first])


def _describe(profile: envplan.Profile) -> dict[str, Any]:
    clocks, source = profile.clocks_mhz, profile.metadata.source
    # Sidecars of measured profiles say what about them was not measured operation by operation.
    energy = profile.metadata.extra.get("identified", {}).get("energy", source)
    return {
        "name": profile.name,
        "stages": profile.num_stages,
        "frequency_mhz": f"{clocks[0]}-{clocks[-1]}" if clocks else None,
        **ui.picked(profile.metadata, "gpu source time=source"),
        "energy": energy if energy == source else "identified",
        "workload": profile.metadata.workload,
        "instructions": list(profile.instructions),
        **ui.picked(profile.metadata, "schedule microbatches=num_microbatches"),
        "sha256": profile.sha256,
    }
