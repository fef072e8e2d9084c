"""`envplan serving profile`: what requests cost, by parallelism and clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.serving.service import ServiceOptions, example_loads
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.tables import Column
from envplan.cli.types import OPTIONAL_FILE, InputFile, OutputFile, quantity
from envplan.quantities import COUNT, NUMBER

if TYPE_CHECKING:
    from envplan.serving.identify.sweep_files import SweepFacts
    from envplan.serving.profile import Efficiency, ServingProfile

#: A panel of `--help`.
SWEEP: Final = "Sweep"

_J_PER_WH: Final = 3600.0


def profile(
    service: ServiceOptions,
    *,
    load: Annotated[
        float,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="TOKENS/S",
            help="The load to show energies at; default: 2000.",
            show_default=False,
            parser=quantity(NUMBER.within(1e-6, 1e9)),
        ),
    ] = 2000.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar=OPTIONAL_FILE,
            help="Draw energies over clocks: .png, .svg or .pdf; without a name: "
            "serving-profile.png.",
            parser=OutputFile(".png", ".svg", ".pdf", bare="serving-profile.png"),
        ),
    ] = None,
    from_sweep: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="FILE",
            help="Make the profile from benchmarks of your own, instead of PROFILE: results of "
            "`vllm bench serve` or `sglang.bench_serving`, or a table of aiconfigurator or "
            "InferenceX.",
            show_default=False,
        ),
        InputFile(),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(rich_help_panel=SWEEP, metavar="NAME", help="Language model of the sweep."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(rich_help_panel=SWEEP, metavar="NAME", help="GPU of the sweep, as in h100."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(rich_help_panel=SWEEP, metavar="NAME", help="Engine, as in vllm."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=SWEEP,
            metavar="N",
            help="GPUs of an instance, where the file does not say.",
            show_default=False,
            parser=quantity(COUNT.within(1, 8)),
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(rich_help_panel=SWEEP, metavar="NAME", help="Of the weights, as in fp8."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Write the profile there: .csv; with --from-sweep serving-profile.csv by default.",
            parser=OutputFile(".csv"),
        ),
    ] = None,
) -> None:
    """Show what requests cost, by parallelism and clock.

    Energies are per request, and blank where the SLO is violated.

    \b
    Example:
      envplan serving profile
      envplan serving profile h100-llama2-70b -o my.csv
      envplan serving profile my.csv --load 1000 --plot
      envplan serving profile --from-sweep bench.jsonl --gpu h100 --tp 4
    """
    from envplan.plotting.serving import serving_profile_figure
    from envplan.serving.identify.sweep_files import SweepFacts
    from envplan.serving.profile import ServingProfile

    made = output
    if from_sweep is not None:
        facts = SweepFacts(model=model, gpu=gpu, engine=engine, tp=tp, precision=precision)
        if made is None:
            made = Path("serving-profile.csv")
            invocation().will_write(made)
        _make_profile(from_sweep, facts, made)
        profile = service.adjusted(ServingProfile.read_csv(made))
        if service.stated_classes is not None:
            profile.save_copy(made, service.stated_classes)
    else:
        profile = service.serving_profile
        if made is not None:
            profile.save_copy(made, service.stated_classes)
    # A profile that was written has the stated classes as its own.
    shown = service if made is None else replace(service, profile=str(made), classes=None)
    ui.draw(plot, lambda: serving_profile_figure(profile, load))
    efficiencies = profile.efficiencies(load)
    ui.answer(
        lambda: _document(profile, load, efficiencies),
        lambda: _print(profile, load, efficiencies),
        next_command=[
            *("envplan", "serving", "solve", *shown.to_words()),
            *("--load", example_loads(profile.classes.names)),
        ],
    )


def _make_profile(sweep_file: Path, facts: SweepFacts, output: Path) -> None:
    """Fit a sweep, write its profile, and say how well it fits."""
    from envplan.serving.identify.build import fit_sweep, save_profile
    from envplan.serving.identify.factors import shipped_factors
    from envplan.serving.identify.sweep_files import read_sweep, rows_of_one_profile

    rows = rows_of_one_profile(read_sweep(sweep_file, facts), facts, sweep_file)
    factors = shipped_factors()
    sweep = fit_sweep(rows, factors)
    save_profile(sweep, factors, output, sweep_file.name)
    ui.warn(
        f"{output} is identified from {len(rows)} results: rms error "
        f"{100 * sweep.token_interval_error:.1f}% of times between tokens, "
        f"{100 * sweep.first_token_error:.1f}% of times to the first token; its power, and what "
        "lower clocks do, are of other measurements"
    )


def _document(
    profile: ServingProfile, load: float, efficiencies: Sequence[Efficiency]
) -> dict[str, object]:
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "model": profile.model,
        "source": profile.source,
        "modelled": profile.modelled,
        "sha256": profile.sha256,
        "load_tokens_s": load,
        "classes": {name: class_.model_dump() for name, class_ in profile.classes.items()},
        "configurations": [efficiency.to_dict() for efficiency in efficiencies],
    }


def _print(profile: ServingProfile, load: float, efficiencies: Sequence[Efficiency]) -> None:
    """The profile's origin, and a table: a row for each class, a column for each TP and clock."""
    facts = [text for text in (profile.model, profile.gpu, profile.source) if text]
    ui.say(profile.name + (f" ({', '.join(facts)})" if facts else ""))
    if profile.modelled:
        ui.say(f"modelled: {profile.modelled}")
    names = [name for name in profile.classes if profile.curves_of(name)]
    slos = [profile.classes[name].slo for name in names]
    columns = [
        Column(header="class", cells=names, is_text=True),
        Column(header="TTFT (s)", cells=[f"{slo.ttft_s:g}" for slo in slos]),
        Column(header="TBT (s)", cells=[f"{slo.tbt_s:g}" for slo in slos]),
    ]
    # By TP and clock, the energy of a request of each class.
    energies_j: dict[tuple[int, int], dict[str, float | None]] = {}
    for efficiency in efficiencies:
        by_class = energies_j.setdefault((efficiency.tp, efficiency.frequency_mhz), {})
        by_class[efficiency.request_class] = efficiency.energy_per_request_j
    for (tp, mhz), by_class in sorted(energies_j.items()):
        cells = [_wh(by_class.get(name)) for name in names]
        columns.append(Column(header=f"TP{tp} {mhz}", cells=cells))
    title = f"Energy per request (Wh) at {load:g} tokens/s per instance, by TP and MHz"
    ui.show_table(title, columns)


def _wh(energy_j: float | None) -> str:
    return "-" if energy_j is None else f"{energy_j / _J_PER_WH:.2f}"
