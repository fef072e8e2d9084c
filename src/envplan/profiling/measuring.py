"""A profile measured on a GPU of this machine: which GPU, who holds its clock, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from envplan.devices import Counted, Device, DeviceError, choose, opened, visible_gpus
from envplan.devices.guard import Guard
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.stages import RunnableStages
from envplan.profiling.sweep import Settings, sweep
from envplan.profiling.waiting import Peers

__all__ = ["measure", "wait_with"]


def measure(
    make_stages: Callable[[str], RunnableStages],
    output: Path,
    settings: Settings,
    *,
    source: str,
    device: int | None = None,
    share: bool = False,
    metadata: ProfileMetadata,
    progress: Callable[[float, str], None],
) -> Profile:
    """Measure stages on a GPU of this machine, or go on with a sweep that was cut off.

    Args:
        make_stages: makes the stages, on the CUDA device of a name.
        output: the profile's file.
        settings: of the sweep.
        source: the backend whose GPUs are measured.
        device: which GPU, as nvidia-smi counts; None: CUDA's first.
        share: see Guard.start.
        metadata: of the job, for the sidecar.
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
        visible = [devices[index] for index in visible_gpus(devices)]
        others = [gpu for gpu in visible if gpu is not chosen]
        # CUDA and NVML number GPUs differently; from here on this is the only one CUDA knows.
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.info.uuid
        stages = make_stages("cuda:0")

        @contextmanager
        def hold_peers_and_clock() -> Iterator[None]:
            with ExitStack() as held:
                wait_with(stages, chosen, others, held)
                if settings.lock:
                    guard = Guard.start(source, chosen.info.index, share=share)
                    held.enter_context(guard)
                yield

        stack.enter_context(_stoppable())
        return sweep(
            stages,
            chosen,
            output,
            settings,
            metadata=metadata,
            progress=progress,
            hold=hold_peers_and_clock,
        )


def wait_with(
    stages: RunnableStages, chosen: Device, others: Sequence[Device], stack: ExitStack
) -> None:
    """Have torch stages wait for a second GPU, where there is one; else they go on spinning.

    Args:
        stages: those of a user's own type wait in their own way.
        chosen: the GPU that is measured.
        others: further GPUs that may be used.
        stack: ends the two processes that wait for each other.
    """
    whole_gpus = [gpu for gpu in others if _is_whole(gpu)]
    runs_on_gpu = getattr(stages, "timer", None) is not None
    lacks_peers = hasattr(stages, "peers") and stages.peers is None
    if not (whole_gpus and runs_on_gpu and lacks_peers):
        return
    peer = whole_gpus[0]
    environments = [{"CUDA_VISIBLE_DEVICES": gpu.info.uuid} for gpu in (chosen, peer)]
    try:
        peers = Peers(backend="nccl", device="cuda:0", environments=environments)
    except DeviceError as error:
        print(f"envplan: {error}; blocking power is that of idle spinning", file=sys.stderr)
        return
    stages.peers = stack.enter_context(peers)  # type: ignore[attr-defined]


def _is_whole(device: Device) -> bool:
    """Whether a GPU is there and not split by MIG."""
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
    unhandled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in unhandled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
