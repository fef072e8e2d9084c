"""Numbers that a launcher gives each process of a job: torchrun, Slurm, Open MPI or MPICH.

torch.distributed is asked first, where it has been initialized.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Final, NamedTuple

from envplan.errors import InputError

__all__ = ["RankNumber", "number_of_process", "number_or_none"]


_MAX_DIGITS: Final = 10


class RankNumber(Enum):
    """A number that a process of a job has, by torchrun's name of it."""

    RANK = "RANK"
    WORLD_SIZE = "WORLD_SIZE"
    LOCAL_RANK = "LOCAL_RANK"


class _Launcher(NamedTuple):
    """The environment variables that a launcher sets."""

    rank: str
    world_size: tuple[str, ...]
    local_rank: str

    def variables(self, kind: RankNumber) -> tuple[str, ...]:
        """Those of a number, in the order in which they count."""
        match kind:
            case RankNumber.RANK:
                return (self.rank,)
            case RankNumber.WORLD_SIZE:
                return self.world_size
            case RankNumber.LOCAL_RANK:
                return (self.local_rank,)


#: In the order in which they count; all numbers of a process are from the same launcher.
_LAUNCHERS: Final = (
    _Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK"),  # torchrun
    _Launcher("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
    _Launcher("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),  # MPICH and its kin
)


def number_or_none(kind: RankNumber) -> int | None:
    """The number that this process has; None: nobody says."""
    number = _number_of_torch(kind)
    if number is not None:
        return number
    for launcher in _LAUNCHERS:
        for variable in launcher.variables(kind):
            text = os.environ.get(variable, "")
            if text.isdecimal() and len(text) <= _MAX_DIGITS:
                return int(text)
        if launcher.rank in os.environ:
            return None
    return None


def number_of_process(given: int | None, kind: RankNumber) -> int:
    """A number as the caller has it, or else the one that this process has.

    Raises:
        InputError: neither is there.
    """
    number = number_or_none(kind) if given is None else given
    if number is None:
        raise InputError(
            f"${kind.value} is not set; start training with torchrun, srun or mpirun, which say "
            f"it, or give {kind.value.lower()}="
        )
    return number


def _number_of_torch(kind: RankNumber) -> int | None:
    """The number by torch.distributed, if that was initialized; it is not imported for this."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or kind is RankNumber.LOCAL_RANK:
        return None
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    is_rank = kind is RankNumber.RANK
    return int(distributed.get_rank() if is_rank else distributed.get_world_size())
