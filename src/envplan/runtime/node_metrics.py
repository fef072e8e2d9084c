"""What is measured on a node: its GPUs, its guards, and the runs that follow plans on it.

It comes from the driver, the marks of guards and the statuses of runs (see `marks`, `status`).
Names follow Prometheus' conventions: base units (hertz, joules, seconds, watts), `_total` for what
only grows. Energies named "modelled" are the profile's, not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final, NamedTuple

from envplan.devices import (
    DEFAULT_BACKEND,
    START_TIMEOUT_S,
    Backend,
    Device,
    DeviceError,
    DeviceInfo,
    call_with_timeout,
    opened,
)
from envplan.devices import backend as open_backend
from envplan.devices.marks import find_marks, user_name, users_with_folders
from envplan.runtime.metric_families import Families, Family
from envplan.runtime.status import RunStatus, read_statuses

__all__ = ["NodeMetrics"]

#: How long a GPU may take to answer, and how long one is left alone that did not, s.
_GPU_TIMEOUT_S: Final = 2.0
_PAUSE_S: Final = 60.0
_HERTZ_PER_MHZ: Final = 1e6


@dataclass(frozen=True)
class _GpuReading:
    """What the driver says of a GPU now; None where it does not."""

    info: DeviceInfo
    clock_mhz: int | None
    power_w: float | None
    throttle_reasons: Sequence[str]
    locked_mhz: int


class _Run(NamedTuple):
    """A rank that follows a plan, and the name of the user whose it is."""

    status: RunStatus
    user: str


class NodeMetrics:
    """Collects the metrics of this node. Not for use by several threads at once.

    Args:
        backend: through which the driver is read.
    """

    def __init__(self, backend: str = DEFAULT_BACKEND) -> None:
        self._backend = backend
        self._held: Backend | None = None
        self._ask_again_at: dict[int, float] = {}

    def collect(self) -> list[Family]:
        """All metrics, as they are now."""
        families = Families()
        families.gauge("envplan_build_info", "The version of envplan on this node.").add(
            1, version=version("envplan")
        )
        readings = self._read_gpus(families)
        by_uuid = {reading.info.uuid: reading for reading in readings}
        for reading in readings:
            _add_gpu(families, reading)
        for run in _latest_runs():
            reading_of_run = by_uuid.get(run.status.uuid)
            index = run.status.device if reading_of_run is None else reading_of_run.info.index
            _add_run(families, run.status, index, run.user)
        families.gauge(
            "envplan_last_look_timestamp_seconds", "When these metrics were collected."
        ).add(time.time())
        return list(families.values())

    def _read_gpus(self, families: Families) -> list[_GpuReading]:
        """The readings of all GPUs that answer."""
        driver_up = families.gauge(
            "envplan_driver_up", "Whether the NVIDIA driver answers on this node."
        )
        gpu_up = families.gauge("envplan_gpu_up", "Whether a GPU answers its driver.")
        readings = []
        try:
            if self._held is None:
                # For good: where nobody else holds the driver, it would start anew at each look.
                self._held = call_with_timeout(
                    START_TIMEOUT_S, partial(open_backend, self._backend), "the driver"
                )
            with opened(self._backend) as source:  # anew, as power limits are read once
                for index, device in enumerate(source.devices()):
                    reading = self._read_gpu(index, device)
                    gpu_up.add(reading is not None, gpu=index)
                    if reading is not None:
                        readings.append(reading)
            driver_up.add(1)
        except DeviceError:
            driver_up.add(0)
        return readings

    def _read_gpu(self, index: int, device: Device) -> _GpuReading | None:
        """The reading of a GPU; None where it does not answer, or did not a moment ago."""
        if time.monotonic() < self._ask_again_at.get(index, 0.0):
            return None
        try:
            return call_with_timeout(_GPU_TIMEOUT_S, partial(_read_device, device), f"GPU {index}")
        except DeviceError:
            self._ask_again_at[index] = time.monotonic() + _PAUSE_S
            return None


def _latest_runs() -> list[_Run]:
    """The runs of all users on this node.

    Of several that would have the same labels, such as two trainings that share a GPU, only the one
    that was written last: Prometheus takes nothing at all where labels occur twice.
    """
    latest: dict[tuple[str | int, int], _Run] = {}
    for user in sorted(users_with_folders()):
        for status in read_statuses(user):
            gpu = status.uuid or status.device
            latest[gpu, status.rank] = _Run(status, user_name(user))
    return list(latest.values())


def _read_device(device: Device) -> _GpuReading:
    clock_mhz = power_w = None
    throttle_reasons: Sequence[str] = ()
    with suppress(DeviceError):
        clock_mhz = device.clock()
    with suppress(DeviceError):
        power_w = device.power()
    with suppress(DeviceError):
        throttle_reasons = device.throttle_reasons()
    return _GpuReading(
        info=device.info,
        clock_mhz=clock_mhz,
        power_w=power_w,
        throttle_reasons=throttle_reasons,
        locked_mhz=device.apparent_locked_clock(),
    )


def _add_gpu(families: Families, reading: _GpuReading) -> None:
    """Add what a GPU and the marks on it say."""
    info = reading.info
    gpu = {"gpu": info.index, "uuid": info.uuid}
    families.gauge("envplan_gpu_info", "A GPU of this node, and its driver.").add(
        1, **gpu, name=info.name, driver=info.driver
    )
    families.gauge("envplan_clock_hertz", "The SM clock, by the driver.").add(
        None if reading.clock_mhz is None else reading.clock_mhz * _HERTZ_PER_MHZ, **gpu
    )
    families.gauge("envplan_clock_max_hertz", "The highest SM clock that may be asked for.").add(
        info.max_clock * _HERTZ_PER_MHZ, **gpu
    )
    families.gauge("envplan_power_watts", "Power drawn, by the driver.").add(reading.power_w, **gpu)
    families.gauge("envplan_power_limit_watts", "The power limit in force, by the driver.").add(
        info.power_limit or None, **gpu
    )
    throttled = families.gauge(
        "envplan_clock_throttled", "Whether the driver holds the clock back, by its reason."
    )
    for reason in reading.throttle_reasons:
        throttled.add(1, **gpu, reason=reason)
    marks = list(find_marks(info.uuid))
    families.gauge(
        "envplan_guard_up", "Whether a living guard has this GPU's clock for a training."
    ).add(any(found.is_held for found in marks), **gpu)
    families.gauge(
        "envplan_clock_left_set", "Whether a killed training has left this GPU's clock set."
    ).add(any(not found.is_held for found in marks), **gpu)
    families.gauge(
        "envplan_clock_locked_hertz",
        "The clock that somebody seems to hold this GPU at; 0: nobody, or it cannot be told.",
    ).add(reading.locked_mhz * _HERTZ_PER_MHZ, **gpu)


def _add_run(families: Families, status: RunStatus, index: int, user: str) -> None:
    """Add what a rank that follows a plan says."""
    run = {"gpu": index, "uuid": status.uuid, "rank": status.rank}
    families.gauge("envplan_run_info", "A rank that follows a plan on this node.").add(
        1,
        **run,
        stage=status.stage,
        job_id=status.job,
        plan_sha256=status.plan_sha256,
        user=user,
    )
    families.gauge("envplan_run_clocks_set", "Whether this rank's clocks are set at all.").add(
        status.clocks, **run
    )
    families.gauge("envplan_clock_wanted_hertz", "The clock that was asked for last.").add(
        status.wanted_mhz * _HERTZ_PER_MHZ or None, **run
    )
    families.counter("envplan_iterations_followed_total", "Iterations that followed the plan.").add(
        status.followed, **run
    )
    unfollowed = families.counter(
        "envplan_iterations_unfollowed_total", "Iterations that did not follow the plan, by reason."
    )
    for reason, count in status.unfollowed.items():
        unfollowed.add(count, **run, reason=reason)
    families.counter("envplan_clock_changes_total", "Clocks that were asked for.").add(
        status.changes, **run
    )
    families.counter(
        "envplan_clock_changes_late_total",
        "Clocks that came after their operation had begun, or never.",
    ).add(status.late_changes, **run)
    families.counter("envplan_clock_errors_total", "Clocks that could not be set.").add(
        status.clock_errors, **run
    )
    families.gauge("envplan_order", "The number of the order that this rank follows.").add(
        status.order, **run
    )
    families.gauge("envplan_order_rung", "The rung of its ladder that this order names.").add(
        status.order_rung, **run
    )
    families.counter("envplan_orders_refused_total", "Orders that were not followed.").add(
        status.orders_refused, **run
    )
    families.gauge("envplan_last_iteration_seconds", "The last measured iteration.").add(
        status.iteration_s, **run
    )
    families.gauge(
        "envplan_last_iteration_planned_seconds", "The planned time of the last measured iteration."
    ).add(status.planned_s, **run)
    families.counter("envplan_iteration_seconds_total", "All measured iterations.").add(
        status.total_iteration_s, **run
    )
    families.counter(
        "envplan_iteration_planned_seconds_total", "The planned times of all measured iterations."
    ).add(status.total_planned_s, **run)
    families.counter(
        "envplan_energy_joules_total",
        "Energy of the GPU in iterations that followed the plan itself, by its counter.",
    ).add(status.used_j, **run)
    families.counter(
        "envplan_energy_planned_modelled_joules_total",
        "The same iterations by the plan's model (its profile), at the planned clocks.",
    ).add(status.planned_j, **run)
    families.counter(
        "envplan_energy_full_speed_modelled_joules_total",
        "The same iterations by the plan's model (its profile), at the highest clocks.",
    ).add(status.baseline_j, **run)
