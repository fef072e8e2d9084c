from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan.enforce.apply import apply_plan
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.supported_clocks import modelled_clocks, parse_clocks, profile_clocks
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan, Target, build_plan
from envplan.profile import OptionTable, Profile, ProfileMetadata
from envplan.solve import trace_frontier
from envplan.units import ENERGY_UNITS_PER_J, in_10fj, ns_from_s, ns_from_s_floor
from strategies import pipelines, profiles

CLOCKS = (1740, 1500, 1260, 1020, 780)


def planned(
    pipeline: Pipeline, profile: Profile, rows: list[int], deadline: float = 1e6, **gpus: int
) -> Plan:
    """A plan that says to use these rows of the option tables."""
    frontier = trace_frontier(pipeline, profile, **gpus)
    replay = frontier.problem.replay(np.array(rows, np.int32))
    target = Target(kind="max-frequency", deadline_s=deadline)
    return build_plan(frontier, replay, target=target, planner="max_frequency")


def at(profile: Profile, pipeline: Pipeline, clocks: list[int], **changes: Any) -> Plan:
    """A plan with these clocks, MHz, one for each operation."""
    rows = [
        table.frequency_mhz.tolist().index(mhz)
        for table, mhz in zip(option_tables(pipeline, profile), clocks, strict=True)
    ]
    return planned(pipeline, profile, rows, **changes)


def option_tables(pipeline: Pipeline, profile: Profile) -> list[OptionTable]:
    return [profile.table(op.profile_stage, op.instruction) for op in pipeline.operations]


def applied(plan: Plan, profile: Profile, **options: Any) -> FrequencyPlan:
    return apply_plan(plan, profile, topology=Topology.for_job(plan.job), **options)


def flat(freqplan: FrequencyPlan) -> list[int]:
    return [operation[3] for stage in freqplan.stage_operations() for operation in stage]


def replayed(
    freqplan: FrequencyPlan, pipeline: Pipeline, profile: Profile
) -> tuple[list[int], int]:
    """Times of all operations and the makespan, ns, from the file and the profile.

    A clock the profile does not know is as slow as the highest one below that it does.
    """
    times = []
    for table, mhz in zip(option_tables(pipeline, profile), flat(freqplan), strict=True):
        known = {int(m): int(t) for m, t in zip(table.frequency_mhz, table.time_ns, strict=True)}
        times.append(known[max(m for m in known if m <= mhz)])
    return times, pipeline.earliest_starts(np.array(times, np.int64))[1]


@st.composite
def plans(draw: Any) -> tuple[Plan, Profile, Pipeline]:
    """Any pipeline with any choice of options, from profiles as noisy as can be."""
    pipeline = draw(pipelines(max_stages=3, max_microbatches=4))
    profile = draw(profiles(pipeline.num_profile_stages))
    rows = [draw(st.integers(0, len(table) - 1)) for table in option_tables(pipeline, profile)]
    gpus, replicas = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    plan = planned(pipeline, profile, rows, gpus_per_stage=gpus, replicas=replicas)
    target = plan.target.model_copy(update={"deadline_s": plan.iteration_time})
    return plan.model_copy(update={"target": target}), profile, pipeline


@given(
    made=plans(),
    clocks=st.one_of(st.none(), st.sets(st.integers(150, 400), min_size=1, max_size=12)),
)
def test_no_operation_gets_slower_and_the_deadline_is_met(
    made: tuple[Plan, Profile, Pipeline], clocks: set[int] | None
) -> None:
    plan, profile, pipeline = made
    given = None if clocks is None else parse_clocks(",".join(map(str, clocks)))
    try:
        freqplan = applied(plan, profile, clocks=given)
    except InputError:
        assume(False)
    times, makespan = replayed(freqplan, pipeline, profile)
    operations = [operation for stage in plan.stages for operation in stage]
    for operation, mhz, time in zip(operations, flat(freqplan), times, strict=True):
        assert mhz >= operation.frequency_mhz
        assert mhz in freqplan.supported_clocks_mhz
        assert time <= ns_from_s(operation.time_s)
    assert makespan <= ns_from_s_floor(plan.target.deadline_s)
    assert makespan == ns_from_s(freqplan.iteration_time_s)
    for first in freqplan.ranks:
        for second in freqplan.ranks:
            assert (first.stage == second.stage) <= (first.operations == second.operations)
    freqplan.check()


# Clocks


def test_supported_clocks_stay_as_planned() -> None:
    profile, pipeline = small_profile(), Pipeline("1f1b", 2, 4)
    frontier = trace_frontier(pipeline, profile)
    plan = frontier.plan(slowdown=0.05)
    freqplan = applied(plan, profile)
    assert [[op[3] for op in stage] for stage in freqplan.stage_operations()] == plan.frequencies
    assert freqplan.iteration_time_s == plan.iteration_time
    assert freqplan.energy_j == plan.energy
    assert freqplan.raised == []


def test_clock_the_gpu_lacks_becomes_the_next_one_above() -> None:
    profile, pipeline = small_profile(1), Pipeline("1f1b", 1, 2)
    plan = at(profile, pipeline, [1740, 1500, 1260, 1260])
    freqplan = applied(plan, profile, clocks=parse_clocks("1265,1500,1800", "X"))
    assert flat(freqplan) == [1800, 1500, 1265, 1265]
    raised = [(r.instruction, r.planned_mhz, r.applied_mhz, r.operations) for r in freqplan.raised]
    assert raised == [
        ("backward", 1260, 1265, 1),
        ("forward", 1260, 1265, 1),
        ("forward", 1740, 1800, 1),
    ]
    assert not any(r.profiled for r in freqplan.raised)
    assert freqplan.energy_j == plan.energy
    assert freqplan.gpu == "X"


def test_higher_clock_that_the_profile_knows_is_priced_by_it() -> None:
    profile, pipeline = small_profile(1), Pipeline("1f1b", 1, 1)
    slow, fast = at(profile, pipeline, [1500, 1500]), at(profile, pipeline, [1740, 1740])
    freqplan = applied(slow, profile, clocks=parse_clocks("780,1740"))
    assert all(r.profiled for r in freqplan.raised)
    assert freqplan.energy_j == fast.energy
    assert freqplan.iteration_time_s == fast.iteration_time


def test_higher_clock_that_was_measured_slower_is_passed_over() -> None:
    rows = [
        (0, instruction, mhz, time, 50.0)
        for instruction in ("forward", "backward")
        for mhz, time in ((1000, 0.10), (1015, 0.11), (1030, 0.09))
    ]
    profile, pipeline = Profile.from_rows(rows), Pipeline("1f1b", 1, 1)
    plan = at(profile, pipeline, [1000, 1000])
    assert flat(applied(plan, profile, clocks=parse_clocks("1015,1030"))) == [1030, 1030]
    with pytest.raises(InputError, match="by the profile none above it is as fast"):
        applied(plan, profile, clocks=parse_clocks("1015"))


def test_plan_for_a_faster_gpu_is_refused() -> None:
    profile, pipeline = small_profile(1), Pipeline("1f1b", 1, 1)
    plan = at(profile, pipeline, [1740, 1740])
    with pytest.raises(InputError, match="1740 MHz for forward 0 of stage 0, but the highest"):
        applied(plan, profile, clocks=modelled_clocks("v100"))


def test_operation_without_a_clock_is_left_alone() -> None:
    rows = [(0, "forward", mhz, 1740 / mhz / 100, mhz / 50) for mhz in (1500, 1740)]
    profile = Profile.from_rows([*rows, (0, "backward", 0, 0.01, 1.0)])
    pipeline = Pipeline("1f1b", 1, 3)
    plan = at(profile, pipeline, [1500, 0, 1740, 0, 1500, 0])
    freqplan = applied(plan, profile)
    assert flat(freqplan) == [1500, 0, 1740, 0, 1500, 0]
    assert freqplan.ranks[0].clocks_mhz == [1500, 1740]


@pytest.mark.parametrize(
    ("text", "mhz"),
    [("210", [210]), ("900,210, 900", [210, 900]), ("210-260:25,100", [100, 210, 235, 260])],
)
def test_clocks_are_listed_or_stepped(text: str, mhz: list[int]) -> None:
    assert parse_clocks(text).supported_clocks_mhz == mhz


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "1.5", "a", "900-210:15", "210-900", "210-900:0", "1-1000000:1", "٣"]
)
def test_anything_but_clocks_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--clocks must list MHz"):
        parse_clocks(text)


def test_gpu_is_found_by_either_name_and_else_the_profile_says_its_clocks() -> None:
    assert modelled_clocks("a40") == modelled_clocks("NVIDIA A40")
    assert modelled_clocks("a40").supported_clocks_mhz[-1] == 1740
    with pytest.raises(InputError, match="no modelled GPU 'b9000'"):
        modelled_clocks("b9000")
    own = profile_clocks(small_profile())
    assert own.supported_clocks_mhz == sorted(CLOCKS)
    assert (own.clocks_source, own.gpu) == ("profile", None)
    rows = [(0, name, 900, 0.1, 5.0) for name in ("forward", "backward")]
    a40 = Profile.from_rows(rows, metadata=ProfileMetadata(gpu="NVIDIA A40"))
    assert profile_clocks(a40) == modelled_clocks("a40")


# Ladder, ranks, refusals


def test_ladder_has_the_plans_rungs_with_clocks_checked() -> None:
    profile, pipeline = small_profile(), Pipeline("1f1b", 2, 4)
    frontier = trace_frontier(pipeline, profile)
    plan = frontier.plan().with_ladder(frontier.ladder(3))
    assert plan.ladder is not None
    freqplan = applied(plan, profile)
    assert freqplan.ladder is not None
    assert [r.frequencies_mhz for r in freqplan.ladder] == [r.frequencies_mhz for r in plan.ladder]
    assert [r.energy_j for r in freqplan.ladder] == [r.energy_j for r in plan.ladder]
    raised = applied(plan, profile, clocks=parse_clocks("1000-2000:500"))
    raised.check()
    assert raised.ladder is not None
    for rung, before in zip(raised.ladder, plan.ladder, strict=False):
        assert rung.iteration_time_s <= before.iteration_time_s or len(raised.ladder) < 3
    assert applied(plan, profile, ladder=False).ladder is None


@pytest.mark.parametrize("clocks", ["900-2000:100", "900-2000:300"])
def test_rungs_that_save_nothing_any_more_are_left_out(clocks: str) -> None:
    profile, pipeline = small_profile(), Pipeline("1f1b", 2, 4)
    frontier = trace_frontier(pipeline, profile)
    plan = frontier.plan().with_ladder(frontier.ladder(24))
    freqplan = applied(plan, profile, clocks=parse_clocks(clocks))
    assert freqplan.ladder
    rungs = [(freqplan.iteration_time_s, freqplan.energy_j)]
    rungs += [(rung.iteration_time_s, rung.energy_j) for rung in freqplan.ladder]
    above = [in_10fj(j) - plan.job.waiting_10uw * ns_from_s(s) for s, j in rungs]
    assert above == sorted(set(above), reverse=True)


def test_changed_profile_may_be_used_by_force_if_it_has_the_clocks() -> None:
    pipeline, old = Pipeline("1f1b", 2, 4), small_profile()
    plan = trace_frontier(pipeline, old).plan()
    new = small_profile(blocking=60.0)
    assert flat(applied(plan, new, force=True)) == flat(applied(plan, old))
    with pytest.raises(InputError, match="no row for forward on stage 0 at 1740 MHz"):
        applied(plan, small_profile(clocks=(1500, 900)), force=True)


def test_a_stage_may_use_more_joules_than_64_bits_hold() -> None:
    rows = [
        (stage, instruction, mhz, 20_000 / mhz, 6.0 * mhz)
        for stage in (0, 1)
        for instruction in ("forward", "backward")
        for mhz in (1000, 900)
    ]
    profile = Profile.from_rows(rows)
    plan = trace_frontier(Pipeline("1f1b", 2, 16), profile).plan()
    energies = applied(plan, profile).stage_energies
    assert energies is not None
    assert all(one.planned_j > 2**63 / ENERGY_UNITS_PER_J for one in energies)
    assert sum(one.planned_j for one in energies) == pytest.approx(plan.energy)
    before = plan.predicted.baseline.energy_j
    assert sum(one.baseline_j for one in energies) == pytest.approx(before)
