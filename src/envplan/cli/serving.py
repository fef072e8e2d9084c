"""`envplan serving`: plans for inference fleets, a room of its own beside training."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from envplan.cli.frontier import check_type, name_bare_plot
from envplan.cli.inputs import JsonOption, QuietOption, at_least, check_outputs, finite
from envplan.devices import DeviceError
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.enforce.clocks import Clocks
    from envplan.runtime.guard import Guard
    from envplan.serving.plan import ServingPlan
    from envplan.serving.policies import Settings
    from envplan.serving.profile import ServingProfile
    from envplan.serving.requests import Excerpt
    from envplan.serving.simulation import Simulation
    from envplan.serving.trace import Trace

_BUILTIN = "h100-llama2-70b"
_PLOT_TYPES = (".png", ".svg", ".pdf")
_MOST_NAMED = 8
_LOOK_S = 0.5
_MOST_HEADROOM = 1e4  # percent
_LONGEST_EPOCH = 1e6  # minutes
_MOST_SLO_SCALE = 1e6


class _PlotCommand(TyperCommand):
    """A command with a `--plot` that may stand alone."""

    default = "serving.png"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, name_bare_plot(args, self.default))


class ServingProfileCommand(_PlotCommand):
    """`serving profile`."""

    default = "serving-profile.png"


class ServingSolveCommand(_PlotCommand):
    """`serving solve`."""

    default = "serving-plan.png"


class ServingTimeCommand(_PlotCommand):
    """`serving simulate` and `serving compare`."""

    default = "serving-week.png"


serving = typer.Typer(
    name="serving",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ProfileArgument = Annotated[
    str,
    typer.Argument(
        metavar="[PROFILE]", help=f"Serving profile CSV, or the built-in {_BUILTIN} (the default)."
    ),
]
GpusOption = Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs of the fleet.")]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="CLASS=TTFT,TBT",
        help="SLO of a class: seconds to the first token, and between tokens. May be repeated.",
    ),
]
SloScaleOption = Annotated[
    float, typer.Option("--slo-scale", metavar="X", help="All SLOs, X times as long.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="[FILE]", help="Draw it, as .png, .svg or .pdf; the name may be left out."
    ),
]
TraceOption = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Trace CSV (timestamp and class, or token counts), or a built-in one: coding-week, "
        "conversation-week (both modelled).",
    ),
]
EpochOption = Annotated[
    float, typer.Option(metavar="MINUTES", help="Between two decisions on the pools.")
]
HeadroomOption = Annotated[float, typer.Option(metavar="PCT", help="Room above the expected peak.")]
MispredictOption = Annotated[
    float,
    typer.Option(
        "--mispredicted", metavar="PCT", help="Requests whose output is longer than predicted."
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")]


@serving.callback(invoke_without_command=True)
def serving_fleet(context: typer.Context) -> None:
    """Plan inference fleets: frequency, parallelism and instance counts under latency SLOs.

    \b
    Example:
      envplan serving profile
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving apply serving-plan.json
      envplan serving compare --trace coding-week --plot
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@serving.command("profile", cls=ServingProfileCommand)
def serving_profile(
    profile: ProfileArgument = _BUILTIN,
    load: Annotated[
        float, typer.Option(metavar="TOKENS/S", help="The load to show energies at.")
    ] = 2000.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile's CSV there."),
    ] = None,
    plot: PlotOption = None,
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a serving profile and print its energy per request; blank where the SLO is violated.

    \b
    Example:
      envplan serving profile
      envplan serving profile h100-llama2-70b -o my.csv
      envplan serving profile my.csv --load 1000 --plot
    """
    from envplan.cli.output import print_json, say

    check_type(plot, "--plot", _PLOT_TYPES, "those are the pictures there are")
    check_type(output, "--output", (".csv",), "a profile is a CSV file")
    finite(load, "--load")
    if load == 0:
        raise InputError("--load must be above 0: a request's energy means nothing without load")
    known = _profile(profile, slo, slo_scale)
    _check_outputs(known, output, plot)
    if output is not None:
        _write_copy(known, output)
    if plot is not None:
        from envplan.plotting.serving import plot_serving_profile

        plot_serving_profile(known, plot)
    if json:
        print_json(_profile_document(known, load))
    elif not quiet:
        _print_profile(known, load)
        for written in (output, plot):
            if written is not None:
                say(f"wrote {written}")


def _write_copy(profile: ServingProfile, output: Path) -> None:
    from envplan._files import atomic_write
    from envplan.serving.profile import sidecar_path

    atomic_write(output, profile.content)
    sidecar = profile.path and sidecar_path(profile.path)
    if sidecar and sidecar.is_file():
        atomic_write(sidecar_path(output), sidecar.read_bytes())


def _profile_document(profile: ServingProfile, load: float) -> dict[str, Any]:
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "model": profile.model,
        "source": profile.source,
        "modelled": profile.modelled,
        "sha256": profile.sha256,
        "load_tokens_s": load,
        "gaps": [
            {"class": name, "tp": tp, "frequency_mhz": clock} for name, tp, clock in profile.gaps()
        ],
        "classes": {
            name: {
                "input_tokens": known.input_tokens,
                "output_tokens": known.output_tokens,
                "ttft_slo_s": known.slo.ttft_s,
                "tbt_slo_s": known.slo.tbt_s,
                "shared_by": known.shared_by,
            }
            for name, known in profile.classes.items()
        },
        "configurations": [
            {
                "class": curve.name,
                "tp": curve.tp,
                "frequency_mhz": curve.frequency_mhz,
                "capacity_tokens_s": curve.capacity(profile.classes[curve.name].slo),
                "max_load_tokens_s": curve.max_load,
                "energy_per_request_j": profile.energy_per_request(curve, load)
                if curve.meets(profile.classes[curve.name].slo, load)
                else None,
            }
            for name in profile.classes
            for curve in profile.of(name)
        ],
    }


def _print_profile(profile: ServingProfile, load: float) -> None:
    from envplan.cli.output import print_table, say

    clocks = sorted({frequency for _, _, frequency in profile.curves})
    degrees = sorted({tp for _, tp, _ in profile.curves})
    facts = [text for text in (profile.model, profile.gpu, profile.source) if text]
    say(f"{profile.name}" + (f" ({', '.join(facts)})" if facts else ""))
    if profile.modelled:
        say(f"modelled: {profile.modelled}")
    rows = []
    for name, request in profile.classes.items():
        if not profile.degrees(name):
            continue
        row = [name, f"{request.slo.ttft_s:g}", f"{request.slo.tbt_s:g}"]
        for tp in degrees:
            for clock in clocks:
                curve = profile.curves.get((name, tp, clock))
                met = curve is not None and curve.meets(request.slo, load)
                energy = profile.energy_per_request(curve, load) / 3600 if curve and met else None
                row.append("-" if energy is None else f"{energy:.2f}")
        rows.append(row)
    headers = ["class", "TTFT (s)", "TBT (s)"]
    headers += [f"TP{tp} {clock}" for tp in degrees for clock in clocks]
    print_table(
        f"Energy per request (Wh) at {load:g} tokens/s per instance, by TP and MHz", headers, rows
    )
    _warn_of_gaps(profile)


def _warn_of_gaps(profile: ServingProfile) -> None:
    """Name what the profile lacks though no SLO explains it: nothing can be planned there."""
    from envplan.cli.output import say

    if gaps := profile.gaps():
        named = [f"{name} on TP{tp} at {clock} MHz" for name, tp, clock in gaps[:_MOST_NAMED]]
        more = f", ... ({len(gaps)} in all)" if len(gaps) > _MOST_NAMED else ""
        say(
            f"warning: {profile.name} has no rows for {', '.join(named)}{more}, but for fewer GPUs "
            "or a lower clock; no SLO explains that, and neither plans nor baselines can use it"
        )


@serving.command("solve", cls=ServingSolveCommand)
def serving_solve(
    profile: ProfileArgument = _BUILTIN,
    load: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            metavar="CLASS=TOKENS/S[,...]",
            help="Tokens per second of each class, as in SS=2000,LL=500. May be repeated.",
        ),
    ] = None,
    gpus: GpusOption = 1024,
    planner: Annotated[str, typer.Option(metavar="NAME", help="exact or hierarchical.")] = "exact",
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    no_merge: Annotated[
        bool, typer.Option("--no-merge", help="Every class in a pool of its own.")
    ] = False,
    one_frequency: Annotated[
        bool,
        typer.Option(
            "--one-frequency", help="One clock for all instances of a pool with the same TP."
        ),
    ] = False,
    time_limit: Annotated[
        float, typer.Option(metavar="S", help="For the exact planner; then the gap is stated.")
    ] = 6.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the plan goes.")
    ] = Path("serving-plan.json"),
    plot: PlotOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fleet that serves a load within its SLOs with the least power.

    \b
    Example:
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving solve --load LL=9000 --planner hierarchical --plot
    """
    from envplan.cli.output import print_json, spinner

    check_type(plot, "--plot", _PLOT_TYPES, "those are the pictures there are")
    loads = _loads(load or [])
    at_least(gpus, "--gpus", 1)
    finite(time_limit, "--time-limit", least=0.1)
    known = _profile(profile, slo, slo_scale)
    _check_outputs(known, output, plot)
    with spinner("looking for the least power", quiet=quiet):
        plan = _planned(planner, known, loads, gpus, not no_merge, one_frequency, time_limit)
    plan.save(output)
    if plot is not None:
        from envplan.plotting.serving import plot_plan

        plot_plan(plan, plot)
    if json:
        print_json({"plan": str(output), **plan.model_dump(by_alias=True)})
    elif not quiet:
        _print_plan(plan, known, [output, plot])


def _planned(
    planner: str,
    profile: ServingProfile,
    loads: dict[str, float],
    gpus: int,
    merge: bool,
    one_frequency: bool,
    time_limit: float,
) -> ServingPlan:
    if planner == "hierarchical":
        if one_frequency:
            raise InputError("--one-frequency goes with planner exact, not hierarchical")
        from envplan.serving.hierarchy import hierarchical_plan

        return hierarchical_plan(profile, loads, gpus, merge=merge)
    if planner != "exact":
        raise InputError(f"--planner must be exact or hierarchical, not {planner}")
    from envplan.serving.exact import exact_plan

    return exact_plan(
        profile, loads, gpus, merge=merge, one_frequency=one_frequency, time_limit=time_limit
    )


def _print_plan(plan: ServingPlan, profile: ServingProfile, written: list[Path | None]) -> None:
    from envplan.cli.output import print_table, say

    modelled = ", modelled" if profile.source == "modelled" else ""
    rows = []
    for pool in plan.pools:
        served = " + ".join(s.request_class for s in pool.serves)
        for group in pool.groups:
            rows.append(
                [
                    served,
                    pool.request_class,
                    str(group.instances),
                    f"TP{group.tp}",
                    str(group.frequency_mhz),
                    f"{group.load_tokens_s:.0f}",
                    f"{group.power_w:.0f}",
                    f"{group.ttft_s:.3f}",
                    f"{group.tbt_s:.3f}",
                ]
            )
    headers = ("classes", "pool", "instances", "on", "MHz", "tokens/s", "W", "TTFT (s)", "TBT (s)")
    print_table(f"{plan.planner} plan, figures per instance{modelled}", headers, rows, words=2)
    predicted = plan.predicted
    say(f"{predicted.gpus} of {plan.asked.gpus} GPUs, {predicted.power_w:.6g} W in all")
    if predicted.gap is not None:
        proved = "proved optimal" if predicted.gap <= 1e-5 else "the best found in time"
        say(f"{proved}, certified gap {100 * predicted.gap:.4f}%")
    elif plan.planner == "exact":
        say("the best found in time, with no proof of how near to the optimum it is")
    if predicted.baseline is not None and predicted.savings_percent is not None:
        say(
            f"at maximum frequency on the highest TP: {predicted.baseline.gpus} GPUs, "
            f"{predicted.baseline.power_w:.6g} W; saved {predicted.savings_percent:.1f}%"
        )
    _warn_of_gaps(profile)
    for file in written:
        if file is not None:
            say(f"wrote {file}")


@serving.command("simulate", cls=ServingTimeCommand)
def serving_simulate(
    profile: ProfileArgument = _BUILTIN,
    trace: TraceOption = "coding-week",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="hierarchical, exact, frequency_only, static or max_frequency.",
        ),
    ] = "hierarchical",
    gpus: GpusOption = 1024,
    epoch: EpochOption = 30.0,
    headroom: HeadroomOption = 15.0,
    mispredicted: MispredictOption = 5.0,
    seed: SeedOption = 0,
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    requests: Annotated[
        float | None,
        typer.Option(
            "--requests",
            metavar="HOUR",
            help="Replay an hour request by request as well, with bursts: the one that begins so "
            "many hours into the trace.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write what happens over time as CSV."),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay a trace of loads: energy, SLO attainment and changes of a fleet under one policy.

    \b
    Example:
      envplan serving simulate --trace conversation-week
      envplan serving simulate --trace coding-week --policy static -o week.csv --plot
      envplan serving simulate --trace coding-week --requests 10
    """
    from envplan.cli.output import print_json, say, spinner

    check_type(plot, "--plot", _PLOT_TYPES, "those are the pictures there are")
    known, loads, settings = _job(
        profile, slo, slo_scale, trace, gpus, epoch, headroom, mispredicted, seed
    )
    check_type(output, "--output", (".csv",), "what happens is written as CSV")
    _check_outputs(known, output, plot, trace=trace)
    from envplan.serving.policies import simulate

    begin = None if requests is None else _begin(requests, loads)
    with spinner(f"replaying {loads.name}", quiet=quiet):
        result = simulate(known, loads, policy, settings)
        excerpt = None if begin is None else _excerpt(result, known, begin, seed)
    if output is not None:
        _write_series(result, output)
    if plot is not None:
        from envplan.plotting.serving import plot_over_time

        plot_over_time([result], _title(known, loads), plot)
    if json:
        one_by_one = {} if excerpt is None else {"requests_one_by_one": asdict(excerpt)}
        document = {"trace": loads.name, "profile": known.name, **_document(result)}
        print_json(document | one_by_one)
    elif not quiet:
        _print_simulation(result, known, loads)
        if excerpt is not None:
            _print_excerpt(excerpt)
        for written in (output, plot):
            if written is not None:
                say(f"wrote {written}")


@serving.command("compare", cls=ServingTimeCommand)
def serving_compare(
    profile: ProfileArgument = _BUILTIN,
    trace: TraceOption = "coding-week",
    gpus: GpusOption = 1024,
    epoch: EpochOption = 30.0,
    headroom: HeadroomOption = 15.0,
    mispredicted: MispredictOption = 5.0,
    seed: SeedOption = 0,
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Only these, savings against the first; default: max_frequency, static, "
            "frequency_only, exact, hierarchical.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="[FILE]",
            help="Draw it, as .png, .svg or .pdf, or write a page to open, as .html; the name may "
            "be left out.",
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay a trace under every policy and put them side by side.

    \b
    Example:
      envplan serving compare --trace coding-week
      envplan serving compare --trace my-trace.csv --gpus 256 --plot
      envplan serving compare --trace coding-week --plot week.html
    """
    from envplan.cli.output import print_json, print_table, progress_bar, say

    check_type(plot, "--plot", (*_PLOT_TYPES, ".html"), "choose one of them")
    known, loads, settings = _job(
        profile, slo, slo_scale, trace, gpus, epoch, headroom, mispredicted, seed
    )
    from envplan.plotting.serving import (
        HEADERS,
        comparison_rows,
        plot_over_time,
        save_comparison_page,
    )
    from envplan.serving.policies import POLICIES, compare_policies

    chosen = _policies(policies)
    _check_outputs(known, plot, trace=trace)
    with progress_bar("replaying every policy", quiet=quiet) as bar:

        def progress(done: int, of: int) -> None:
            if bar is not None:
                bar(of - done, 0)

        if bar is not None:
            bar(len(chosen), 0)
        results = compare_policies(known, loads, settings, policies=chosen, progress=progress)
    if plot is not None and plot.suffix.lower() == ".html":
        save_comparison_page(results, _title(known, loads), known.source, plot)
    elif plot is not None:
        plot_over_time(results, _title(known, loads), plot)
    if json:
        print_json(
            {
                "trace": loads.name,
                "profile": known.name,
                "policies": [
                    _document(r) | {"savings_percent": r.saved_percent(results[0])} for r in results
                ],
            }
        )
    elif not quiet:
        print_table(_title(known, loads), HEADERS, comparison_rows(results))
        for name in chosen:
            say(f"{name}: {POLICIES[name]}")
        _warn_of_gaps(known)
        if plot is not None:
            say(f"wrote {plot}")


@serving.command("apply")
def serving_apply(
    plan: Annotated[
        Path, typer.Argument(metavar="[PLAN]", help="The plan of `envplan serving solve`.")
    ] = Path("serving-plan.json"),
    profile: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="The plan's profile, if it is not where it was."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="N", help="GPUs of a machine.")
    ] = 8,
    clocks: Annotated[
        str | None,
        typer.Option(
            metavar="MHZ,...",
            help="Clocks the GPUs have, as in 210-1410:15; default: those of the profile's GPU.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on though the profile has changed since.")
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the clocks go.")
    ] = Path("serving.clocks.json"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Put a plan's instances on nodes and GPUs, each with its parallelism and clock.

    `envplan serving hold` then holds these clocks on a node.

    \b
    Example:
      envplan serving apply serving-plan.json
      envplan serving apply --gpus-per-node 16 -o fleet.clocks.json
    """
    from hashlib import sha256

    from envplan.cli.output import print_json, say
    from envplan.serving.apply import apply_serving_plan
    from envplan.serving.plan import ServingPlan
    from envplan.serving.tables import read_bytes

    at_least(gpus_per_node, "--gpus-per-node", 1)
    content = read_bytes(plan)
    loaded = ServingPlan.load(plan)
    known = loaded.find_profile(profile)
    check_outputs(output, inputs=[("the plan", plan), ("the profile", known.path)])
    applied = apply_serving_plan(
        loaded,
        known,
        clocks=_clocks(clocks),
        gpus_per_node=gpus_per_node,
        force=force,
        plan_sha256=sha256(content).hexdigest(),
    )
    applied.save(output)
    if json:
        print_json({"clocks": str(output), **applied.model_dump(by_alias=True)})
    elif not quiet:
        used = sum(instance.tp for instance in applied.instances)
        say(f"{len(applied.instances)} instances on {used} GPUs of {applied.nodes} nodes")
        changed = {
            instance.planned_mhz: instance.clock_mhz
            for instance in applied.instances
            if instance.planned_mhz != instance.clock_mhz
        }
        for asked, given in sorted(changed.items()):
            say(f"{asked} MHz becomes {given} MHz, which {applied.gpu or 'the GPU'} has")
        if unproven := [i for i in applied.instances if not i.slo_proven]:
            numbers = ", ".join(str(i.instance) for i in unproven[:_MOST_NAMED])
            more = ", ..." if len(unproven) > _MOST_NAMED else ""
            say(
                f"warning: at {unproven[0].clock_mhz} MHz, slower than planned, the profile does "
                f"not prove the SLO of instances {numbers}{more} ({len(unproven)} of "
                f"{len(applied.instances)}); measure that clock, then solve again"
            )
        say(f"wrote {output}; on each node: envplan serving hold {output} --node K")


@serving.command("hold")
def serving_hold(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="What `envplan serving apply` wrote.")
    ] = Path("serving.clocks.json"),
    node: Annotated[int, typer.Option(metavar="K", help="Which node this is, from 0.")] = 0,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="nvml: this machine's GPUs; modelled: none needed.")
    ] = "nvml",
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="So long; default: until interrupted."),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Hold the clocks of this node's GPUs until interrupted, then give them back.

    A guard for each GPU sets its clock, and gives it back however this process ends.

    \b
    Example:
      envplan serving hold serving.clocks.json --node 0
      envplan serving hold --backend modelled --seconds 1
    """
    from envplan.cli.output import say
    from envplan.serving.apply import ServingApplied, hold_clocks

    if seconds is not None:
        finite(seconds, "--seconds")
    applied = ServingApplied.load(file)
    options = _modelled_options(applied) if backend == "modelled" else {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with hold_clocks(applied, node, backend=backend, **options) as guards:
            if not quiet:
                for device, mhz in sorted(applied.clocks_of(node).items()):
                    say(f"GPU {device}: {mhz} MHz")
            with suppress(KeyboardInterrupt):  # the usual end of holding
                _watch(guards, seconds)
    except KeyboardInterrupt:
        pass
    if not quiet:
        say("clocks given back")


def _modelled_options(applied: Any) -> dict[str, Any]:
    from envplan.devices.modelled import GPUS

    key = next((m.key for m in GPUS.values() if m.name == applied.gpu), "h100-sxm")
    return {"gpu": key, "count": applied.gpus_per_node}


def _watch(guards: Sequence[Guard], seconds: float | None) -> None:
    """Wait for so long, s, and pass on what goes wrong meanwhile.

    Raises:
        DeviceError: a guard is gone, or a clock could not be set in the end either.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    lasting = ""
    while True:
        time.sleep(max(0.0, min(_LOOK_S, end - time.monotonic())))
        for guard in guards:
            for problem in guard.problems():
                lasting = problem
                print(f"envplan: warning: {problem}", file=sys.stderr, flush=True)
            if not guard.alive:
                raise DeviceError("a clock guard has ended; start holding again")
        if time.monotonic() >= end:
            break
    if any(guard.failing for guard in guards):
        raise DeviceError(lasting)


def _job(
    profile: str,
    slo: list[str] | None,
    slo_scale: float,
    trace: str,
    gpus: int,
    epoch: float,
    headroom: float,
    mispredicted: float,
    seed: int,
) -> tuple[ServingProfile, Trace, Settings]:
    """What simulate and compare work on."""
    at_least(gpus, "--gpus", 1)
    at_least(seed, "--seed", 0, 2**63 - 1)
    finite(headroom, "--headroom", most=_MOST_HEADROOM)
    if finite(epoch, "--epoch", most=_LONGEST_EPOCH) == 0:
        raise InputError("--epoch must be above 0")
    if finite(mispredicted, "--mispredicted") > 100:
        raise InputError(f"--mispredicted must be at most 100, not {mispredicted:g}")
    known = _profile(profile, slo, slo_scale)
    from envplan.serving.policies import Settings
    from envplan.serving.trace import Trace

    settings = Settings(
        gpus=gpus,
        epoch_s=60 * epoch,
        headroom=headroom / 100,
        mispredicted=mispredicted / 100,
        seed=seed,
    )
    return known, Trace.open(trace), settings


def _profile(name: str, slos: list[str] | None, scale: float) -> ServingProfile:
    """The profile, with the SLOs that options set."""
    from envplan.serving.classes import Slo, check_class
    from envplan.serving.profile import ServingProfile, with_slos

    if finite(scale, "--slo-scale", most=_MOST_SLO_SCALE) == 0:
        raise InputError("--slo-scale must be above 0")
    given = {}
    for text in slos or []:
        name_of, _, values = text.partition("=")
        try:
            ttft, tbt = (float(value) for value in values.split(","))
        except ValueError:
            raise InputError(
                f"--slo must be CLASS=TTFT,TBT in seconds, as in LL=2,0.1, not {text}"
            ) from None
        if not (0 < ttft < 1e9 and 0 < tbt < 1e9):
            raise InputError(f"--slo {text}: both must be seconds above 0")
        given[check_class(name_of)] = Slo(ttft, tbt)
    profile = ServingProfile.open(name)
    return with_slos(profile, given, scale) if given or scale != 1 else profile


def _policies(text: str | None) -> tuple[str, ...]:
    """The policies that --policies names; all of them without it."""
    from envplan.serving.policies import POLICIES

    if text is None:
        return tuple(POLICIES)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise InputError(f"there is no policy {name!r}; there are: {', '.join(POLICIES)}")
    if len(set(names)) < len(names):
        raise InputError(f"--policies names a policy twice: {text}")
    return names


def _clocks(text: str | None) -> Clocks | None:
    if text is None:
        return None
    from envplan.enforce.clocks import given_clocks

    return given_clocks(text)


def _loads(texts: list[str]) -> dict[str, float]:
    """The loads that --load options give."""
    from envplan.serving.classes import check_class

    loads: dict[str, float] = {}
    for part in (part for text in texts for part in text.split(",")):
        name, _, value = part.partition("=")
        try:
            load = float(value)
        except ValueError:
            raise InputError(
                f"--load must be CLASS=TOKENS/S, as in SS=2000,LL=500, not {part!r}"
            ) from None
        check_class(name.strip())
        if name.strip() in loads:
            raise InputError(f"--load gives {name.strip()} twice")
        loads[name.strip()] = finite(load, f"--load {name.strip()}")
    if not loads:
        raise InputError("which load? Give --load CLASS=TOKENS/S, as in SS=2000,LL=500")
    return loads


def _check_outputs(
    profile: ServingProfile, *outputs: Path | None, trace: str | None = None
) -> None:
    from envplan.serving.profile import sidecar_path

    sidecar = None if profile.path is None else sidecar_path(profile.path)
    check_outputs(
        *outputs,
        inputs=[
            ("the profile", profile.path),
            ("the profile's sidecar", sidecar),
            ("the trace", trace),
        ],
    )


def _title(profile: ServingProfile, trace: Trace) -> str:
    modelled = " (modelled)" if profile.source == "modelled" else ""
    return f"{trace.name} on {profile.name}{modelled}"


def _document(result: Simulation) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "energy_j": result.energy_j,
        "requests": result.requests,
        "slo_attainment": result.attainment,
        "instances_started": result.started,
        "instances_resharded": result.resharded,
        "clock_changes": result.clock_changes,
        "emergencies": result.raised,
        "requests_spilled": result.spilled,
        "requests_moved": result.moved,
        "gpus_mean": float(result.series.gpus.mean()),
        "gpus_most": float(result.series.gpus.max()),
    }


def _print_simulation(result: Simulation, profile: ServingProfile, trace: Trace) -> None:
    from envplan.cli.output import print_table, say
    from envplan.plotting.serving import kwh

    series = result.series
    rows = [
        ["energy (kWh)", kwh(result.energy_j)],
        ["requests", f"{result.requests:.0f}"],
        ["SLOs met (%)", f"{100 * result.attainment:.3f}"],
        ["GPUs, mean", f"{series.gpus.mean():.1f}"],
        ["GPUs, most", f"{series.gpus.max():.0f}"],
        ["instances started", str(result.started)],
        ["instances re-sharded", str(result.resharded)],
        ["clock changes", str(result.clock_changes)],
        ["emergencies: planned clocks raised", str(result.raised)],
        ["emergencies: requests to a higher pool", f"{result.spilled:.0f}"],
        ["outputs longer than predicted", str(result.moved)],
    ]
    days = trace.duration_s / 86_400
    say(f"{result.policy}: {_title(profile, trace)}, {days:.3g} days")
    print_table("", ("", "in all"), rows)
    _warn_of_gaps(profile)


def _begin(hour: float, trace: Trace) -> float:
    """When the hour begins that is to be replayed request by request, s."""
    begin = 3600 * finite(hour, "--requests")
    if begin >= trace.duration_s:
        raise InputError(
            f"--requests {hour:g} lies beyond the trace, which lasts "
            f"{trace.duration_s / 3600:g} hours"
        )
    return begin


def _excerpt(result: Simulation, profile: ServingProfile, begin_s: float, seed: int) -> Excerpt:
    from envplan.serving.requests import replay_requests

    return replay_requests(result, profile, begin_s=begin_s, seed=seed)


def _print_excerpt(excerpt: Excerpt) -> None:
    from envplan.cli.output import print_table, say
    from envplan.plotting.serving import kwh

    rows = [
        ["energy (kWh)", kwh(excerpt.flow_energy_j), kwh(excerpt.energy_j)],
        [
            "SLOs met (%)",
            f"{100 * excerpt.flow_attainment:.3f}",
            f"{100 * excerpt.attainment:.3f}",
        ],
        ["requests that waited for a place", "", str(excerpt.waited)],
        ["emergencies: clocks raised", "", str(excerpt.raised)],
        ["emergencies: requests to a higher pool", "", str(excerpt.spilled)],
    ]
    begin, end = (s / 3600 for s in (excerpt.begin_s, excerpt.begin_s + excerpt.duration_s))
    say(f"hours {begin:.4g} to {end:.4g} again, {excerpt.requests} requests one by one:")
    print_table("", ("", "as flows", "one by one"), rows)


def _write_series(result: Simulation, path: Path) -> None:
    from envplan._files import atomic_write

    series = result.series
    columns = ("time_s", "power_w", "load_tokens_s", "gpus", "requests", "attained")
    lines = [",".join(columns)]
    arrays = [getattr(series, column) for column in columns]
    lines += [",".join(f"{value:.10g}" for value in row) for row in zip(*arrays, strict=True)]
    atomic_write(path, "\n".join(lines) + "\n")
