"""A sweep's groups on a Ray cluster that is there already."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

from envplan.cores import use_cores
from envplan.errors import InputError
from envplan.sweep.work import Done, Group, Task, Underway, compute

__all__ = ["run_on_ray"]

_PATIENCE_S: Final = 10.0


def run_on_ray(groups: Sequence[Group], address: str) -> Iterator[tuple[Task, Done]]:
    """Every task with its outcome, as they come.

    A group is a Ray task on one CPU, which reports point by point. One that dies costs the point it
    was at, which then has failed; another Ray task takes the rest of the group. envplan must be
    installed on the nodes; profiles need not be there.

    Args:
        address: of the cluster's head, such as 10.0.0.1:6379, or "auto".

    Raises:
        InputError: ray is not installed, or there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise InputError("--ray needs ray: pip install 'envplan[ray]'")
    _check_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached there ({reason})"
        ) from None
    try:
        yield from _outcomes(ray, groups)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Fail at once where Ray would go on trying for minutes."""
    if "://" in address:
        raise InputError(
            f"--ray {address}: Ray clients cannot run sweeps; run it on a node of the cluster with "
            "--ray auto, or give the address of its head, as in 10.0.0.1:6379"
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached there ({error})"
        ) from None


def _compute(group: Group) -> Iterator[Done]:
    use_cores(1)
    yield from compute(group)


def _outcomes(ray: Any, groups: Sequence[Group]) -> Iterator[tuple[Task, Done]]:
    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_compute)
    running = {remote.remote(group): Underway(group) for group in groups}
    while running:
        ready, _ = ray.wait(list(running), num_returns=1)
        stream = ready[0]
        group = running[stream]
        try:
            yield group.finished(ray.get(next(stream)))
        except StopIteration:
            del running[stream]
        except ray.exceptions.RayError as error:
            del running[stream]
            if group.tasks:
                failed, rest = group.lost(f"Ray: {str(error).strip()}"[:500])
                running |= {remote.remote(left): Underway(left) for left in rest}
                yield failed
