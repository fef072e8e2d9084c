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
        """The layout of a plan's job.

        Args:
            tp: default: all GPUs of a stage that cp leaves. Where the plan is for one GPU a stage,
                any number, as all GPUs of a stage do the same.
            cp: default: all GPUs of a stage that tp leaves; 1 where neither is given. Likewise.
            dp: default: the job's replicas; any number where the plan is for one.
            rank_order: see the class; a dimension of size 1 may be left out.

        Raises:
            InputError: a size is below 1 or not what the plan is for, which the message says with
                what would fit; or the order is no such order.
        """
        for name, size in (("tp", tp), ("cp", cp), ("dp", dp)):
            if size is not None and size < 1:
                raise InputError(f"--{name} must be at least 1, not {size}")
        each = job.gpus_per_stage
        inner_tp = tp if tp is not None else max(1, each // (cp or 1))
        inner_cp = cp if cp is not None else max(1, each // inner_tp)
        if inner_tp * inner_cp != each and each > 1:
            raise InputError(
                f"--tp {inner_tp} and --cp {inner_cp} make {inner_tp * inner_cp} GPUs a stage, but "
                f"the plan is for {each}: tp times cp must be {each}; or solve again with "
                f"--tp {inner_tp} --cp {inner_cp}"
            )
        if dp is not None and dp != job.replicas and job.replicas > 1:
            raise InputError(
                f"--dp {dp} does not fit the plan, which is for --dp {job.replicas}; or solve "
                f"again with --dp {dp}"
            )
        replicas = job.replicas if dp is None else dp
        layout = cls(
            stages=job.stages, tp=inner_tp, cp=inner_cp, dp=replicas, rank_order=rank_order
        )
        layout.check_order()
        return layout

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.stages * self.tp * self.cp * self.dp

    @property
    def pipelines(self) -> list[int]:
        """For each global rank, which of the data-parallel pipelines it belongs to."""
        return [self.place(rank).get("dp", 0) for rank in range(self.world_size)]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension."""
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.stages}

    def check_order(self) -> None:
        """That rank_order names every dimension once that has a size to be laid out.

        Raises:
            InputError: it does not.
        """
        names, sizes = self.rank_order.split("-"), self.sizes
        wrong = [f"has {name!r}, which is no dimension" for name in names if name not in sizes]
        wrong += [f"names {name} twice" for name in names if names.count(name) > 1]
        wrong += [
            f"leaves out {name}, which has {size} ranks"
            for name, size in sizes.items()
            if size > 1 and name not in names
        ]
        if wrong:
            usable = "it must be a permutation of tp-cp-ep-dp-pp, innermost first"
            raise InputError(f"--rank-order {wrong[0]}; {usable}")

    def place(self, rank: int) -> dict[str, int]:
        """Where a global rank from 0 to world_size - 1 is in each dimension that the order has."""
        found = {}
        for name in self.rank_order.split("-"):
            rank, found[name] = divmod(rank, self.sizes[name])
        return found

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a global rank."""
        return self.place(rank).get("pp", 0)
