"""Which iterations of a profiled job count, and at which clock."""

from __future__ import annotations

from envplan.runtime.clock_sweep import ClockSweep, IterationUse


def sweep(warm_up: int = 0) -> ClockSweep[int]:
    return ClockSweep([1740, 1500], iterations_per_frequency=2, warm_up=warm_up)


def run(clock_sweep: ClockSweep[int], *uses: IterationUse) -> list[tuple[int | None, list[int]]]:
    """The windows of iterations with these uses, which are numbered."""
    windows = [clock_sweep.record(use, number) for number, use in enumerate(uses)]
    return [(window.frequency_mhz, window.iterations) for window in windows if window is not None]


def use(clock_sweep: ClockSweep[int], **state: bool) -> IterationUse:
    return clock_sweep.classify(**{"has_problem": False, "is_clock_pending": False, **state})


def test_warm_up_and_what_follows_a_change_of_clock_do_not_count() -> None:
    clock_sweep = sweep(warm_up=1)
    uses = []
    for number in range(7):
        uses.append(use(clock_sweep))
        clock_sweep.record(uses[-1], number)
        if clock_sweep.is_finished:
            break
    settling, measured = IterationUse.SETTLING, IterationUse.MEASURED
    assert uses == [settling, measured, measured, settling, measured, measured]
    assert clock_sweep.is_finished
    assert clock_sweep.frequency_mhz is None


def test_each_clock_gets_its_iterations() -> None:
    clock_sweep = sweep()
    windows = run(clock_sweep, *[IterationUse.MEASURED] * 4)
    assert windows == [(1740, [0, 1]), (1500, [2, 3])]


def test_a_clock_on_its_way_is_waited_for_and_settles() -> None:
    clock_sweep = sweep()
    assert use(clock_sweep, is_clock_pending=True) is IterationUse.CHANGING
    clock_sweep.record(IterationUse.CHANGING, 0)
    assert use(clock_sweep) is IterationUse.SETTLING


def test_a_spoiled_window_starts_again_and_its_clock_is_passed_over_after_three() -> None:
    clock_sweep = sweep()
    assert use(clock_sweep, has_problem=True, is_clock_pending=True) is IterationUse.SPOILED
    measured, spoiled = IterationUse.MEASURED, IterationUse.SPOILED
    assert run(clock_sweep, measured, spoiled, measured, measured) == [(1740, [2, 3])]
    assert run(clock_sweep, spoiled, spoiled) == []
    assert clock_sweep.frequency_mhz == 1500
    run(clock_sweep, spoiled)
    assert clock_sweep.is_finished


def test_an_evaluation_starts_the_window_again() -> None:
    clock_sweep = sweep()
    clock_sweep.record(IterationUse.MEASURED, 0)
    clock_sweep.interrupt()
    assert use(clock_sweep) is IterationUse.SETTLING
    assert run(clock_sweep, *[IterationUse.MEASURED] * 2) == [(1740, [0, 1])]
