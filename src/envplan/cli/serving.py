"""`envplan serving`: plans for inference fleets, a room of its own beside training."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from envplan.cli.command import check_type, name_bare_plot
from envplan.cli.inputs import JsonOption, QuietOption, at_least, check_outputs, finite
from envplan.devices import DeviceError
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.costs.rates import Rate
    from envplan.enforce.clocks import Clocks
    from envplan.runtime.guard import Guard
    from envplan.serving.plan import ServingPlan
    from envplan.serving.policies import Settings
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation
    from envplan.serving.trace import Trace

_BUILTIN = "h100-llama2-70b"
_TRACE = "azure-2023-conversation"
_MOST_FACTOR = 100.0
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
TimePlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="[FILE]",
        help="Draw it, as .png, .svg or .pdf, or write a page to open, as .html; the name may be "
        "left out.",
    ),
]
TraceOption = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Trace CSV, plain or gzipped: Azure's files as they are, or timestamp and class or "
        "token counts. Or a built-in one: azure-2023-code, azure-2023-conversation (an hour each, "
        "real), coding-week, conversation-week (real-shaped).",
    ),
]
EpochOption = Annotated[float, typer.Option(metavar="MINUTES", help="Between two looks ahead.")]
QuantileOption = Annotated[
    float,
    typer.Option("--slo-quantile", metavar="PCT", help="Share of SLOs that fleets are sized for."),
]
HeadroomOption = Annotated[float, typer.Option(metavar="PCT", help="Room above what is needed.")]
MispredictOption = Annotated[
    float,
    typer.Option(
        "--mispredicted",
        metavar="PCT",
        help="Requests whose output is predicted one length too short or too long.",
    ),
]
PreparedOption = Annotated[
    bool,
    typer.Option(
        "--prepared", help="Machines are kept ready with weights and snapshot: a start takes 33 s."
    ),
]
FactorOption = Annotated[
    float, typer.Option("--load-factor", metavar="X", help="So many times the trace's requests.")
]
PriceOption = Annotated[
    str | None, typer.Option(metavar="PRICE", help="Per kWh: a number, or a CSV file over time.")
]
CarbonOption = Annotated[
    str | None, typer.Option(metavar="G", help="gCO2 per kWh: a number, or a CSV file over time.")
]
StartOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="When the trace begins, for files over time.")
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
      envplan serving compare --trace azure-2023-code --plot
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
        from envplan.plotting.figures import save_figure
        from envplan.plotting.serving import serving_profile_figure

        save_figure(serving_profile_figure(known), plot)
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
        from envplan.plotting.figures import save_figure
        from envplan.plotting.serving import plan_figure

        save_figure(plan_figure(plan), plot)
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
    trace: TraceOption = _TRACE,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="One of those that `serving compare` names.")
    ] = "envplan",
    gpus: GpusOption = 1024,
    epoch: EpochOption = 30.0,
    quantile: QuantileOption = 99.95,
    headroom: HeadroomOption = 10.0,
    mispredicted: MispredictOption = 5.0,
    prepared: PreparedOption = False,
    load_factor: FactorOption = 1.0,
    seed: SeedOption = 0,
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    price: PriceOption = None,
    carbon: CarbonOption = None,
    start: StartOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write what happens over time as CSV."),
    ] = None,
    plot: TimePlotOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay a trace request by request: energy, SLOs and changes of a fleet under one policy.

    \b
    Example:
      envplan serving simulate --trace azure-2023-conversation
      envplan serving simulate --trace azure-2023-code --policy static -o hour.csv --plot
      envplan serving simulate --trace AzureLLMInferenceTrace_code.csv.gz --price 0.12 --carbon 380
    """
    check_type(output, "--output", (".csv",), "what happens is written as CSV")
    job = _Job.of(profile, slo, slo_scale, trace, load_factor, (price, carbon, start), plot, output)
    settings = _settings(gpus, epoch, quantile, headroom, mispredicted, prepared, seed)
    result = job.run(settings, [policy], quiet=quiet)[0]
    if output is not None:
        _write_series(result, output)
    if json:
        job.print_json(
            {**job.document(result), "trace": job.trace.name, "profile": job.profile.name}
        )
    elif not quiet:
        job.print_one(result)
        job.print_written(output, plot)


@serving.command("compare", cls=ServingTimeCommand)
def serving_compare(
    profile: ProfileArgument = _BUILTIN,
    trace: TraceOption = _TRACE,
    gpus: GpusOption = 1024,
    epoch: EpochOption = 30.0,
    quantile: QuantileOption = 99.95,
    headroom: HeadroomOption = 10.0,
    mispredicted: MispredictOption = 5.0,
    prepared: PreparedOption = False,
    load_factor: FactorOption = 1.0,
    seed: SeedOption = 0,
    slo: SloOption = None,
    slo_scale: SloScaleOption = 1.0,
    price: PriceOption = None,
    carbon: CarbonOption = None,
    start: StartOption = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Only these, savings against the first; default: SinglePool, MultiPool, "
            "ScaleInst, ScaleShard, ScaleFreq, DynamoLLM, envplan, static, exact.",
        ),
    ] = None,
    plot: TimePlotOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay a trace under every policy, request by request, and put them side by side.

    \b
    Example:
      envplan serving compare --trace azure-2023-code
      envplan serving compare --trace AzureLLMInferenceTrace_conv.csv.gz --gpus 256 --plot
      envplan serving compare --trace coding-week --policies SinglePool,envplan --plot week.html
    """
    from envplan.plotting.serving import HEADERS, comparison_rows

    job = _Job.of(profile, slo, slo_scale, trace, load_factor, (price, carbon, start), plot, None)
    settings = _settings(gpus, epoch, quantile, headroom, mispredicted, prepared, seed)
    chosen = _policies(policies)
    results = job.run(settings, chosen, quiet=quiet)
    if json:
        job.print_json({
            "trace": job.trace.name,
            "made": job.trace.made,
            "profile": job.profile.name,
            "source": job.profile.source,
            "policies": [
                job.document(r) | {"savings_percent": r.saved_percent(results[0])} for r in results
            ],
        })  # fmt: skip
    elif not quiet:
        from envplan.cli.output import print_table, say
        from envplan.serving.policies import POLICIES

        print_table(job.title, HEADERS, comparison_rows(results))
        if job.rates:
            costs = [
                [r.policy, *(f"{r.at_rate(rate):.6g}" for rate in job.rates.values())]
                for r in results
            ]
            print_table("", ("policy", *job.rates), costs)
        for name in chosen:
            say(f"{name}: {POLICIES[name].about}")
        job.print_written(plot)


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


def _settings(
    gpus: int, epoch: float, quantile: float, headroom: float, mispredicted: float,
    prepared: bool, seed: int,
) -> Settings:  # fmt: skip
    from envplan.serving.policies import Settings
    from envplan.serving.simulation import Overheads

    at_least(gpus, "--gpus", 1)
    at_least(seed, "--seed", 0, 2**63 - 1)
    finite(headroom, "--headroom", most=_MOST_HEADROOM)
    if finite(epoch, "--epoch", most=_LONGEST_EPOCH) == 0:
        raise InputError("--epoch must be above 0")
    if finite(mispredicted, "--mispredicted") > 100:
        raise InputError(f"--mispredicted must be at most 100, not {mispredicted:g}")
    if not 0 < finite(quantile, "--slo-quantile") < 100:
        raise InputError(f"--slo-quantile must lie between 0 and 100, not {quantile:g}")
    return Settings(
        gpus=gpus, epoch_s=60 * epoch, late=1 - quantile / 100, headroom=headroom / 100,
        mispredicted=mispredicted / 100, seed=seed, overheads=Overheads(prepared=prepared),
    )  # fmt: skip


@dataclass
class _Job:
    """What simulate and compare work on, and how they show it."""

    profile: ServingProfile
    trace: Trace
    rates: dict[str, Rate]
    plot: Path | None

    @classmethod
    def of(
        cls, profile: str, slo: list[str] | None, slo_scale: float, trace: str, factor: float,
        rates: tuple[str | None, str | None, str | None], plot: Path | None, output: Path | None,
    ) -> _Job:  # fmt: skip
        """Read everything.

        Args:
            rates: price, carbon and start, as given.
        """
        from envplan.costs.rates import read_rate
        from envplan.serving.trace import Trace

        check_type(plot, "--plot", (*_PLOT_TYPES, ".html"), "choose one of them")
        if not 0 < finite(factor, "--load-factor") <= _MOST_FACTOR:
            raise InputError(f"--load-factor must be above 0 and at most {_MOST_FACTOR:g}")
        known = _profile(profile, slo, slo_scale)
        _check_outputs(known, output, plot, trace=trace)
        price, carbon, start = rates
        found = {}
        if price is not None:
            found["money"] = read_rate(price, "price", start=start, repeats=True)
        if carbon is not None:
            found["carbon_g"] = read_rate(carbon, "carbon", start=start, repeats=True)
        loads = Trace.open(trace)
        return cls(known, loads if factor == 1 else loads.scaled(factor), found, plot)

    @property
    def title(self) -> str:
        """What is replayed on what."""
        made = " (real-shaped)" if (self.trace.made or "").startswith("real-shaped") else ""
        known = "" if self.profile.source in (None, "measured") else f" ({self.profile.source})"
        return f"{self.trace.name}{made} on {self.profile.name}{known}"

    def run(self, settings: Settings, names: Sequence[str], *, quiet: bool) -> list[Simulation]:
        """Replay, and draw what --plot asks for."""
        from envplan.cli.output import progress_bar
        from envplan.serving.policies import compare_policies

        with progress_bar(f"replaying {self.trace.name}", quiet=quiet) as bar:
            if bar is not None:
                bar(len(names), 0)

            def progress(done: int, of: int) -> None:
                if bar is not None:
                    bar(of - done, 0)

            results = compare_policies(
                self.profile, self.trace, settings, policies=names, progress=progress
            )
        if self.plot is not None:
            from envplan.plotting.figures import save_figure
            from envplan.plotting.page import save_page
            from envplan.plotting.serving import comparison_page, over_time_figure

            if self.plot.suffix.lower() == ".html":
                save_page(comparison_page(results, self.title, self.profile.source), self.plot)
            else:
                save_figure(over_time_figure(results, self.title), self.plot)
        return results

    def document(self, result: Simulation) -> dict[str, Any]:
        """A result for --json."""
        from envplan.serving.classes import CLASSES

        return {
            "policy": result.policy,
            "energy_j": result.energy_j,
            "requests": result.requests,
            "slo_attainment": result.attainment,
            "slo_attainment_by_class": {
                name: int(row[3]) / int(row[0])
                for name, row in zip(CLASSES, result.by_class, strict=True)
                if row[0]
            },
            "first_tokens_in_time": int(result.by_class[:, 1].sum()) / result.requests,
            "further_tokens_in_time": int(result.by_class[:, 2].sum()) / result.requests,
            "instances_started": result.started,
            "instances_resharded": result.resharded,
            "clock_changes": result.clock_changes,
            "requests_helped": result.helped,
            "gpus_mean": float(result.series.gpus.mean()),
            "gpus_most": float(result.series.gpus.max()),
            "gpu_hours": result.gpu_hours,
            **{name: result.at_rate(rate) for name, rate in self.rates.items()},
        }

    def print_json(self, document: dict[str, Any]) -> None:
        """Print a document."""
        from envplan.cli.output import print_json

        print_json(document)

    def print_one(self, result: Simulation) -> None:
        """Print one result as a table."""
        from envplan.cli.output import print_table, say
        from envplan.plotting.serving import kwh

        found = self.document(result)
        rows = [
            ["energy (kWh)", kwh(result.energy_j)],
            ["requests", str(result.requests)],
            ["SLOs met (%)", f"{100 * result.attainment:.3f}"],
            ["first token in time (%)", f"{100 * found['first_tokens_in_time']:.3f}"],
            ["further tokens in time (%)", f"{100 * found['further_tokens_in_time']:.3f}"],
            ["GPUs, mean", f"{found['gpus_mean']:.1f}"],
            ["GPUs, most", f"{found['gpus_most']:.0f}"],
            ["instances started", str(result.started)],
            ["instances re-sharded", str(result.resharded)],
            ["clock changes", str(result.clock_changes)],
            ["requests that another pool took", str(result.helped)],
            *([name, f"{result.at_rate(rate):.6g}"] for name, rate in self.rates.items()),
        ]
        say(f"{result.policy}: {self.title}, {result.duration_s / 3600:.3g} hours")
        print_table("", ("", "in all"), rows)

    def print_written(self, *files: Path | None) -> None:
        """Say what is lacking in the profile, and what was written."""
        from envplan.cli.output import say

        _warn_of_gaps(self.profile)
        for file in files:
            if file is not None:
                say(f"wrote {file}")


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


def _write_series(result: Simulation, path: Path) -> None:
    from envplan._files import atomic_write

    series = result.series
    columns = ("time_s", "power_w", "load_tokens_s", "gpus", "requests", "attained")
    lines = [",".join(columns)]
    arrays = [getattr(series, column) for column in columns]
    lines += [",".join(f"{value:.10g}" for value in row) for row in zip(*arrays, strict=True)]
    atomic_write(path, "\n".join(lines) + "\n")
