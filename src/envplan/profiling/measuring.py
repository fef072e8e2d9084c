"""A profile measured on a GPU of this machine: which GPU, who holds its clock, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from envplan.devices import Counted, Device, DeviceError, choose, opened, visible_gpus
from envplan.devices.guard import Guard
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.sweep import Settings, Workload, sweep
from envplan.profiling.waiting import Peers

__all__ = ["measure", "wait_with"]


def measure(
    workload: Callable[[str], Workload],
    output: Path,
    settings: Settings,
    *,
    source: str,
    device: int | None = None,
    metadata: ProfileMetadata,
    progress: Callable[[float, str], None],
) -> Profile:
    """Measure a workload's stages, and go on with a sweep that was cut off.

    Args:
        workload: makes it, on the CUDA device of a name.
        output: the profile's file.
        source: the backend whose GPUs are measured.
        device: which, as nvidia-smi counts; None: CUDA's first.
        metadata: what the sidecar says of the job.
        progress: see sweep.

    Raises:
        DeviceError: there is no driver or GPU, or its clock may not be set.
        InputError: as for sweep.
    """
    with ExitStack() as stack:
        gpus = stack.enter_context(opened(source))
        devices = gpus.devices()
        counted = Counted.BY_CUDA if device is None else Counted.BY_DRIVER
        chosen = choose(gpus, device or 0, counted)
        others = [devices[k] for k in visible_gpus(devices) if devices[k] is not chosen]
        # CUDA and NVML number GPUs differently; from here on this is the only one CUDA knows.
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.info.uuid
        made = workload("cuda:0")

        @contextmanager
        def held() -> Iterator[None]:
            with ExitStack() as stack:
                wait_with(made, chosen, others, stack)
                if settings.lock:
                    stack.enter_context(Guard.start(source, chosen.info.index))
                yield

        stack.enter_context(_stoppable())
        return sweep(
            made, chosen, output, settings, metadata=metadata, progress=progress, hold=held
        )


def wait_with(workload: Any, chosen: Device, others: Sequence[Device], stack: ExitStack) -> None:
    """Have a torch workload wait for a second GPU, where that works; else it goes on spinning."""
    other = next(filter(_is_whole, others), None)
    if other is None or getattr(workload, "timer", None) is None:  # it runs on the CPU
        return
    if getattr(workload, "peers", workload) is not None:  # a user's own
        return
    seen = [{"CUDA_VISIBLE_DEVICES": device.info.uuid} for device in (chosen, other)]
    try:
        workload.peers = stack.enter_context(
            Peers(backend="nccl", device="cuda:0", environments=seen)
        )
    except DeviceError as error:
        print(f"envplan: {error}; blocking power is that of idle spinning", file=sys.stderr)


def _is_whole(device: Device) -> bool:
    """Whether it is there and not split by MIG."""
    try:
        return not device.info.mig
    except DeviceError:
        return False


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the sweep as Ctrl-C does, so that it cleans up behind itself."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    # Not where somebody else has a say: nohup has SIGHUP ignored, a user's module its own handler.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
