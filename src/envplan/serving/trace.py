"""Traces: which requests come when, one by one; recorded, or made after what was recorded."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._io.files import named_file
from envplan.errors import InputError
from envplan.serving.builtin import WEEKS, builtin_folder, builtin_traces, week_shape_path
from envplan.serving.classes import (
    DEFAULT_CLASSES,
    ClassIndices,
    FloatArray,
    IntArray,
    RequestClasses,
)
from envplan.serving.profile import MeanLengths, ServingProfile
from envplan.serving.synthetic_week import draw_week, read_week_shape
from envplan.serving.trace_file import read_requests

#: Policies look at a trace in slots of this length, s.
SLOT_S: Final = 60.0
_REQUESTS_PER_PIECE: Final = 500_000  # counted at once, for memory
_LEAST_DURATION_S: Final = 1e-9  # a request at a slot's begin makes that slot part of the trace
_MIN_SHIFT_S: Final = 60.0  # of a copy that is laid over a trace
_MAX_SHIFT_S: Final = 600.0


class RequestLengths(NamedTuple):
    """Tokens of requests, (n,) each."""

    input_tokens: IntArray
    output_tokens: IntArray


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of time; arrays of one length.

    Attributes:
        name: the file's name without .csv and .gz.
        arrival_s: since the first of them, ascending.
        input_tokens: of each; None where the trace gives classes instead.
        output_tokens: the same.
        class_index: of each.
        provenance: how it was made, in words; None for one that is as it was recorded.
        covered_s: how long it covers; None: to the end of the last request's slot.
        cached_tokens: tokens at the begin of each input that an earlier request had, too; None
            where the trace does not say.
        num_failed: requests that failed when they were recorded, and are left out.
        classes: that `class_index` is of.
    """

    name: str
    arrival_s: FloatArray
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    class_index: ClassIndices
    provenance: str | None = None
    covered_s: float | None = None
    cached_tokens: IntArray | None = None
    num_failed: int = 0
    classes: RequestClasses = DEFAULT_CLASSES

    @property
    def duration_s(self) -> float:
        """From the beginning to the end of the last slot."""
        end_s = self.covered_s
        if not end_s:
            end_s = float(self.arrival_s[-1]) + _LEAST_DURATION_S
        return SLOT_S * max(1, math.ceil(end_s / SLOT_S))

    @property
    def num_slots(self) -> int:
        """Slots of its duration."""
        return round(self.duration_s / SLOT_S)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Requests by slot and class index, (slots, classes)."""
        num_classes = len(self.classes)
        counts = np.zeros(self.num_slots * num_classes, dtype=np.int64)
        for begin in range(0, len(self), _REQUESTS_PER_PIECE):
            piece = slice(begin, begin + _REQUESTS_PER_PIECE)
            slots = (self.arrival_s[piece] / SLOT_S).astype(np.int64)
            cells = slots * num_classes + self.class_index[piece]
            counts += np.bincount(cells, minlength=len(counts))
        return counts.reshape(self.num_slots, num_classes)

    def lengths(self, profile: ServingProfile) -> RequestLengths:
        """Tokens of each request's input and output; the class's means where none are stated."""
        if self.input_tokens is not None and self.output_tokens is not None:
            return RequestLengths(self.input_tokens, self.output_tokens)
        classes = profile.classes.to_list()
        inputs = _whole_tokens([request_class.input_tokens for request_class in classes])
        outputs = _whole_tokens([request_class.output_tokens for request_class in classes])
        return RequestLengths(inputs[self.class_index], outputs[self.class_index])

    def mean_lengths(self) -> dict[str, MeanLengths]:
        """Mean lengths of the requests of each class that comes, by class.

        Empty if the trace gives classes instead of lengths.
        """
        if self.input_tokens is None or self.output_tokens is None:
            return {}
        num_classes = len(self.classes)
        num_requests = np.bincount(self.class_index, minlength=num_classes)
        inputs = np.bincount(self.class_index, self.input_tokens, num_classes)
        outputs = np.bincount(self.class_index, self.output_tokens, num_classes)
        means = {}
        for index, name in enumerate(self.classes):
            count = num_requests[index]
            if count:
                means[name] = MeanLengths(inputs[index] / count, outputs[index] / count)
        return means

    def part(self, selection: npt.NDArray[np.bool_ | np.integer] | slice) -> Trace:
        """The requests that a mask, a slice or an array of indices selects, at the same times."""
        return replace(
            self,
            arrival_s=self.arrival_s[selection],
            input_tokens=None if self.input_tokens is None else self.input_tokens[selection],
            output_tokens=None if self.output_tokens is None else self.output_tokens[selection],
            class_index=self.class_index[selection],
            cached_tokens=None if self.cached_tokens is None else self.cached_tokens[selection],
            covered_s=self.duration_s,
        )

    def before(self, end_s: float) -> Trace:
        """The requests that come before a time."""
        return self.part(slice(int(np.searchsorted(self.arrival_s, end_s))))

    def scaled(self, factor: float, seed: int = 0) -> Trace:
        """The trace with so many times the requests: some left out, or shifted copies laid over it.

        A copy is shifted around the trace's end by a few minutes, so that bursts add up as those of
        independent users do, and the course of the day stays.
        """
        random = np.random.default_rng(seed)
        copies = [self.arrival_s]
        for _ in range(math.ceil(factor) - 1):
            shift_s = random.uniform(_MIN_SHIFT_S, _MAX_SHIFT_S)
            copies.append((self.arrival_s + shift_s) % self.duration_s)
        arrival_s = np.concatenate(copies)
        num_requests = max(1, round(factor * len(self)))
        selection = random.permutation(len(arrival_s))[:num_requests]
        by_time = np.argsort(arrival_s[selection], kind="stable")
        selection = selection[by_time]
        copied_request = selection % len(self)  # all copies have the requests in the same order
        return replace(
            self.part(copied_request),
            name=f"{self.name} x{factor:g}",
            arrival_s=arrival_s[selection],
            provenance=f"scaled by {factor:g}",
        )

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of all input tokens that begin as an earlier input does; None: not stated."""
        if self.cached_tokens is None or self.input_tokens is None:
            return None
        return float(self.cached_tokens.sum() / self.input_tokens.sum())

    def with_prefix_cache(self, kept_share: float) -> Trace:
        """The trace as a prefix cache leaves it: prompts without what the cache has.

        Args:
            kept_share: of the tokens that an earlier input had, too, those that are still cached.

        Raises:
            InputError: the trace does not say which inputs begin alike.
        """
        if self.cached_tokens is None or self.input_tokens is None or self.output_tokens is None:
            raise InputError(f"{self.name} does not say which prompts begin alike")
        hits = np.rint(kept_share * self.cached_tokens).astype(np.int32)
        input_tokens = self.input_tokens - hits
        return replace(
            self,
            input_tokens=input_tokens,
            class_index=self.classes.classify(input_tokens, self.output_tokens),
            cached_tokens=None,
            provenance=f"{hits.sum() / self.input_tokens.sum():.1%} of input tokens cached",
        )

    def in_classes(self, classes: RequestClasses) -> Trace:
        """The same requests in other classes.

        Raises:
            InputError: the trace gives classes, not lengths, and they are not these.
        """
        if classes.has_the_bounds_of(self.classes):
            return replace(self, classes=classes)
        if self.input_tokens is None or self.output_tokens is None:
            raise InputError(
                f"{self.name} gives classes instead of lengths: {', '.join(self.classes)}; they "
                f"are not those of the profile: {', '.join(classes)}"
            )
        class_index = classes.classify(self.input_tokens, self.output_tokens)
        return replace(self, class_index=class_index, classes=classes)

    @classmethod
    def read_csv(
        cls,
        path: str | os.PathLike[str],
        time_unit: str | None = None,
        classes: RequestClasses = DEFAULT_CLASSES,
    ) -> Trace:
        """Read and check a trace.

        Args:
            path: of a table or of JSON lines.
            time_unit: of numbers in its timestamps, such as "ms"; None: as its format has it.
            classes: of its requests.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        path = Path(path)
        requests = read_requests(path, time_unit, classes)
        return cls(
            name=re.sub(r"(\.csv|\.jsonl|\.json)?(\.gz)?$", "", path.name),
            arrival_s=requests.arrival_s,
            input_tokens=requests.input_tokens,
            output_tokens=requests.output_tokens,
            class_index=requests.class_index,
            covered_s=requests.duration_s,
            cached_tokens=requests.cached_tokens,
            num_failed=requests.num_failed,
            classes=classes,
        )

    @classmethod
    def open(
        cls,
        path_or_name: str,
        time_unit: str | None = None,
        classes: RequestClasses = DEFAULT_CLASSES,
    ) -> Trace:
        """The trace at a path or, where no such path exists, the built-in of that name.

        Args:
            path_or_name: of the trace.
            time_unit: as for read_csv.
            classes: of its requests.

        Raises:
            InputError: it is neither, or no valid trace.
        """
        path = named_file(path_or_name, builtin_traces(), "trace")
        if path_or_name in WEEKS and path.parent == builtin_folder():
            return make_week(path_or_name).in_classes(classes)
        return cls.read_csv(path, time_unit, classes)


def _whole_tokens(means: list[float]) -> IntArray:
    tokens: IntArray = np.maximum(1, np.rint(means)).astype(np.int32)
    return tokens


def make_week(name: str, *, days: float = 7.0, seed: int = 0) -> Trace:
    """A real-shaped week, or its first days; the same for the same seed.

    Args:
        name: one of WEEKS.
        days: how much of it.
        seed: of what is drawn.
    """
    hour = Trace.open(WEEKS[name])
    shape = read_week_shape(week_shape_path(name))
    week = draw_week(shape, hour.arrival_s, days=days, slot_s=SLOT_S, seed=seed)
    return replace(
        hour.part(week.hour_request),
        name=name,
        arrival_s=week.arrival_s,
        provenance=(
            f"real-shaped: the digitized minutes of the week, made of the minutes of {hour.name}"
        ),
        covered_s=week.num_minutes * SLOT_S,
    )
