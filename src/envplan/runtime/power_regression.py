"""The powers of the kinds of work that filled some time, from readings of an energy counter.

Every reading is explained as the sum, over the kinds of work, of power times the time spent on that
kind until then. Iterations mix the kinds differently as they go (forwards first, both in turn,
backwards last, waits in between), which tells their powers apart. Where they do not, a weak prior
gives them all the mean power, that is, energy is apportioned by time. The powers are the mean of
the posterior of this linear model (Bishop, Pattern Recognition and Machine Learning, 3.3), their
covariance its spread.

The counter runs some unknown time behind, or ahead of the middle between two polls. That does not
matter where the mix changes slowly. Where it changes within milliseconds, such as with a short wait
after every operation, it would give one kind the power of another. The model is therefore solved
for a range of delays, each counted by its likelihood; what they disagree about is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from envplan.runtime.energy_log import FloatArray, Observations

__all__ = ["PowerEstimate", "estimate_powers"]

#: Standard deviation of powers around their mean, relative to it, before anything was read.
_PRIOR_SPREAD: Final = 1.0
#: A power is at least this share of the mean.
_MIN_POWER_SHARE: Final = 0.01
#: Delays of the counter that are tried, in times between two readings.
_COUNTER_DELAYS: Final = tuple(sevenths / 7 for sevenths in range(-7, 8))


@dataclass(frozen=True)
class PowerEstimate:
    """The powers of K kinds of work.

    Attributes:
        powers_w: W, (K,).
        covariance: of these, W^2, (K, K).
    """

    powers_w: FloatArray
    covariance: FloatArray


class _Fit(NamedTuple):
    """The regression for one delay of the counter.

    Attributes:
        misfit: twice the negative logarithm of its likelihood, but for a constant.
        differences_w: of each kind's power from the mean, (K,).
        covariance: of these, (K, K).
    """

    misfit: float
    differences_w: FloatArray
    covariance: FloatArray


def estimate_powers(
    observations: Observations, edges_s: Sequence[float], kinds: Sequence[int], num_kinds: int
) -> PowerEstimate | None:
    """Estimate the powers of the kinds of work that filled some time.

    Args:
        observations: during that time.
        edges_s: when the work changed, ascending.
        kinds: of the work between one edge and the next, from 0; one fewer than edges.
        num_kinds: K.

    Returns:
        None where there are fewer than two readings, or no energy was used between them.
    """
    times_s, energy_j = observations.times_s, observations.energy_j
    if len(times_s) < 2 or energy_j[-1] <= energy_j[0]:
        return None
    mean_w = (energy_j[-1] - energy_j[0]) / (times_s[-1] - times_s[0])
    seconds_until_edge = _seconds_by_kind(edges_s, kinds, num_kinds)
    reading_interval_s = np.median(np.diff(times_s))
    fits = []
    for delay in _COUNTER_DELAYS:
        delayed_times_s = times_s - delay * reading_interval_s
        seconds_until_reading = np.empty((len(times_s), num_kinds))
        for kind in range(num_kinds):
            seconds_until_reading[:, kind] = np.interp(
                delayed_times_s, edges_s, seconds_until_edge[kind]
            )
        fits.append(_fit_powers(observations, seconds_until_reading, mean_w))
    degrees_of_freedom = max(1, len(times_s) - num_kinds - 1)
    return _average_over_delays(fits, mean_w, degrees_of_freedom)


def _seconds_by_kind(edges_s: Sequence[float], kinds: Sequence[int], num_kinds: int) -> FloatArray:
    """Seconds spent on each kind until each edge, (K, edges)."""
    kind_between_edges = np.array(kinds)
    seconds_between_edges = np.diff(np.array(edges_s))
    seconds_until_edge = np.zeros((num_kinds, len(edges_s)))
    for kind in range(num_kinds):
        is_of_kind = kind_between_edges == kind
        seconds_of_kind = seconds_between_edges * is_of_kind
        seconds_until_edge[kind, 1:] = np.cumsum(seconds_of_kind)
    return seconds_until_edge


def _fit_powers(observations: Observations, seconds: FloatArray, mean_w: float) -> _Fit:
    """Bayesian linear regression of the readings on the seconds spent on each kind until then.

    All kinds at the mean power explain most of the energy. What is left is explained by an offset
    and by each kind's difference from the mean, around which the prior lies.

    Args:
        observations: with R readings.
        seconds: spent on each kind until each reading, (R, K).
        mean_w: the mean power.
    """
    num_readings, num_kinds = seconds.shape
    used_j = observations.energy_j - observations.energy_j[0]
    expected_j = mean_w * seconds.sum(axis=1)
    unexplained_j = used_j - expected_j
    # A reading is as uncertain as the energy that the mean power uses while its time is.
    reading_std_j = observations.time_std_s * mean_w
    precision = 1 / reading_std_j**2

    # The first column and parameter are the offset, of which nothing is known before.
    design = np.column_stack([np.ones(num_readings), seconds])
    difference_std_w = _PRIOR_SPREAD * mean_w
    prior_precisions = np.full(1 + num_kinds, 1 / difference_std_w**2)
    prior_precisions[0] = 0.0

    weighted_design = design.T * precision
    posterior_precision = weighted_design @ design + np.diag(prior_precisions)
    covariance = np.linalg.inv(posterior_precision)
    solution = covariance @ (weighted_design @ unexplained_j)
    residuals_j = unexplained_j - design @ solution
    misfit_of_readings = precision @ residuals_j**2
    misfit_of_prior = prior_precisions @ solution**2
    return _Fit(
        misfit=float(misfit_of_readings + misfit_of_prior),
        differences_w=solution[1:],
        covariance=covariance[1:, 1:],
    )


def _average_over_delays(
    fits: Sequence[_Fit], mean_w: float, degrees_of_freedom: int
) -> PowerEstimate:
    """The mean of the fits by their likelihood; what they disagree about adds to the covariance."""
    misfits = np.array([fit.misfit for fit in fits])
    differences_w = np.array([fit.differences_w for fit in fits])
    covariances = np.array([fit.covariance for fit in fits])
    least_misfit = misfits.min()
    # Where even the best delay misfits, the readings are noisier than their times say.
    noise = max(1.0, least_misfit / degrees_of_freedom)
    likelihoods = np.exp((least_misfit - misfits) / (2 * noise))
    weights = likelihoods / likelihoods.sum()

    mean_difference_w = weights @ differences_w
    deviations_w = differences_w - mean_difference_w
    disagreement = (deviations_w.T * weights) @ deviations_w
    mean_covariance = np.tensordot(weights, covariances, axes=1)
    powers_w = mean_w + mean_difference_w
    return PowerEstimate(
        powers_w=np.maximum(powers_w, _MIN_POWER_SHARE * mean_w),
        covariance=noise * mean_covariance + disagreement,
    )
