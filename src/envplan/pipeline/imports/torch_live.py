"""Schedule objects of torch.distributed.pipelining, read as they are in memory; without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from envplan.errors import InputError
from envplan.pipeline.imports.steps import ImportedSchedule
from envplan.pipeline.imports.torch_csv import parse_rows
from envplan.pipeline.schedules import SCHEDULES

__all__ = ["read_torch_schedule"]

# The schedules of one stage per rank run a loop of their own, which keeps no list of actions that
# could be relied on; their order is known.
_SINGLE: Final = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_LOOP: Final = "_step_microbatches"


def read_torch_schedule(schedule: Any, *, keep: Collection[str] = ()) -> ImportedSchedule:
    """The order in which a schedule object of torch.distributed.pipelining runs all its ranks.

    Every rank's object knows all ranks, so the one of any rank will do.

    Args:
        schedule: a ScheduleGPipe, Schedule1F1B or any schedule of several stages per rank.
        keep: `all_reduce` keeps the reductions of gradients, where the schedule has them, as
            operations of that name.

    Raises:
        InputError: the object is no such schedule, or has an action that is not known.
    """
    loop = next((cls.__name__ for cls in type(schedule).__mro__ if _LOOP in vars(cls)), None)
    if loop in _SINGLE:
        return _single(_SINGLE[loop], schedule._num_stages, schedule._n_microbatches)
    order = getattr(schedule, "pipeline_order_with_comms" if keep else "pipeline_order", None)
    if loop is None or not isinstance(order, Mapping) or not order:
        raise InputError(
            f"a {type(schedule).__name__} is no schedule of torch.distributed.pipelining with an "
            "order of actions for each rank"
        )
    rows = [
        ["" if action is None else str(action) for action in order[rank]] for rank in sorted(order)
    ]
    try:
        return parse_rows(rows, keep=keep)
    except InputError as error:
        if error.line is None:
            raise
        place = f"rank {error.line - 1}" + (f", action {error.column}" if error.column else "")
        raise InputError(f"{place}: {error.message}") from None


def _single(name: str, num_stages: int, num_microbatches: int) -> ImportedSchedule:
    orders = SCHEDULES[name](num_stages, num_microbatches, 1)
    return ImportedSchedule(tuple(map(tuple, orders)))
