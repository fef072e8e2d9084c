"""Which global rank of a training job runs which pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from envplan._io.documents import Model
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Job

__all__ = ["DEFAULT_RANK_ORDER", "Topology"]

#: Megatron-LM's own order, innermost first: ranks next to each other share a tensor-parallel group.
DEFAULT_RANK_ORDER: Final = "tp-cp-ep-dp-pp"

_Size = Annotated[int, Field(ge=1, lt=2**31)]


class Topology(Model):
    """How a job's ranks are laid out over the dimensions it is parallel in.

    Attributes:
        stages: pipeline stages, the size of `pp`.
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size. Expert parallelism divides these ranks further without moving them
            to another stage, so `ep` counts as 1.
        rank_order: names of the dimensions joined by "-", that of neighbouring ranks first, as
            Megatron-LM's `order`.
    """

    stages: _Size
    tp: _Size
    cp: _Size
    dp: _Size
    rank_order: str

    @classmethod
    def for_job(
        cls,
        job: Job,
        *,
        tp: int | None = None,
        cp: int | None = None,
        dp: int | None = None,
        rank_order: str = DEFAULT_RANK_ORDER,
    ) -> Topology:
        """The layout of the ranks of a plan's job.

        Args:
            job: the plan's.
            tp: default: all GPUs of a stage divided by cp. Where the plan is for one GPU a stage,
                any number, as all GPUs of a stage do the same.
            cp: default: all GPUs of a stage divided by tp, and 1 where neither is given. Where the
                plan is for one GPU a stage, any number.
            dp: default: the job's replicas; any number where the plan is for one.
            rank_order: see the class; a dimension of size 1 may be left out.

        Returns:
            The layout, whose order is checked.

        Raises:
            InputError: a size is below 1 or not what the plan is for, which the message says with
                what would fit; or the order is no such order.
        """
        for name, size in (("tp", tp), ("cp", cp), ("dp", dp)):
            if size is not None and size < 1:
                raise InputError(f"--{name} must be at least 1, not {size}")
        tp_size, cp_size = _sizes_within_a_stage(job.gpus_per_stage, tp, cp)
        topology = cls(
            stages=job.stages,
            tp=tp_size,
            cp=cp_size,
            dp=_data_parallel_size(job.replicas, dp),
            rank_order=rank_order,
        )
        topology.check_order()
        return topology

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.stages * self.tp * self.cp * self.dp

    @property
    def pipelines(self) -> list[int]:
        """The data-parallel pipeline of each global rank, (world_size,)."""
        return [self.coordinates(rank).get("dp", 0) for rank in range(self.world_size)]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension, by its name."""
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.stages}

    def check_order(self) -> None:
        """Check that rank_order names every dimension once that has more than one rank.

        Raises:
            InputError: it does not.
        """
        problem = self._order_problem()
        if problem is not None:
            raise InputError(
                f"the rank order (--rank-order) {problem}; it must name tp, cp, ep, dp and pp once "
                "each, innermost first, as in tp-cp-ep-dp-pp; dimensions of size 1 may be left out"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank in each dimension that rank_order names.

        Args:
            rank: from 0 to world_size - 1.
        """
        coordinates = {}
        for name in self.rank_order.split("-"):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return coordinates

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a global rank."""
        return self.coordinates(rank).get("pp", 0)

    def _order_problem(self) -> str | None:
        names = self.rank_order.split("-")
        for name in names:
            if name not in self.sizes:
                return f"has {name!r}, which is no dimension"
        for name in names:
            if names.count(name) > 1:
                return f"names {name} twice"
        for name, size in self.sizes.items():
            if size > 1 and name not in names:
                return f"leaves out {name}, which has {size} ranks"
        return None


def _sizes_within_a_stage(gpus_per_stage: int, tp: int | None, cp: int | None) -> tuple[int, int]:
    """The tensor-parallel and the context-parallel size, each derived where it is not given.

    Raises:
        InputError: together they do not use the GPUs that the plan has for a stage.
    """
    tp_size = tp if tp is not None else max(1, gpus_per_stage // (cp or 1))
    cp_size = cp if cp is not None else max(1, gpus_per_stage // tp_size)
    if tp_size * cp_size != gpus_per_stage and gpus_per_stage > 1:
        raise InputError(
            f"--tp {tp_size} and --cp {cp_size} make {tp_size * cp_size} GPUs a stage, but "
            f"the plan is for {gpus_per_stage}: tp times cp must be {gpus_per_stage}; or solve "
            f"again with --tp {tp_size} --cp {cp_size}"
        )
    return tp_size, cp_size


def _data_parallel_size(replicas: int, dp: int | None) -> int:
    """The data-parallel size that is given, or else the plan's.

    Raises:
        InputError: the plan is for several replicas, and for another number of them.
    """
    if dp is not None and dp != replicas and replicas > 1:
        raise InputError(
            f"--dp {dp} does not fit the plan, which is for --dp {replicas}; or solve "
            f"again with --dp {dp}"
        )
    return replicas if dp is None else dp
