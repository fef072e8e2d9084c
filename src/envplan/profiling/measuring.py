"""Measuring on a GPU of this machine: which GPU, who holds its clock, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from envplan.devices import (
    Backend,
    Counted,
    Device,
    DeviceError,
    DeviceInfo,
    choose,
    opened,
    visible_gpus,
)
from envplan.devices.guard import Guard
from envplan.errors import InputError
from envplan.profile import Profile, ProfileMetadata, SwitchLatency
from envplan.profiling.explaining import explained
from envplan.profiling.stages import RunnableStages
from envplan.profiling.sweep import Settings, give_clock_back, sweep
from envplan.profiling.switch_latency import Slices, measure_switch_latency
from envplan.profiling.waiting import Peers

__all__ = ["MeasuredLatency", "measure", "measure_latency", "wait_with"]

_CUDA_DEVICE: Final = "cuda:0"


class MeasuredLatency(NamedTuple):
    """How late the clocks of a GPU come."""

    gpu: DeviceInfo
    latency: SwitchLatency


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
        chosen, others = _choose_for_cuda(stack.enter_context(opened(source)), device)
        stages = make_stages(_CUDA_DEVICE)

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


def measure_latency(
    make_slices: Callable[[str], Slices],
    *,
    source: str,
    device: int | None = None,
    metadata: ProfileMetadata | None = None,
    clocks_mhz: Sequence[int] = (),
    progress: Callable[[float, str], None],
) -> MeasuredLatency:
    """Measure how late the clocks of a GPU of this machine come.

    The clock is given back before this returns or raises, and by the guard if it is killed.

    Args:
        make_slices: makes slices of work, on the CUDA device of a name.
        source: the backend whose GPUs are measured.
        device: which GPU, as nvidia-smi counts; None: CUDA's first.
        metadata: of the profile whose clocks are meant; None: of no profile.
        clocks_mhz: to change between; none: all that the GPU supports.
        progress: see measure_switch_latency.

    Raises:
        DeviceError: there is no driver or GPU, its clock may not be set, or it does not follow.
        InputError: the slices fail, or the profile is of another GPU.
    """
    with ExitStack() as stack:
        chosen, _ = _choose_for_cuda(stack.enter_context(opened(source)), device)
        info = chosen.info
        if metadata is not None and metadata.gpu not in (None, info.name):
            raise InputError(
                f"the profile is of the {metadata.gpu}, but GPU {info.index} is the {info.name}; "
                "choose the GPU with --device"
            )
        if refusal := chosen.lock_refusal(probe=True):
            raise DeviceError(refusal)
        slices = make_slices(_CUDA_DEVICE)
        stack.enter_context(_stoppable())
        stack.enter_context(Guard.start(source, info.index))
        stack.callback(give_clock_back, chosen, None)
        with explained("the slices of work fail"):
            latency = measure_switch_latency(
                chosen, slices, clocks_mhz or info.supported_clocks, progress=progress
            )
        return MeasuredLatency(info, latency)


def _choose_for_cuda(gpus: Backend, number: int | None) -> tuple[Device, list[Device]]:
    """The GPU of a number, which from here on is the only one that CUDA knows, and the others.

    Args:
        gpus: of this machine.
        number: as nvidia-smi counts; None: CUDA's first.
    """
    devices = gpus.devices()
    counted = Counted.BY_CUDA if number is None else Counted.BY_DRIVER
    chosen = choose(gpus, number or 0, counted)
    visible = [devices[index] for index in visible_gpus(gpus)]
    others = [gpu for gpu in visible if gpu is not chosen]
    os.environ.update(gpus.environment_of(chosen))
    return chosen, others


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
