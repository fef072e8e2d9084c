"""Operations beside forwards and backwards in a generated schedule: data, gradients, weights.

They share their rank's GPU with the rest and run when nothing else does. Most take about the same
time at any clock, but not the same energy: rows at several clocks let a plan run them at a low one.
One row at 0 MHz makes a constant of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from envplan.errors import InputError, shown
from envplan.pipeline.formats import whole_number
from envplan.pipeline.schedules import Operation

if TYPE_CHECKING:
    from envplan.profile import Profile

__all__ = ["EXTRAS", "checked_extras", "parse_extras", "with_extras"]

LOAD: Final = "load"
#: Once per model stage after its last backward, in this order.
_AT_THE_END: Final = ("all_reduce", "reduce_scatter", "optimizer", "all_gather")

#: What a schedule can be given besides its forwards and backwards.
EXTRAS: Final = (LOAD, *_AT_THE_END)


def checked_extras(extras: object, num_profile_stages: int) -> dict[str, tuple[int, ...]]:
    """For each extra instruction the model stages that have it, ascending; in the order of EXTRAS.

    Args:
        extras: such as {"load": [0], "optimizer": [0, 1]}; None is none.

    Raises:
        InputError: it is something else, or names what is no extra or no stage.
    """
    extras = {} if extras is None else extras
    if not isinstance(extras, Mapping):
        raise InputError(f"extras must be an object, not {shown(extras)}")
    for name, stages in extras.items():
        if name not in EXTRAS:
            raise InputError(f"{shown(name)} is no extra operation; known: {', '.join(EXTRAS)}")
        if not isinstance(stages, list | tuple) or not stages:
            raise InputError(f"extras: {name} must list the stages that have it")
        for stage in stages:
            if whole_number(stage, f"extras: {name}", least=0) >= num_profile_stages:
                raise InputError(
                    f"extras: {name} names stage {stage}; there are {num_profile_stages}"
                )
    return {name: tuple(sorted(set(extras[name]))) for name in EXTRAS if name in extras}


def parse_extras(text: str | None, profile: Profile) -> dict[str, list[int]] | None:
    """The operations that `--extra` names, and the stages for which the profile has rows.

    Raises:
        InputError: one is not known, or the profile has no rows for it.
    """
    if text is None:
        return None
    extras = {}
    for part in text.split(","):
        name = part.strip().replace("-", "_")
        if name not in EXTRAS:
            raise InputError(f"--extra must name some of {', '.join(EXTRAS)}, not {part.strip()!r}")
        extras[name] = [s for s in range(profile.num_stages) if profile.has(s, name)]
        if not extras[name]:
            raise InputError(
                f"--extra {name}: profile {profile.name} has no rows for {name}; add some, at 0 "
                "MHz if it takes the same time at any clock",
                path=profile.path,
            )
    return extras


def with_extras(
    orders: Sequence[Sequence[Operation]], extras: Mapping[str, Sequence[int]]
) -> list[list[Operation]]:
    """A schedule's orders with extra operations in them.

    `load` comes before every forward of its model stages, once a microbatch; `all_reduce` or
    `reduce_scatter`, `optimizer` and then `all_gather` come once for each of their model stages,
    when its rank has done everything else.

    Args:
        orders: for each rank, its operations in execution order.
    """
    extended = []
    for order in orders:
        listed: list[Operation] = []
        for op in order:
            if op.instruction == "forward" and op.profile_stage in extras.get(LOAD, ()):
                listed.append(replace(op, instruction=LOAD))
            listed.append(op)
        model_stages = {op.profile_stage: op for op in order}
        for name in _AT_THE_END:
            for stage in sorted(model_stages.keys() & set(extras.get(name, ()))):
                listed.append(replace(model_stages[stage], instruction=name, microbatch=0))
        extended.append(listed)
    return extended
