"""Numbers of instances that replays of the requests show to be enough.

The demand that observed_trace.py counts is an estimate. It is quick and never far too low, but too
high where a few prompts take nearly as long as their SLOs allow. So a pool that is sized by it is
tried with fewer and fewer instances, each time on all requests that it is sized for, until too many
miss their SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import FleetController
from envplan.serving.forecast import DemandForecast, ScaledWindow
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S

#: A window with more requests is not replayed. The more requests, the better the estimate is.
MAX_REPLAYED_REQUESTS: Final = 25_000
#: Half as many instances again do not help if more than this share of late requests stays late.
_NO_HELP_SHARE: Final = 0.9


@dataclass(frozen=True, eq=False)
class PoolTrial:
    """The requests of one window that go to a pool, as fast as the pool must bear them.

    Hopeless requests, whose prompts alone take longer than their SLOs, count neither as late nor
    among those of which a share may be late.

    Attributes:
        observed: the requests, from 0 s on, and the performance of instances of the pool's size.
        settings: of the simulation.
    """

    observed: ObservedTrace
    settings: Settings

    @cached_property
    def allowed_late(self) -> int:
        """Requests that may miss their SLOs, of those that can meet them."""
        num_hopeful = len(self.observed.trace) - self.observed.hopeless_requests
        return math.floor(self.settings.max_late_share * num_hopeful)

    def late_requests(self, pool: PoolSpec, at_most: float = math.inf) -> int:
        """Requests that miss their SLOs though they are not hopeless.

        Args:
            pool: that serves them all.
            at_most: where more are late, the count stops at some number above this.
        """
        hopeless = self.observed.hopeless_requests
        fleet = Fleet({"pool": pool})
        return missed_requests(self.observed, self.settings, fleet, at_most + hopeless) - hopeless


def missed_requests(
    observed: ObservedTrace, settings: Settings, fleet: Fleet, at_most: float = math.inf
) -> int:
    """Requests of a trace that miss their SLOs on a fleet that does not change.

    Args:
        observed: the trace.
        settings: of the simulation.
        fleet: that serves it.
        at_most: where more are missed, the count stops at some number above this.
    """
    controller = FleetController(observed, settings)
    controller.reconcile(fleet, 0.0, prewarmed=True)
    for slot in range(observed.trace.num_slots):
        controller.advance((slot + 1) * SLOT_S)
        counts = controller.counts_so_far()
        num_missed = counts.requests - counts.attained
        if num_missed > at_most:
            return num_missed
    counts = controller.finish_and_count()
    return counts.requests - counts.attained


def pool_trials(forecast: DemandForecast, pool: PoolSpec) -> Iterator[PoolTrial]:
    """The trials that a pool must pass: one for each window of a forecast.

    Where a window's requests are expected so many times, they come so many times as fast. Headroom
    is included.

    Args:
        forecast: with the windows.
        pool: what it serves, and the size of its instances.
    """
    for window in forecast.windows:
        selection = _requests_of(forecast.observed, window, pool)
        if len(selection):
            yield _pool_trial(forecast, window, selection, pool)


def _requests_of(
    observed: ObservedTrace, window: ScaledWindow, pool: PoolSpec
) -> npt.NDArray[np.intp]:
    """Indices of the requests of a window that are taken for a class of the pool."""
    bounds_s = (window.begin_s, window.end_s)
    begin, end = np.searchsorted(observed.trace.arrival_s, bounds_s).tolist()
    served = np.array([name in pool.serves for name in observed.profile.classes])
    indices: npt.NDArray[np.intp] = np.flatnonzero(served[observed.predicted_class[begin:end]])
    indices += begin
    return indices


def _pool_trial(
    forecast: DemandForecast,
    window: ScaledWindow,
    selection: npt.NDArray[np.intp],
    pool: PoolSpec,
) -> PoolTrial:
    settings = forecast.settings
    times_as_fast = window.factor * (1 + settings.headroom_percent / 100)
    arrival_s = forecast.observed.trace.arrival_s[selection]
    requests = forecast.observed.of_requests(
        selection,
        arrival_s=(arrival_s - window.begin_s) / times_as_fast,
        covered_s=(window.end_s - window.begin_s) / times_as_fast,
    )
    return PoolTrial(requests.on_tp(pool.tp), settings)


def right_sized(forecast: DemandForecast, pool: PoolSpec, *, always: bool = False) -> PoolSpec:
    """The pool with the fewest instances that pass all its trials.

    Args:
        forecast: with the windows.
        pool: with as many instances as the estimate says.
        always: replay windows however many requests they have; otherwise a pool with a window of
            too many requests stays as it is.
    """
    trials = list(pool_trials(forecast, pool))
    if not (always or _are_replayed(trials)):
        return pool
    fewest = max((_fewest_instances(trial, pool) for trial in trials), default=1)
    return replace(pool, num_instances=fewest)


def _fewest_instances(trial: PoolTrial, pool: PoolSpec) -> int:
    """The fewest instances that pass a trial.

    Requests that are late on however many instances are no reason to have more instances: beside
    them, as many others may be late as in any trial.
    """
    enough, late = _enough_instances(trial, pool)
    allowed = trial.allowed_late
    if late > allowed:
        allowed += late

    def passes(count: int) -> bool:
        resized = replace(pool, num_instances=count)
        return trial.late_requests(resized, at_most=allowed) <= allowed

    return fewest_that_pass(passes, enough)


def fewest_that_pass(passes: Callable[[int], bool], enough: int) -> int:
    """The fewest that pass, at least one.

    Args:
        passes: whether so many do. Where some number passes, more are taken to pass, too.
        enough: a number that is known to pass.
    """
    step = 1
    while enough - step > 0 and passes(enough - step):
        enough -= step
        step *= 2
    return fewest_between(passes, max(0, enough - step), enough)


def fewest_near(passes: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The fewest that pass, looked for from a guess on; None if not even the most pass.

    Args:
        passes: as for fewest_that_pass.
        guess: at least one, and at most `most`. The nearer, the fewer are tried.
        most: no more than these are tried.
    """
    if passes(guess):
        return fewest_that_pass(passes, guess)
    step, too_few = 1, guess
    while too_few < most:
        more = min(most, too_few + step)
        if passes(more):
            return fewest_between(passes, too_few, more)
        too_few = more
        step *= 2
    return None


def fewest_between(passes: Callable[[int], bool], too_few: int, enough: int) -> int:
    """The fewest that pass, above a number that is known not to, and at most one that does."""
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if passes(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _enough_instances(trial: PoolTrial, pool: PoolSpec) -> tuple[int, int]:
    """A number of instances to have at most, and the number of requests that are late on them.

    The trial passes with it, or more instances do not help, or there are no GPUs for more.
    """
    count = pool.num_instances
    late = trial.late_requests(pool)
    while late > trial.allowed_late and count * pool.tp < trial.settings.max_gpus:
        more = count + max(1, count // 2)
        late_with_more = trial.late_requests(replace(pool, num_instances=more))
        if late_with_more > _NO_HELP_SHARE * late:
            break
        count, late = more, late_with_more
    return count, late


def fewest_late(
    forecast: DemandForecast, pools: Sequence[PoolSpec], *, always: bool = False
) -> PoolSpec:
    """The pool with which the fewest requests are late in all windows together.

    Args:
        forecast: with the windows.
        pools: for the same classes; at least one.
        always: as for right_sized; otherwise the estimate decides.
    """

    def late_requests(pool: PoolSpec) -> float:
        trials = list(pool_trials(forecast, pool))
        if always or _are_replayed(trials):
            return sum(trial.late_requests(pool) for trial in trials)
        return forecast.demand(pool.serves, pool.tp).instances / pool.num_instances

    return min(pools, key=late_requests)


def _are_replayed(trials: Sequence[PoolTrial]) -> bool:
    """Whether no window has too many requests."""
    return all(len(trial.observed.trace) <= MAX_REPLAYED_REQUESTS for trial in trials)
