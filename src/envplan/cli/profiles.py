"""`envplan profiles`: what ships with envplan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from envplan.cli.options import OutputOptions

if TYPE_CHECKING:
    from envplan.profile import Profile

_SHOWN: Final = ("name", "time", "energy", "stages", "frequency_mhz", "gpu", "workload")


def profiles(show: OutputOptions) -> None:
    """List the built-in profiles, those from measurements first.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier sosp24-a100-gpt3-xl-4stage
    """
    from envplan.cli.output import answer, print_table, say
    from envplan.profile import builtin_profiles

    known = [_describe(profile) for profile in builtin_profiles()]
    known.sort(key=lambda profile: (profile["source"] != "measured", profile["name"]))

    def tell() -> None:
        headers = ("name", "time", "energy", "stages", "MHz", "GPU", "workload")
        rows = [[str(profile[field] or "-") for field in _SHOWN] for profile in known]
        print_table("", headers, rows, words=len(headers), wrap=("GPU", "workload"))
        say(
            "time and energy of operations are measured on real GPUs (interpolated at clocks that "
            "no run had), identified from measured iterations, or modelled"
        )

    first = known[0]["name"]
    answer(show, lambda: {"profiles": known}, tell, then=["envplan", "savings", first])


def _describe(profile: Profile) -> dict[str, Any]:
    clocks, metadata = profile.clocks_mhz, profile.metadata
    # Sidecars of measured profiles say what about them was not measured operation by operation.
    energy = metadata.extra.get("identified", {}).get("energy", metadata.source)
    return {
        "name": profile.name,
        "stages": profile.num_stages,
        "frequency_mhz": f"{clocks[0]}-{clocks[-1]}" if clocks else None,
        "gpu": metadata.gpu,
        "source": metadata.source,
        "time": metadata.source,
        "energy": energy if energy == metadata.source else "identified",
        "workload": metadata.workload,
        "instructions": list(profile.instructions),
        "schedule": metadata.schedule,
        "microbatches": metadata.num_microbatches,
        "sha256": profile.sha256,
    }
