"""Formats of traces: whose columns are called what, in which unit times are, and which rows failed.

A format is one entry of FORMATS; adding one touches this file only. A file is of the first format
whose columns are all there, with small or capital letters. The last one is our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

TIMESTAMP: Final = "timestamp"
CLASS: Final = "class"
INPUT_TOKENS: Final = "input_tokens"
OUTPUT_TOKENS: Final = "output_tokens"
REQUESTS: Final = "requests"
PREFIX_HASHES: Final = "prefix_hashes"
ERROR: Final = "error"

#: Units that timestamps may be in, and their seconds.
TIME_UNITS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """How somebody writes traces.

    Attributes:
        name: who.
        columns: our name of each column that a file must have, by theirs; the timestamp is called
            so in most.
        optional_columns: the same of those that it may have.
        time_unit: of numbers in the timestamp, a key of TIME_UNITS; None: the format does not say.
        no_output_is_failure: whether a row without output tokens is a request that failed.
        block_tokens: tokens of input that each prefix hash stands for.
        lists_by_field: whether a file is one JSON object with a list for each column.
    """

    name: str
    columns: Mapping[str, str]
    optional_columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    no_output_is_failure: bool = False
    block_tokens: int = 0
    lists_by_field: bool = False

    @property
    def all_columns(self) -> Mapping[str, str]:
        """Our name of each column that a file of the format may have, by theirs."""
        return {**self.columns, **self.optional_columns}

    def fits(self, names: Iterable[str]) -> bool:
        """Whether a file with columns of these names is of this format."""
        lower = {name.lower() for name in names}
        return all(name.lower() in lower for name in self.columns)

    def our_name(self, written: str) -> str:
        """Our name of a column, or its own in small letters."""
        lower = written.lower()
        ours = {name.lower(): our for name, our in self.all_columns.items()}
        return ours.get(lower, lower)


#: Our own: seconds, or dates; a class, or lengths; counts, or a row for each request.
OWN: Final = TraceFormat(
    name="envplan",
    columns={TIMESTAMP: TIMESTAMP},
    optional_columns={name: name for name in (CLASS, INPUT_TOKENS, OUTPUT_TOKENS, REQUESTS)},
)

FORMATS: Final = (
    TraceFormat(
        name="Azure",
        columns={
            "TIMESTAMP": TIMESTAMP,
            "ContextTokens": INPUT_TOKENS,
            "GeneratedTokens": OUTPUT_TOKENS,
        },
    ),
    TraceFormat(
        name="BurstGPT",
        columns={
            "Timestamp": TIMESTAMP,
            "Request tokens": INPUT_TOKENS,
            "Response tokens": OUTPUT_TOKENS,
        },
        time_unit="s",
        no_output_is_failure=True,
    ),
    TraceFormat(
        name="Mooncake",
        columns={
            "timestamp": TIMESTAMP,
            "input_length": INPUT_TOKENS,
            "output_length": OUTPUT_TOKENS,
        },
        optional_columns={"hash_ids": PREFIX_HASHES},
        time_unit="ms",
        block_tokens=512,
    ),
    TraceFormat(
        name="ServeGen",
        columns={
            "request_id": "request_id",
            "timestamp": TIMESTAMP,
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        time_unit="s",
    ),
    TraceFormat(
        name="vLLM",
        columns={
            "start_times": TIMESTAMP,
            "input_lens": INPUT_TOKENS,
            "output_lens": OUTPUT_TOKENS,
        },
        optional_columns={"errors": ERROR},
        time_unit="s",
        no_output_is_failure=True,
        lists_by_field=True,
    ),
    TraceFormat(
        name="Vidur",
        columns={
            "arrived_at": TIMESTAMP,
            "num_prefill_tokens": INPUT_TOKENS,
            "num_decode_tokens": OUTPUT_TOKENS,
        },
        time_unit="s",
    ),
    TraceFormat(
        name="splitwise-sim",
        columns={
            "arrival_timestamp": TIMESTAMP,
            "prompt_size": INPUT_TOKENS,
            "token_size": OUTPUT_TOKENS,
        },
        time_unit="s",
    ),
    OWN,
)


def format_of(names: Iterable[str]) -> TraceFormat | None:
    """The format of a file with columns of these names; None: of none."""
    known = list(names)
    return next((candidate for candidate in FORMATS if candidate.fits(known)), None)


def all_names() -> list[str]:
    """What any format calls columns."""
    return [name for candidate in FORMATS for name in candidate.all_columns]
