"""Orders: which plan of its ladder a running job follows, from which iteration on.

An order is a small file, NAME.order.json ("envplan/order/v1"), that `envplan site --orders` writes
whole and that every rank of the job reads. It names an iteration a little ahead, so that all ranks
change at the same one.

`python -m tools.schemas` writes the JSON Schema of the format anew.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from envplan._io.documents import Document, Index, Seconds, Watts
from envplan.enforce.freqplan import Sha256

__all__ = ["MAX_ORDER_BYTES", "ORDER_SCHEMA", "Order"]

ORDER_SCHEMA: Final = "envplan/order/v1"
#: No order is longer; what is longer is none.
MAX_ORDER_BYTES: Final = 8192


class Order(Document):
    """What a job does from an iteration on."""

    kind: ClassVar[str] = "order"
    schema_name: ClassVar[str] = ORDER_SCHEMA

    schema_id: Literal["envplan/order/v1"] = Field(alias="schema")
    job: Annotated[str, Field(max_length=200)]
    plan_sha256: Sha256 = Field(
        description="of the plan.json that the job's frequency plan was made from"
    )
    sequence: Annotated[int, Field(ge=1, lt=2**62)] = Field(
        description="rises from each order of a job to the next"
    )
    from_iteration: Index | None = Field(
        None,
        description="the first iteration that follows it, counted from the start of the job's "
        "processes; absent: the one after it is read",
    )
    lead: Index = Field(
        0, description="how far ahead from_iteration was of the job when the order was written"
    )
    rung: Index = Field(description="0: the frequency plan itself; n: the n-th rung of its ladder")
    faster_rung: Index | None = Field(
        None, description="that some iterations follow instead, spread evenly"
    )
    faster_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="of iterations that follow faster_rung"
    )
    iteration_time_s: Seconds = Field(description="planned, the mean where two plans alternate")
    power_w: Watts = Field(description="planned, of the job's GPUs")

    @model_validator(mode="after")
    def _names_a_faster_rung(self) -> Self:
        if self.faster_rung is not None and self.faster_rung >= self.rung:
            raise ValueError("names a faster rung that is not before the other in the ladder")
        return self

    def rung_at(self, iteration: int) -> int:
        """The rung that an iteration follows; every rank comes to the same."""
        if self.faster_rung is None:
            return self.rung
        num_fast_before = math.floor(iteration * self.faster_share)
        num_fast_after = math.floor((iteration + 1) * self.faster_share)
        return self.faster_rung if num_fast_after > num_fast_before else self.rung
