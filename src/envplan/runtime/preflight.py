"""Preflight: whether a frequency plan would be followed on this node, found out before training.

Nothing is changed: no clock is set, and the right to set one is asked for by writing a power limit
to what it is, as guards do. What is found is a list of checks, of the node and of each GPU that the
plan uses here. A check fails where the plan would not be followed, and warns where it would be, but
not as planned, or where nobody can tell.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan._io.documents import MAX_DOCUMENT_BYTES
from envplan._io.files import read_bounded
from envplan.devices import (
    DEFAULT_BACKEND,
    GPU_TIMEOUT_S,
    Counted,
    Device,
    DeviceError,
    DeviceInfo,
    call_with_timeout,
    choose,
    opened,
)
from envplan.devices.gpu_users import process_in_words
from envplan.devices.marks import find_marks, user_name
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError

if TYPE_CHECKING:
    from pydantic import JsonValue

__all__ = ["TESTED", "Check", "Preflight", "Status", "check_frameworks", "preflight"]

#: The oldest and the newest version of each framework that docs/compatibility.md has tested.
TESTED: Final = {
    "torch": ((2, 12), (2, 15)),
    "torchtitan": ((0, 2), (0, 3)),
    "megatron-core": ((0, 16), (0, 16)),
    "deepspeed": ((0, 19), (0, 19)),
}
#: The average power of an operation may be so much above a limit that does not hold it back: meters
#: and fits are not better than that.
_POWER_TOLERANCE: Final = 1.01
#: The variable in which Slurm numbers the nodes of a job.
_NODE_NUMBER: Final = "SLURM_NODEID"


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it.
        status: the result.
        detail: what was found, and what to do about it, in one line.
        gpu: the driver's index, or as the plan counts where it is not there; None: the node.
    """

    name: str
    status: Status
    detail: str
    gpu: int | None = None


@dataclass
class Preflight:
    """Everything that was found on a node.

    Attributes:
        node: its name.
        sha256: of the frequency plan's file.
        ranks: of the plan that are checked here; those of all nodes where it is not known
            which one this is.
        checks: in the order in which they were made.
    """

    node: str
    sha256: str
    ranks: list[int]
    checks: list[Check] = field(default_factory=list)

    @property
    def would_follow(self) -> bool:
        """Whether no check has failed."""
        return all(check.status is not Status.FAILED for check in self.checks)

    def to_dict(self) -> dict[str, JsonValue]:
        """The findings in JSON types."""
        return {
            "node": self.node,
            "sha256": self.sha256,
            "ranks": list(self.ranks),
            "would_follow": self.would_follow,
            "checks": [asdict(check) for check in self.checks],
        }


def preflight(
    path: Path,
    *,
    node: int | None = None,
    sha256: str | None = None,
    backend: str = DEFAULT_BACKEND,
) -> Preflight:
    """Check whether a frequency plan would be followed on this node.

    Args:
        path: of the frequency plan.
        node: which node of the job this is, from 0; default: $SLURM_NODEID. Where nobody says, each
            GPU is checked against the ranks of all nodes.
        sha256: of the file on the node that the job was sent from; None: not compared.
        backend: through which clocks would be set, "nvml", "zeusd", "amdsmi" or "modelled".

    Raises:
        InputError: the file is no frequency plan, or has no such node.
    """
    content = read_bounded(path, MAX_DOCUMENT_BYTES)
    plan = FrequencyPlan.load(path)
    found = Preflight(
        node=socket.gethostname(),
        sha256=hashlib.sha256(content).hexdigest(),
        ranks=_ranks_of_node(plan, _node_number(node)),
    )
    found.checks.append(_check_file(found.sha256, sha256))
    found.checks += check_frameworks() or [_no_framework()]
    found.checks.append(_check_latency(plan))
    try:
        with opened(backend) as source:
            devices = source.devices()
            driver = call_with_timeout(GPU_TIMEOUT_S, partial(_driver_version, devices[0]), "GPU 0")
            found.checks.append(Check("driver", Status.OK, driver))
            for number, ranks in _ranks_by_device(plan, found.ranks).items():
                try:
                    device = choose(source, number, Counted.BY_PLAN)
                except DeviceError as error:
                    found.checks.append(Check("GPU", Status.FAILED, str(error), number))
                    continue
                found.checks += _check_gpu(plan, device, number, ranks)
    except DeviceError as error:
        found.checks.append(Check("driver", Status.FAILED, str(error)))
    return found


def check_frameworks() -> list[Check]:
    """For each framework installed here, whether envplan was tested with its version.

    Reads what is installed and imports nothing.
    """
    checks = []
    for framework, (oldest, newest) in TESTED.items():
        try:
            installed = version(framework)
        except PackageNotFoundError:
            continue
        numbers = _major_and_minor(installed)
        tested = f"tested from {_dotted(oldest)} to {_dotted(newest)}"
        if numbers is not None and oldest <= numbers <= newest:
            checks.append(Check("framework", Status.OK, f"{framework} {installed}, {tested}"))
        else:
            detail = f"{framework} {installed} is not known: {tested}; look at the first steps"
            checks.append(Check("framework", Status.WARNING, detail))
    return checks


def _no_framework() -> Check:
    detail = f"none of {', '.join(TESTED)} is installed in this Python"
    return Check("framework", Status.WARNING, detail)


def _major_and_minor(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version such as "2.13.0+cpu"; None: it has other ones."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if major.isdecimal() and minor.isdecimal():
        return int(major), int(minor)
    return None


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


# Of the file and the node


def _check_file(sha256: str, expected: str | None) -> Check:
    if expected is None:
        detail = f"sha256 {sha256[:16]}...; compare nodes with --sha256"
        return Check("file", Status.OK, detail)
    if expected.lower() != sha256:
        detail = f"is another one than was sent: sha256 {sha256[:16]}..., not {expected[:16]}..."
        return Check("file", Status.FAILED, detail)
    return Check("file", Status.OK, f"the same as was sent, sha256 {sha256[:16]}...")


def _check_latency(plan: FrequencyPlan) -> Check:
    if plan.switching is None:
        detail = "the plan does not say how long a clock takes to change; see docs/switching.md"
        return Check("switch latency", Status.WARNING, detail)
    detail = f"{1e3 * plan.switching.latency_s:g} ms, {plan.switching.source}"
    return Check("switch latency", Status.OK, detail)


def _node_number(node: int | None) -> int | None:
    if node is not None:
        return node
    text = os.environ.get(_NODE_NUMBER, "")
    return int(text) if text.isdecimal() else None


def _ranks_of_node(plan: FrequencyPlan, node: int | None) -> list[int]:
    """The ranks that a node runs: neighbours, one for each of its devices; None: all ranks.

    Raises:
        InputError: the plan has no such node.
    """
    if node is None:
        return list(range(plan.world_size))
    per_node = len({rank.device for rank in plan.ranks})
    ranks = range(plan.world_size)[node * per_node : (node + 1) * per_node]
    if not ranks:
        num_nodes = -(-plan.world_size // per_node)
        raise InputError(
            f"node {node} is not in the frequency plan, which has {num_nodes} nodes of {per_node} "
            "GPUs; apply the plan again with --gpus-per-node"
        )
    return list(ranks)


def _ranks_by_device(plan: FrequencyPlan, ranks: Sequence[int]) -> dict[int, list[int]]:
    by_device: dict[int, list[int]] = {}
    for rank in ranks:
        by_device.setdefault(plan.ranks[rank].device, []).append(rank)
    return dict(sorted(by_device.items()))


# Of a GPU


@dataclass(frozen=True)
class _GpuState:
    """What the driver says of a GPU.

    Attributes:
        info: what stays the same.
        refusal: why this user may not set its clock; None if he may.
        processes: that compute on it; None: the driver does not tell.
        locked_mhz: the clock that somebody seems to hold it at; 0: none.
    """

    info: DeviceInfo
    refusal: str | None
    processes: Sequence[int] | None
    locked_mhz: int


def _read_gpu(device: Device) -> _GpuState:
    return _GpuState(
        info=device.info,
        refusal=device.lock_refusal(probe=True),
        processes=device.compute_processes(),
        locked_mhz=device.apparent_locked_clock(),
    )


def _driver_version(device: Device) -> str:
    return device.info.driver


def _check_gpu(
    plan: FrequencyPlan, device: Device, number: int, ranks: Sequence[int]
) -> Iterator[Check]:
    """The checks of one GPU.

    Args:
        plan: the frequency plan.
        device: the GPU.
        number: of it in the plan.
        ranks: that may run on it.
    """
    who = f"GPU {number}"
    try:
        state = call_with_timeout(GPU_TIMEOUT_S, partial(_read_gpu, device), who)
    except DeviceError as error:
        yield Check("GPU", Status.FAILED, str(error), number)
        return
    index = state.info.index
    stages = sorted({plan.ranks[rank].stage for rank in ranks})
    yield _check_model(plan, state.info, stages)
    if state.info.mig:
        yield Check("MIG", Status.FAILED, "is on, so parts share one clock; turn it off", index)
    else:
        yield Check("MIG", Status.OK, "off", index)
        refusal = state.refusal
        status = Status.OK if refusal is None else Status.FAILED
        yield Check("rights", status, refusal or "clocks may be set", index)
    yield _check_power_limit(plan, state.info, stages)
    yield _check_processes(state)
    yield _check_locks(state)


def _check_model(plan: FrequencyPlan, info: DeviceInfo, stages: Sequence[int]) -> Check:
    try:
        for stage in stages:
            plan.check_gpu(info.name, info.supported_clocks, stage)
    except InputError as error:
        return Check("model and clocks", Status.FAILED, str(error), info.index)
    if any(plan.clocks_of(stage).gpu is None for stage in stages):
        detail = (
            f"{info.name} has all planned clocks, but the plan does not say which GPU it is for"
        )
        return Check("model and clocks", Status.WARNING, detail, info.index)
    detail = f"{info.name}, all planned clocks"
    return Check("model and clocks", Status.OK, detail, info.index)


def _check_power_limit(plan: FrequencyPlan, info: DeviceInfo, stages: Sequence[int]) -> Check:
    name = "power limit"
    if not info.power_limit:
        return Check(name, Status.WARNING, "the driver does not say it", info.index)
    here = f"{info.power_limit:.0f} W"
    if plan.stage_power is None:
        detail = f"{here}; the plan does not say which one it is for, apply it again"
        return Check(name, Status.WARNING, detail, info.index)
    needed_w = max(plan.stage_power[stage].highest_w for stage in stages)
    profile_w = max(plan.stage_power[stage].profile_limit_w or 0.0 for stage in stages)
    is_lower = info.power_limit < profile_w or not profile_w
    if is_lower and info.power_limit < needed_w / _POWER_TOLERANCE:
        detail = f"{here}, but operations draw up to {needed_w:.0f} W at their planned clocks"
        return Check(name, Status.FAILED, detail, info.index)
    if info.power_limit < profile_w:
        detail = (
            f"{here}, lower than the profile's {profile_w:.0f} W; planned operations draw "
            f"{needed_w:.0f} W at most on average"
        )
        return Check(name, Status.WARNING, detail, info.index)
    return Check(name, Status.OK, f"{here}, operations draw up to {needed_w:.0f} W", info.index)


def _check_processes(state: _GpuState) -> Check:
    name = "other processes"
    others = [process_in_words(pid) for pid in state.processes or () if not _is_own(pid)]
    if others:
        detail = f"{', '.join(others)} computes on it; a clock is for one training only"
        return Check(name, Status.FAILED, detail, state.info.index)
    return Check(name, Status.OK, "none", state.info.index)


def _is_own(pid: int) -> bool:
    return pid in (os.getpid(), os.getppid())


def _check_locks(state: _GpuState) -> Check:
    """Whether a guard of some user has the GPU, a dead one has left it set, or another tool did."""
    name = "other locks"
    index = state.info.index
    for found in find_marks(state.info.uuid):
        owner = user_name(found.user)
        if found.is_held:
            pid = found.mark.guard_pid
            detail = f"another training of {owner} sets its clock, its guard is process {pid}"
            return Check(name, Status.FAILED, detail, index)
        if found.user != os.geteuid():
            detail = f"a killed training of {owner} left its clock set; run envplan reset as root"
            return Check(name, Status.FAILED, detail, index)
        detail = "a killed training left its clock set; the next guard gives it back"
        return Check(name, Status.WARNING, detail, index)
    if state.locked_mhz:
        detail = f"another tool, or a guard not seen from here, holds it at {state.locked_mhz} MHz"
        return Check(name, Status.WARNING, detail, index)
    return Check(name, Status.OK, "none", index)
