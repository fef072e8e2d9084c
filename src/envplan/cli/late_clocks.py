"""How late the GPU's clocks come, what that does to a plan, and how often a plan changes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import envplan
from envplan._io.words import signed_percent
from envplan.devices.modelled import PublishedLatency, gpu
from envplan.errors import InputError, NoAnswerError
from envplan.replay import Ask, Machine
from envplan.request.limits import MinDwell
from envplan.units import j_from_10fj, ns_from_s, s_from_ns

#: Changes of clock this often were reported to slow NCCL down (NCCL#1551), s.
_FREQUENT_S: Final = 0.05
#: Up to so many operations the plan whose clocks last that long is made, to say what it costs.
_MAX_OPERATIONS_TO_PLAN_AGAIN: Final = 100
#: Up to so many operations a plan is replayed with late clocks.
_MAX_OPERATIONS_TO_REPLAY: Final = 50_000


def late_clocks(profile: envplan.Profile, plan: envplan.Plan) -> Iterator[str]:
    """Where the plan's switch latency is from, or what a known one does to a plan without one."""
    latency_ns = plan.job.machine.latency_ns
    measured_s = profile.measured_latency_s
    if measured_s is not None:
        if latency_ns == ns_from_s(measured_s):
            yield (
                f"that latency is the profile's: {1e3 * measured_s:.3g} ms, the largest median "
                "measured on its GPU; --switch-latency 0 plans for clocks that come at once"
            )
        elif not latency_ns:
            yield (
                "clocks are taken to come at once, but on the profile's GPU they were measured to "
                f"come {1e3 * measured_s:.3g} ms late"
            )
        return
    published = _published_latency(profile)
    if published is None or latency_ns or not plan.clock_changes:
        return
    line = f"clocks are taken to come at once; published, not measured here: {published}"
    if sum(map(len, plan.stages)) <= _MAX_OPERATIONS_TO_REPLAY:
        ahead = _effect(profile, plan, published.most_ms / 1e3, "ahead")
        at_start = _effect(profile, plan, published.most_ms / 1e3, "start")
        line += (
            f"; {published.most_ms:g} ms would add {ahead} where clocks are asked for ahead, "
            f"{at_start} where as operations start"
        )
    yield f"{line} (envplan devices --measure-latency measures it)"


def _published_latency(profile: envplan.Profile) -> PublishedLatency | None:
    """The literature's latency for the profile's GPU, of several the longest; None: it has none."""
    metadata = profile.metadata
    names = metadata.stage_gpus or ((metadata.gpu,) if metadata.gpu else ())
    published = []
    for name in names:
        try:
            latency = gpu(name).published_latency
        except InputError:  # a GPU that we do not know
            continue
        if latency is not None:
            published.append(latency)
    return max(published, key=lambda latency: latency.most_ms, default=None)


def _effect(profile: envplan.Profile, plan: envplan.Plan, latency_s: float, ask: Ask) -> str:
    """Time and energy that late clocks add to a plan made for clocks at once."""
    from envplan.plan import replay_plan
    from envplan.profile import Adjustments

    profile = profile.with_adjustments(plan.profile.adjustments or Adjustments())
    replay = replay_plan(plan, profile, machine=Machine(ns_from_s(latency_s), ask))
    late_energy_j = j_from_10fj(replay.energy_10fj * plan.job.num_gpus)
    time = signed_percent(100 * (s_from_ns(replay.makespan_ns) / plan.iteration_time - 1))
    energy = signed_percent(100 * (late_energy_j / plan.energy - 1))
    return f"{time}% time and {energy}% energy"


def frequent_changes(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """A warning of clocks that change so often that collectives may suffer, with the remedy."""
    changes = max(plan.clock_changes_by_stage)
    if changes * _FREQUENT_S <= plan.iteration_time:
        return
    every_ms = 1e3 * plan.iteration_time / changes
    line = (
        f"a rank changes clocks every {every_ms:.3g} ms on average; on some systems changes every "
        "50 ms slowed NCCL down (NCCL#1551)"
    )
    yield f"{line}: {_cost_of_lasting_clocks(frontier, plan)}"


def _cost_of_lasting_clocks(frontier: envplan.Frontier, plan: envplan.Plan) -> str:
    """What the same plan with clocks that last 50 ms would cost, where that is soon known."""
    option = f"--min-dwell {1e3 * _FREQUENT_S:g}ms"
    request = plan.request
    is_small = len(frontier.pipeline.operations) <= _MAX_OPERATIONS_TO_PLAN_AGAIN
    if not is_small or request.effort.polish_s or plan.planner != "frontier":
        return f"{option} holds them for longer"
    others = tuple(limit for limit in request.limits if not isinstance(limit, MinDwell))
    limits = (*others, MinDwell.of(time_s=_FREQUENT_S))
    effort = request.effort.model_copy(update={"ladder": 0})
    update = {"limits": limits, "run": None, "effort": effort}
    if request.objective == "cost":
        return f"{option} holds them for longer"
    try:
        lasting = frontier.solve(request.model_copy(update=update), doubts=False)
    except NoAnswerError:
        return f"no plan with {option} was found for this target"
    time = signed_percent(100 * (lasting.iteration_time / plan.iteration_time - 1))
    energy = signed_percent(100 * (lasting.energy / plan.energy - 1))
    return f"{option} would cost {energy}% energy at {time}% time"
