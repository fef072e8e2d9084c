"""The costs of a plan, in money and carbon, and their proof."""

from __future__ import annotations

from typing import Final, NamedTuple

from envplan._io.documents import check_stated
from envplan.costs.model import Costs, Run, TimeAndEnergy
from envplan.costs.pricing import compare_costs
from envplan.errors import InputError
from envplan.frontier import Relaxation
from envplan.plan.model import Plan
from envplan.units import ns_from_s, ns_from_s_floor, s_from_ns

#: How far a stated cost may lie from its recomputation.
_TOLERANCE: Final = 1e-9


def priced(plan: Plan, run: Run, straggler_s: float | None = None) -> Plan:
    """The plan, with what it costs; where it waits for a straggler, until that has finished.

    Args:
        straggler_s: when the straggler has finished, s; default: what the plan's request says.

    Raises:
        InputError: a rate ends before the run does.
    """
    iterations = before_and_after(plan, straggler_s)
    compared = compare_costs(iterations.max_frequency, iterations.plan, run, plan.job.all_gpus)
    fields = run.model_dump(exclude={"minimize"})
    fields["minimized"] = run.minimized if run.deadline_s is not None else None
    costs = Costs(**fields, iteration=compared.iteration, run=compared.run)
    return plan.model_copy(update={"costs": costs})


class BeforeAndAfter(NamedTuple):
    """Time and energy of an iteration at maximum frequency, and by a plan."""

    max_frequency: TimeAndEnergy
    plan: TimeAndEnergy


def before_and_after(plan: Plan, straggler_s: float | None = None) -> BeforeAndAfter:
    """Time and energy of an iteration at maximum frequency, and by the plan.

    Where there is a straggler, both last until it has finished.

    Args:
        straggler_s: as for priced.
    """
    if straggler_s is None:
        straggler_s = plan.request.straggler_time_s
    baseline, until_s = plan.predicted.baseline, straggler_s or 0.0
    return BeforeAndAfter(
        max_frequency=plan.until(until_s, baseline.iteration_time_s, baseline.energy_j),
        plan=plan.until(until_s, plan.iteration_time, plan.energy),
    )


def check_costs(plan: Plan) -> list[str]:
    """Prove the costs in a plan from its rates, time and energy.

    Returns:
        A sentence for what was proved; none where the plan has no costs.

    Raises:
        InputError: the first number that is not so.
    """
    costs = plan.costs
    if costs is None:
        return []
    iterations, run = before_and_after(plan), costs.of_run()
    expected = compare_costs(iterations.max_frequency, iterations.plan, run, plan.job.all_gpus)
    check_stated("costs.iteration", costs.iteration, expected.iteration, _TOLERANCE)
    check_stated("costs.run", costs.run, expected.run, _TOLERANCE)
    proved = ["costs follow from the plan's time and energy and the rates in the file"]
    if costs.deadline_s is not None and costs.iterations is not None:
        run_ns = ns_from_s(iterations.plan.time_s) * costs.iterations
        duration = f"{costs.iterations} iterations take {s_from_ns(run_ns)!r} s"
        if run_ns > ns_from_s_floor(costs.deadline_s):
            raise InputError(f"{duration}, more than the deadline of {costs.deadline_s!r} s")
        proved.append(f"{duration} <= deadline {costs.deadline_s!r} s")
    return proved


def tokens_per_iteration(frontier: Relaxation) -> int:
    """Tokens of one iteration over all replicas, from what the profile's sidecar says.

    Microbatch size x sequence length x microbatches x replicas.

    Raises:
        InputError: the sidecar does not say microbatch_size or sequence_length.
    """
    metadata = frontier.profile.metadata
    size, length = metadata.microbatch_size, metadata.extra.get("sequence_length")
    if size is None or not isinstance(length, int) or not 0 < length < 2**31:
        raise InputError(
            f"how many tokens has an iteration? Give --tokens-per-iteration (the sidecar of "
            f"profile {frontier.profile.name} does not say "
            f"{'microbatch_size' if size is None else 'sequence_length'})"
        )
    return size * frontier.pipeline.num_microbatches * frontier.replicas * length
