"""`envplan serving`: plans for inference fleets, a room of its own beside training."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envplan._io.files import atomic_write
from envplan._io.words import counted
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli import state
from envplan.cli.options import RateOptions
from envplan.devices import DeviceError
from envplan.errors import InputError
from envplan.plotting import serving as pictures
from envplan.quantities import COUNT, NUMBER, PERCENT, TIME, WHOLE
from envplan.serving.settings import READY, Settings

if TYPE_CHECKING:
    from envplan.costs.rates import Rate
    from envplan.devices.guard import Guard
    from envplan.serving.plan import ServingPlan
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation
    from envplan.serving.trace import Trace

_BUILTIN = "h100-llama2-70b"
_BASELINE = "SinglePool"
_MOST_NAMED = 8
_LOOK_S = 0.5

_LOAD = "CLASS=TOKENS/S, as in SS=2000,LL=500"
_SECONDS = NUMBER.within(1e-9, 1e9)

#: What JSON says of a result.
_RESULT = """
    policy energy_j requests slo_attainment=attainment slo_attainment_by_class=attainment_by_class
    first_tokens_in_time=first_in_time further_tokens_in_time=tokens_in_time
    instances_started=started instances_resharded=resharded weights_moved_copies=moved
    clock_changes requests_helped=helped requests_squashed=squashed requests_hopeless=hopeless
    gpus_mean gpus_most gpu_hours
"""


@cmd.options(
    """
    Most used:
      PROFILE  Serving profile CSV; default: h100-llama2-70b.
    Job:
      --slo CLASS=TTFT,TBT  SLO of a class: seconds to the first token, and between tokens. May be
          repeated.
      --slo-scale X  All SLOs, X times as long; default: 1.
    """,
    slo_scale=NUMBER.within(1e-6, 1e6),
)
class ServiceOptions:
    """A serving profile, and the SLOs to be met with it."""

    profile: str = _BUILTIN
    slo: list[str] | None = None
    slo_scale: float = 1.0

    @cached_property
    def known(self) -> ServingProfile:
        """The profile, with these SLOs."""
        from envplan.serving.classes import Slo
        from envplan.serving.profile import ServingProfile

        slos = {}
        form = "--slo must be CLASS=TTFT,TBT in seconds, as in LL=2,0.1"
        for name, values in _by_class(self.slo or [], form):
            times = [_SECONDS.parse(value, f"--slo {name}") for value in values.split(",")]
            if len(times) != 2:
                raise InputError(f"{form}, not {name}={values}")
            slos[name] = Slo(*times)
        profile = ServingProfile.open(self.profile)
        cmd.refuse_overwriting(profile.path, profile.sidecar)
        return profile.with_slos(slos, self.slo_scale)


def _by_class(texts: Sequence[str], form: str) -> Iterator[tuple[str, str]]:
    """Class and value of every CLASS=VALUE; `form` says what it must be."""
    from envplan.serving.classes import check_class

    for text in texts:
        name, _, value = (word.strip() for word in text.partition("="))
        if not value:
            raise InputError(f"{form}, not {text!r}")
        yield check_class(name), value


def _ready(text: str, name: str) -> str:
    words = [word.strip() for word in text.split(",")]
    if not all(word in READY for word in words):
        raise InputError(
            f"{name} must name some of {', '.join(READY)}, as in vm,weights, not {text}"
        )
    return ",".join(words)


@cmd.options(
    """
    Most used:
      --trace TRACE  Trace CSV, plain or gzipped: Azure's files as they are, or timestamp and class
          or token counts. Or a built-in one: azure-2023-code, azure-2023-conversation (an hour
          each, real), coding-week, conversation-week (real-shaped).
      --plot [FILE]  Draw what happens over time, or write a page: .png, .svg, .pdf or .html;
          without a name: serving-week.png.
    Job:
      --load-factor X  X times the trace's requests; default: 1.
    Fleet:
      --gpus N  GPUs of the fleet.
      --pools N  Pools of policy DynamoLLM, at most.
      --epoch TIME  Between two looks ahead, as in 30min or 30 (minutes); default: 30min.
      --slo-quantile PCT  Share of SLOs that fleets are sized for; default: 99.95.
      --headroom PCT  Room above what is needed; default: 10.
      --squash TIME  A first token so much too late is given up; default: 60s.
    Forecast:
      --past TIME  So much of the trace is what the first fleet is sized by, and is not replayed;
          default: that fleet is sized by the trace's peak, with hindsight.
      --mispredicted PCT  Requests whose output is predicted one length too short or too long;
          default: 5.
      --underestimated PCT  Of these, the share that is predicted too short; default: 50.
      --seed N  Of what is drawn.
    Start-up and clocks:
      --ready NAME[,NAME...]  What is ready before an instance is needed: vm (machines are booted,
          90 s less), weights (on their disks, 180 s less), snapshot (of the engine's state, 138 s
          less).
      --clock-delay TIME  A clock comes so long after it is asked for, as in 30ms or 30
          (milliseconds); default: 30ms.
    Money:
      --start TIME  When the trace begins, for files of rates over time.
    """,
    load_factor=NUMBER.within(1e-6, 100),
    pools=COUNT.within(1, 9),
    epoch=TIME.plainly("min").within(1, 6e7),
    slo_quantile=PERCENT.within(0.01, 99.9999),
    headroom=PERCENT.within(0, 1e4),
    past=TIME.plainly("min"),
    mispredicted=PERCENT.within(0, 100),
    underestimated=PERCENT.within(0, 100),
    seed=WHOLE.within(0, 2**63 - 1),
    ready=_ready,
    clock_delay=TIME.plainly("ms"),
    start=None,
)
class ReplayOptions(Settings, RateOptions):
    """A trace, and how its replay is run."""

    trace: str = "azure-2023-conversation"
    load_factor: float = 1.0
    start: str | None = None
    plot: Path | None = None

    @cached_property
    def known(self) -> Mapping[str, Rate]:
        """Price and carbon over the trace, as far as they are given."""
        return self.rates(start=self.start, repeats=True)

    def run(
        self,
        service: ServiceOptions,
        names: Sequence[str],
        left_out: Callable[[str], None] | None = None,
    ) -> tuple[Trace, str, list[Simulation]]:
        """Replay the trace under some policies, and draw what --plot asks for.

        It warns of requests that no fleet could answer in time. `left_out` as compare_policies.

        Returns:
            The trace, a title for its results, and these.
        """
        from envplan.serving.policies import compare_policies
        from envplan.serving.trace import Trace

        profile, trace, _ = service.known, Trace.open(self.trace), self.known
        if self.load_factor != 1:
            trace = trace.scaled(self.load_factor, self.seed)
        with ui.Working(f"policies on {trace.name}") as work:
            results = compare_policies(
                profile, trace, self, policies=names, progress=work.counted, left_out=left_out
            )
        first = results[0]
        if first.hopeless > (1 - self.slo_quantile / 100) * first.requests:
            ui.warn(
                f"{first.hopeless} of {first.requests} requests "
                f"({100 * first.hopeless / first.requests:.3g}%) miss their SLOs on any fleet: "
                "their prompts alone take longer than the time to the first token; fleets are "
                "sized for the others. Longer SLOs: --slo-scale, --slo"
            )
        made = " (real-shaped)" if (trace.made or "").startswith("real-shaped") else ""
        source = "" if profile.source in (None, "measured") else f" ({profile.source})"
        title = f"{trace.name}{made} on {profile.name}{source}"
        ui.draw(
            self.plot,
            lambda: pictures.over_time_figure(results, title),
            lambda: pictures.comparison_page(results, title, profile.source),
        )
        return trace, title, results

    def costs(self, result: Simulation) -> dict[str, float]:
        """What a result costs by the rates that are given."""
        site, found = self.overheads(), {}
        spent = {kind: result.at_rate(rate, site) for kind, rate in self.known.items()}
        if "price" in spent or site.gpu_hour:
            hours = site.hours_cost(3600.0, 1) * result.gpu_hours
            found[self.currency or "money"] = spent.get("price", 0.0) + hours
        if "carbon" in spent:
            found["carbon_g"] = spent["carbon"] + site.made_g(3600.0, 1) * result.gpu_hours
        return found

    def document(self, result: Simulation) -> dict[str, Any]:
        """A result for --json."""
        return ui.picked(result, _RESULT) | self.costs(result)


@cmd.takes(
    """
    Most used:
      --load TOKENS/S  The load to show energies at; default: 2000.
      --plot [FILE]  Draw energies over clocks: .png, .svg or .pdf; without a name:
          serving-profile.png.
    Output:
      -o, --output FILE  Write the profile there: .csv.
    """,
    load=NUMBER.within(1e-6, 1e9),
)
def profile(
    service: ServiceOptions,
    load: float = 2000.0,
    output: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Show what requests cost, by parallelism and clock.

    Energies are per request, and blank where the SLO is violated.

    \b
    Example:
      envplan serving profile
      envplan serving profile h100-llama2-70b -o my.csv
      envplan serving profile my.csv --load 1000 --plot
    """
    known = service.known
    if output is not None:
        known.save_copy(output)
    ui.draw(plot, lambda: pictures.serving_profile_figure(known, load))
    document = {
        **ui.picked(known, "name gpu model source modelled sha256"),
        "load_tokens_s": load,
        "classes": {name: each.model_dump() for name, each in known.classes.items()},
        "configurations": [
            {
                "class": name,
                "tp": curve.tp,
                "frequency_mhz": curve.frequency_mhz,
                "capacity_tokens_s": curve.capacity(each.slo),
                "max_load_tokens_s": curve.max_load,
                "energy_per_request_j": known.energy_per_request(curve, load)
                if curve.meets(each.slo, load)
                else None,
            }
            for name, each in known.classes.items()
            for curve in known.of(name)
        ],
    }
    ui.answer(
        lambda: document, lambda: _print_profile(known, document),
        then=["envplan", "serving", "solve", "--load", "SS=20000,MM=8000"],
    )  # fmt: skip


def _print_profile(profile: ServingProfile, document: Mapping[str, Any]) -> None:
    facts = [text for text in (profile.model, profile.gpu, profile.source) if text]
    modelled = [f"modelled: {profile.modelled}"] if profile.modelled else []
    ui.say(profile.name + (f" ({', '.join(facts)})" if facts else ""), *modelled)
    names = [name for name in profile.classes if profile.of(name)]
    slos = [profile.classes[name].slo for name in names]
    columns: dict[str, list[Any]] = {
        "class": names,
        "TTFT (s)": [f"{slo.ttft_s:g}" for slo in slos],
        "TBT (s)": [f"{slo.tbt_s:g}" for slo in slos],
    }
    for known in sorted(document["configurations"], key=lambda c: (c["tp"], c["frequency_mhz"])):
        header, energy = f"TP{known['tp']} {known['frequency_mhz']}", known["energy_per_request_j"]
        column = columns.setdefault(header, [None] * len(names))
        column[names.index(known["class"])] = energy and f"{energy / 3600:.2f}"
    title = f"Energy per request (Wh) at {document['load_tokens_s']:g} tokens/s per instance"
    ui.print_columns(f"{title}, by TP and MHz", columns)


@cmd.takes(
    """
    Most used:
      --load CLASS=TOKENS/S[,...]  Tokens per second of each class, as in SS=2000,LL=500. May be
          repeated.
      --plot [FILE]  Draw the pools: .png, .svg or .pdf; without a name: serving-plan.png.
    Fleet:
      --gpus N  GPUs of the fleet.
      --planner NAME  exact or hierarchical.
      --no-merge  Every class in a pool of its own.
      --one-frequency  One clock for a pool's instances with the same TP.
      --time-limit TIME  For the exact planner; then the gap is stated. Default: 6s.
    Output:
      -o, --output FILE  Where the plan goes.
    """,
    planner=cmd.one_of("exact", "hierarchical"),
    time_limit=TIME.within(0.1),
)
def solve(
    service: ServiceOptions,
    load: list[str] | None = None,
    gpus: int = 1024,
    planner: str = "exact",
    no_merge: bool = False,
    one_frequency: bool = False,
    time_limit: float = 6.0,
    output: Path = Path("serving-plan.json"),
    plot: Path | None = None,
) -> None:
    """Find the fleet of least power that keeps its SLOs.

    \b
    Example:
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving solve --load LL=9000 --planner hierarchical --plot
    """
    from envplan.serving.planners import exact_plan, hierarchical_plan

    loads = dict[str, float]()
    parts = [part for text in load or [] for part in text.split(",")]
    for name, value in _by_class(parts, f"--load must be {_LOAD}"):
        if name in loads:
            raise InputError(f"--load gives {name} twice")
        loads[name] = NUMBER.parse(value, f"--load {name}")
    if not loads:
        raise InputError(f"which load? Give --load {_LOAD}")
    if planner == "hierarchical" and one_frequency:
        raise InputError("--one-frequency goes with planner exact, not hierarchical")
    exact: Any = {"one_frequency": one_frequency, "time_limit": time_limit}
    with ui.Working("looking for the least power"):
        find, how = (exact_plan, exact) if planner == "exact" else (hierarchical_plan, {})
        plan = find(service.known, loads, gpus, merge=not no_merge, **how)
    plan.save(output)
    ui.draw(plot, lambda: pictures.plan_figure(plan))
    ui.answer(
        lambda: {"plan": str(output), **plan.model_dump(by_alias=True)},
        lambda: _print_plan(plan),
        then=["envplan", "serving", "apply", str(output)],
    )  # fmt: skip


def _print_plan(plan: ServingPlan) -> None:
    headers = ("classes", "pool", "instances", "on", "MHz", "tokens/s", "W", "TTFT (s)", "TBT (s)")
    rows = [
        [" + ".join(pool.classes), pool.request_class, str(group.instances), f"TP{group.tp}",
         str(group.frequency_mhz), f"{group.load_tokens_s:.0f}", f"{group.power_w:.0f}",
         f"{group.ttft_s:.3f}", f"{group.tbt_s:.3f}"]
        for pool in plan.pools for group in pool.groups
    ]  # fmt: skip
    title = ui.titled(f"{plan.planner} plan, figures per instance", plan.profile.source)
    ui.print_table(title, headers, rows, words=2)
    predicted = plan.predicted
    ui.say(f"{predicted.gpus} of {plan.asked.gpus} GPUs, {predicted.power_w:.6g} W in all")
    if predicted.gap is not None:
        proved = "proved optimal" if predicted.gap <= 1e-5 else "the best found in time"
        ui.say(f"{proved}, certified gap {100 * predicted.gap:.4f}%")
    elif plan.planner == "exact":
        ui.say("the best found in time, with no proof of how near to the optimum it is")
    if predicted.baseline is not None and predicted.savings_percent is not None:
        ui.say(
            f"at maximum frequency on the highest TP: {predicted.baseline.gpus} GPUs, "
            f"{predicted.baseline.power_w:.6g} W; saved {predicted.savings_percent:.1f}%"
        )


@cmd.takes(
    """
    Most used:
      --policy NAME  One of those that `serving compare` names.
    Output:
      -o, --output FILE  Write what happens over time: .csv.
    """,
)
def simulate(
    service: ServiceOptions,
    replay: ReplayOptions,
    policy: str = "envplan",
    output: Path | None = None,
) -> None:
    """Replay a trace under one policy, request by request.

    Says how much energy the fleet uses, how many SLOs it meets, and how often it changes.

    \b
    Example:
      envplan serving simulate --trace azure-2023-conversation
      envplan serving simulate --trace azure-2023-code --policy static -o hour.csv --plot
      envplan serving simulate --trace AzureLLMInferenceTrace_code.csv.gz --price 0.12 --carbon 380
    """
    # A picture has the baseline in it.
    names = [policy] if replay.plot is None or policy == _BASELINE else [_BASELINE, policy]
    trace, title, (*_, result) = replay.run(service, names)
    if output is not None:
        import pandas as pd

        table = pd.DataFrame(result.series).to_csv(index=False, float_format="%.10g")
        atomic_write(output, table)

    def tell() -> None:
        ui.say(f"{policy}: {title}, {result.duration_s / 3600:.3g} hours")
        costs = {name: f"{value:.6g}" for name, value in replay.costs(result).items()}
        ui.print_table("", ("", "in all"), list({**pictures.figures(result), **costs}.items()))

    named = {"trace": trace.name, "profile": service.known.name}
    ui.answer(
        lambda: replay.document(result) | named, tell,
        then=["envplan", "serving", "compare", "--trace", replay.trace],
    )  # fmt: skip


@cmd.takes(
    """
    Most used:
      --policies NAME[,NAME...]  Only these, savings against the first; default: SinglePool,
          MultiPool, ScaleInst, ScaleShard, ScaleFreq, DynamoLLM, static, exact, envplan.
    """
)
def compare(service: ServiceOptions, replay: ReplayOptions, policies: str | None = None) -> None:
    """Set all policies side by side on one trace.

    Each is replayed request by request.

    \b
    Example:
      envplan serving compare --trace azure-2023-code
      envplan serving compare --trace AzureLLMInferenceTrace_conv.csv.gz --gpus 256 --plot
      envplan serving compare --trace azure-2023-conversation --policies SinglePool,envplan --plot
    """
    from envplan.serving.policies import POLICIES

    names = tuple(POLICIES) if policies is None else tuple(map(str.strip, policies.split(",")))
    if len(set(names)) < len(names):
        raise InputError(f"--policies names a policy twice: {policies}")
    trace, title, results = replay.run(service, names, ui.warn)

    def document() -> dict[str, Any]:
        return {
            "trace": trace.name,
            "made": trace.made,
            "profile": service.known.name,
            "source": service.known.source,
            "policies": [
                replay.document(r) | {"savings_percent": r.saved_percent(results[0])}
                for r in results
            ],
        }

    def tell() -> None:
        ui.print_table(title, *pictures.comparison_table(results))
        costs = [replay.costs(result) for result in results]
        if costs[0]:
            columns = {key: [f"{one[key]:.6g}" for one in costs] for key in costs[0]}
            ui.print_columns("", {"policy": [one.policy for one in results], **columns})
        ui.say(*(f"{one.policy}: {POLICIES[one.policy].about}" for one in results))

    ui.answer(document, tell,
           then=["envplan", "serving", "simulate", "--trace", replay.trace, "--plot"])  # fmt: skip


@cmd.takes(
    """
    Most used:
      PLAN  The plan of `envplan serving solve`.
    Fleet:
      --gpus-per-node N  GPUs of a machine.
      --clocks MHZ[,MHZ...]  Clocks the GPUs have, as in 210-1410:15; default: those of the
          profile's GPU.
    Output:
      -o, --output FILE  Where the clocks go.
    """
)
def apply(
    plan: Path = Path("serving-plan.json"),
    profile: str | None = None,
    gpus_per_node: int = 8,
    clocks: str | None = None,
    force: bool = False,
    output: Path = Path("serving.clocks.json"),
) -> None:
    """Put a plan's instances on nodes and GPUs.

    Each has its parallelism and its clock. `envplan serving hold` holds these clocks on a node.

    \b
    Example:
      envplan serving apply serving-plan.json
      envplan serving apply --gpus-per-node 16 -o fleet.clocks.json
    """
    from hashlib import sha256

    from envplan.enforce.clocks import given_clocks
    from envplan.serving.apply import apply_serving_plan
    from envplan.serving.plan import ServingPlan

    loaded = ServingPlan.load(plan)
    known = loaded.find_profile(profile)
    cmd.refuse_overwriting(known.path, known.sidecar)
    applied = apply_serving_plan(
        loaded, known, clocks=given_clocks(clocks) if clocks is not None else None,
        gpus_per_node=gpus_per_node, force=force, plan_sha256=sha256(plan.read_bytes()).hexdigest(),
    )  # fmt: skip
    applied.save(output)
    if unproven := [i for i in applied.instances if not i.slo_proven]:
        numbers = ", ".join(str(i.instance) for i in unproven[:_MOST_NAMED])
        more = ", ..." if len(unproven) > _MOST_NAMED else ""
        ui.warn(
            f"at {unproven[0].clock_mhz} MHz, slower than planned, the profile does not prove the "
            f"SLO of instances {numbers}{more} ({len(unproven)} of {len(applied.instances)}); "
            "measure that clock, then solve again"
        )

    def tell() -> None:
        used = counted(sum(instance.tp for instance in applied.instances), "GPU")
        ui.say(
            f"{counted(len(applied.instances), 'instance')} on {used} of "
            f"{counted(applied.nodes, 'node')}"
        )
        for asked, given in sorted({(i.planned_mhz, i.clock_mhz) for i in applied.instances}):
            if asked != given:
                ui.say(f"{asked} MHz becomes {given} MHz, which {applied.gpu or 'the GPU'} has")

    ui.answer(
        lambda: {"clocks": str(output), **applied.model_dump(by_alias=True)}, tell,
        last="on each node K", then=["envplan", "serving", "hold", str(output), "--node", "0"],
    )  # fmt: skip


@cmd.takes(
    """
    Output:
      -o, --output FILE  Where the new fleet goes; default: AFTER.
    """
)
def reshard(
    before: Path = cmd.argument("BEFORE", "What `envplan serving apply` wrote before."),
    after: Path = cmd.argument("AFTER", "What it wrote for the new fleet.", in_place=True),
    output: Path | None = None,
) -> None:
    """Put a new fleet where an old one's weights are.

    Says which GPU sends which part of the weights to which. Nodes and GPUs of AFTER are chosen
    anew, such that the fewest weights are moved.

    \b
    Example:
      envplan serving reshard old.clocks.json new.clocks.json
    """
    from envplan.serving.apply import PARTS, ServingApplied, move_fleet

    target = output or after
    if output is None:
        cmd.will_write(target)
    moved, changes = move_fleet(ServingApplied.load(before), ServingApplied.load(after))
    moved.save(target)
    sent = [
        {"node": change.node, **one._asdict()}
        for change in changes
        for one in (change.plan.transfers if change.plan else ())
    ]
    copies = len(sent) / PARTS

    def tell() -> None:
        rows = []
        for node, *fleets, plan in changes:
            sizes = [" + ".join(f"TP{n}" for n in tps) or "-" for tps in fleets]
            moves = [str(len(plan.transfers)), str(plan.longest)] if plan else ["-", "-"]
            rows.append([str(node), *sizes, *moves])
        ui.print_table(
            "Eighths of the weights that GPUs send each other",
            ("node", "before", "after", "sent", "one after another"), rows, words=3,
        )  # fmt: skip
        line = "node {node}: GPU {source} sends eighth {part} to GPU {target}"
        ui.say(*(line.format(**one) for one in sent), f"{copies:g} copies of the weights in all")

    ui.answer(
        lambda: {"clocks": str(target), "moved_copies": copies, "transfers": sent}, tell,
        then=["envplan", "serving", "hold", str(target), "--node", "0"],
    )  # fmt: skip


@cmd.takes(
    """
    Most used:
      FILE  What `envplan serving apply` wrote.
    Fleet:
      --node K  Which node this is, from 0.
      --backend NAME  nvml: this machine's GPUs; modelled: none needed.
      --seconds TIME  So long; default: until interrupted.
    """,
    node=WHOLE,
)
def hold(
    file: Path = Path("serving.clocks.json"),
    node: int = 0,
    backend: str = "nvml",
    seconds: float | None = None,
) -> None:
    """Hold the clocks of this node's GPUs until interrupted.

    Then they are given back. A guard for each GPU sets its clock, and gives it back however this
    process ends.

    \b
    Example:
      envplan serving hold serving.clocks.json --node 0
      envplan serving hold --backend modelled --seconds 1
    """
    from envplan.devices.modelled import GPUS
    from envplan.serving.apply import ServingApplied, hold_clocks

    applied = ServingApplied.load(file)
    options: dict[str, Any] = {}
    if backend == "modelled":
        key = next((m.key for m in GPUS.values() if m.name == applied.gpu), "h100-sxm")
        options = {"gpu": key, "count": applied.gpus_per_node}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),  # the usual end of holding
        hold_clocks(applied, node, backend=backend, **options) as guards,
        suppress(KeyboardInterrupt),
    ):
        if not (state.quiet or state.json):
            for device, mhz in sorted(applied.clocks_of(node).items()):
                ui.say(f"GPU {device}: {mhz} MHz")
        _watch(guards, math.inf if seconds is None else time.monotonic() + seconds)
    held = {"node": node, "clocks_mhz": applied.clocks_of(node), "given_back": True}
    ui.answer(lambda: held, lambda: ui.say("clocks given back"), then="envplan devices")


def _watch(guards: Sequence[Guard], end: float) -> None:
    """Wait until a time of the monotonic clock, s, and pass on what goes wrong meanwhile.

    Raises:
        DeviceError: a guard is gone, or a clock could not be set in the end either.
    """
    said = ""
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left))
        for guard in guards:
            for said in guard.problems():
                print(f"envplan: warning: {said}", file=sys.stderr, flush=True)
            if not guard.alive:
                raise DeviceError("a clock guard has ended; start holding again")
    if any(guard.failing for guard in guards):
        raise DeviceError(said)


serving = cmd.group(
    """Plan clocks, parallelism and instance counts of inference fleets, within latency SLOs.

    \b
    Example:
      envplan serving profile
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving apply serving-plan.json
      envplan serving compare --trace azure-2023-code --plot
    """,
    {
        command.__name__: command
        for command in (profile, solve, simulate, compare, apply, reshard, hold)
    },
)
