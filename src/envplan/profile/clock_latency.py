"""How late a GPU's clocks come after they are asked for, as a profile's sidecar states it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, Strict

__all__ = ["MAX_LATENCY_S", "ClockLatency", "SwitchLatency"]

#: Longest latency that a sidecar may state, s: as long as a request for a plan may.
MAX_LATENCY_S = 3600.0

Latency = Annotated[float, Strict(), Field(ge=0, le=MAX_LATENCY_S, allow_inf_nan=False)]
# A JSON object's names are text.
Clock = Annotated[int, Field(gt=0, lt=2**31)]


@dataclass(frozen=True, kw_only=True)
class ClockLatency:
    """From the request of a clock until the GPU runs at it.

    Attributes:
        median_s: of the changes to this clock, s.
        p95_s: their 95th percentile, s.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    median_s: Latency
    p95_s: Latency


@dataclass(frozen=True, kw_only=True)
class SwitchLatency:
    """How late each clock comes.

    Attributes:
        source: "measured" on this GPU, or from the "literature" on GPUs of its kind.
        by_mhz: by the clock that is changed to, MHz.
        reference: where a figure of the literature is from.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: Literal["measured", "literature"]
    by_mhz: Annotated[Mapping[Clock, ClockLatency], Field(min_length=1)]
    reference: str | None = None

    def largest_median_s(self, clocks_mhz: Iterable[int] = ()) -> float:
        """The one number to plan with, s: the largest median over the clocks in use.

        Args:
            clocks_mhz: clocks that plans use. Of the clocks with a latency those count that lie
                between the lowest and the highest of them; where there is none, all do.
        """
        used_mhz = list(clocks_mhz) or list(self.by_mhz)
        lowest, highest = min(used_mhz), max(used_mhz)
        between = [mhz for mhz in self.by_mhz if lowest <= mhz <= highest]
        return max(self.by_mhz[mhz].median_s for mhz in between or self.by_mhz)

    def to_dict(self) -> dict[str, JsonValue]:
        """The latencies in JSON types, clocks ascending."""
        document: dict[str, JsonValue] = {"source": self.source}
        if self.reference is not None:
            document["reference"] = self.reference
        document["by_mhz"] = {str(mhz): asdict(self.by_mhz[mhz]) for mhz in sorted(self.by_mhz)}
        return document
