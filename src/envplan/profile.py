"""Stage profiles: what every operation costs at every frequency, read and checked once.

A profile is a CSV file with one row per option,

    stage,instruction,frequency,time,energy        int, str, MHz, s, J (per GPU, per operation)

the format that Zeus's pipeline frequency optimizer reads, so that its files work unchanged.
Optional columns are `config` (a free label for a second knob), `time_std`, `energy_std` and
`samples`; other columns are ignored. Rows whose instruction is `blocking` give the power of a GPU
that waits for a neighbour. A sidecar NAME.meta.json beside NAME.csv may say where it comes from.

Times and energies become integers (ns, fJ) here, and everything after this module trusts them.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._files import atomic_write, decimal, parse_json, read_bounded, refuse_slip
from envplan.adjustments import DEFAULT_BACKWARD_INPUT_SHARE, Adjustments, adjusted_tables
from envplan.errors import InputError, shown
from envplan.units import MAX_INTEGER, fj_from_j, ns_from_s

__all__ = [
    "BLOCKING",
    "INSTRUCTIONS",
    "CostCurve",
    "OptionTable",
    "Profile",
    "ProfileMetadata",
    "builtin_profiles",
    "cost_curve",
]

IntArray = npt.NDArray[np.int64]

#: Instructions that schedules know. A profile may hold others: any identifier will do.
INSTRUCTIONS: Final = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
    "load",
    "recompute",
    "all_reduce",
)

#: The instruction name of rows that give the power while waiting; not an operation.
BLOCKING: Final = "blocking"

#: Field of a sidecar that says, if it is true, that `backward` rows include recomputation.
INCLUDES_RECOMPUTATION: Final = "recompute"

_SPLIT_BACKWARD: Final = frozenset({"backward_input", "backward_weight"})
_COLUMNS: Final = ("stage", "instruction", "frequency", "time", "energy")
_SPREAD_COLUMNS: Final = ("time_std", "energy_std", "samples")
#: What was measured, in a profile whose times and energies were smoothed.
RAW_COLUMNS: Final = ("raw_time", "raw_energy")
_SOME_STAGES_ONLY: Final = frozenset({"optimizer", "load", "recompute", "all_reduce", BLOCKING})

_MAX_BYTES: Final = 256 * 2**20
_MAX_TIME_S: Final = 1e9
_MAX_ENERGY_J: Final = 9e3
_MAX_FREQUENCY_MHZ: Final = 1_000_000
_MAX_STAGE: Final = 1_000_000


@dataclass(frozen=True, eq=False)
class OptionTable:
    """All options of one instruction on one stage, sorted by time, energy, falling frequency.

    Attributes:
        stage: 0-based stage of the profile.
        instruction: its name.
        frequency_mhz: SM clock of each option, MHz, shape (n,); 0 where no clock is controlled.
        config: label of the second knob of each option, n of them, "" where there is none.
        time_ns: ns, shape (n,), ascending.
        energy_fj: fJ, shape (n,).
    """

    stage: int
    instruction: str
    frequency_mhz: IntArray
    config: tuple[str, ...]
    time_ns: IntArray
    energy_fj: IntArray

    def __len__(self) -> int:
        return len(self.config)

    @property
    def max_frequency_option(self) -> int:
        """Index of the row with the highest frequency; of several, the fastest, then cheapest."""
        return int(np.argmax(self.frequency_mhz))  # the first of equals, and rows are sorted so


@dataclass(frozen=True, eq=False)
class CostCurve:
    """Effective cost of an operation against its duration, under a blocking power.

    The effective cost of an option is its energy minus what the GPU would draw anyway if it
    waited that long: c = e - P t (as in Perseus, SOSP 2024). It may be negative.

    Attributes:
        option: indices into the table of its Pareto options, shape (p,).
        time_ns: their times, ns, shape (p,), strictly ascending.
        cost_fj: their effective costs, fJ, shape (p,), strictly descending.
        hull_time_ns: vertices of the lower convex hull, ns, shape (k + 1,), slowest first.
        hull_slope_uw: marginal cost of going from vertex j to the faster vertex j + 1, uW (fJ per
            ns saved), shape (k,), positive and strictly ascending, rounded down.
        base_cost_fj: the curve's value at its slowest vertex, fJ.
    """

    option: IntArray
    time_ns: IntArray
    cost_fj: IntArray
    hull_time_ns: IntArray
    hull_slope_uw: IntArray
    base_cost_fj: int


def cost_curve(
    table: OptionTable, blocking_power_uw: int, power_limit_uw: int | None = None
) -> CostCurve:
    """Pareto options of a table by time and effective cost, and their lower convex hull.

    Exact: all comparisons are made in unbounded integers.

    Args:
        table: the options, n >= 1 of them.
        blocking_power_uw: power of the waiting GPU, uW, not negative.
        power_limit_uw: leave out options of more average power than this, uW; at least one has
            less. None: take them all.

    Returns:
        The curve. No option within the limit lies below it.

    Raises:
        InputError: costs or slopes do not fit the integer range.
    """
    times: list[int] = table.time_ns.tolist()
    costs = [
        energy - blocking_power_uw * time
        for energy, time in zip(table.energy_fj.tolist(), times, strict=True)
    ]
    if min(costs) < -MAX_INTEGER:
        raise _out_of_range(table, "waiting as long as its slowest option takes costs too much")

    energies: list[int] = table.energy_fj.tolist()
    pareto: list[int] = []
    for index, cost in enumerate(costs):
        if power_limit_uw is not None and energies[index] > power_limit_uw * times[index]:
            continue
        if not pareto or cost < costs[pareto[-1]]:
            pareto.append(index)

    # Why rounding slopes down keeps the curve below every option: on the hull, the cost at a
    # duration d is the cost at D_0 plus the sum of slope x length over the segments between D_0
    # and d. The lengths are positive, so replacing each slope by its floor cannot raise the sum,
    # and the hull itself is below every option. Floors of ascending slopes ascend, so the curve
    # stays convex. Segments of equal floor are one straight line: merging them changes nothing.
    # A floor of zero can only come first, where the curve then is level at the cost of D_0: the
    # segment is dropped, D_0 moves to its faster end and the base cost stays.
    hull = _lower_hull([(times[i], costs[i]) for i in pareto])
    base_time, base_cost = hull[-1]
    vertices, slopes = [base_time], list[int]()
    for (fast_time, fast_cost), (slow_time, slow_cost) in reversed(list(itertools.pairwise(hull))):
        slope = (fast_cost - slow_cost) // (slow_time - fast_time)
        if slope == 0 or (slopes and slope == slopes[-1]):
            vertices[-1] = fast_time
        else:
            slopes.append(slope)
            vertices.append(fast_time)
    if slopes and slopes[-1] > MAX_INTEGER:
        raise _out_of_range(table, "two options of nearly the same time differ too much in energy")

    return CostCurve(
        option=_frozen(pareto),
        time_ns=_frozen([times[i] for i in pareto]),
        cost_fj=_frozen([costs[i] for i in pareto]),
        hull_time_ns=_frozen(vertices),
        hull_slope_uw=_frozen(slopes),
        base_cost_fj=base_cost,
    )


def _lower_hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Vertices of the lower hull of points of strictly ascending time (Andrew's monotone chain)."""
    hull: list[tuple[int, int]] = []
    for time, cost in points:
        while len(hull) >= 2:
            (t0, c0), (t1, c1) = hull[-2:]
            if (c1 - c0) * (time - t0) < (cost - c0) * (t1 - t0):
                break
            hull.pop()
        hull.append((time, cost))
    return hull


def _out_of_range(table: OptionTable, reason: str) -> InputError:
    return InputError(
        f"stage {table.stage} {table.instruction}: {reason} for exact 64-bit arithmetic; check "
        "that times are in seconds, energies in joules and the blocking power in watts"
    )


def _frozen(values: Sequence[int]) -> IntArray:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class ProfileMetadata:
    """What the sidecar NAME.meta.json says about a profile; None where it says nothing.

    Attributes:
        gpu: name of the GPU; of several, their names with "and" between them.
        stage_gpus: for each stage the name of its GPU, where the sidecar's `gpu` is a list.
        driver: its driver's version.
        source: "measured" or "modelled".
        workload: what was run.
        microbatch_size: samples per microbatch.
        tensor_parallel: tensor-parallel degree the rows were taken at.
        date: when, ISO 8601.
        envplan_version: what wrote the file.
        schedule: default pipeline schedule for this profile.
        num_microbatches: default number of microbatches.
        extra: all other fields of the sidecar.
    """

    gpu: str | None = None
    driver: str | None = None
    source: str | None = None
    workload: str | None = None
    microbatch_size: int | None = None
    tensor_parallel: int | None = None
    date: str | None = None
    envplan_version: str | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    stage_gpus: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def gpu_of(self, stage: int) -> str | None:
        """Name of the GPU that a stage of the profile was measured on."""
        return self.gpu if self.stage_gpus is None else self.stage_gpus[stage]

    @classmethod
    def read_json(cls, path: str | os.PathLike[str]) -> ProfileMetadata:
        """The metadata of a sidecar file; an empty one where there is no such file.

        Raises:
            InputError: the file cannot be read, is not a JSON object, a field has a wrong type, or
                one that it has is nearly one that decides how plans are made.
        """
        if not _exists(path):
            return cls()
        try:
            document = parse_json(read_bounded(path, _MAX_BYTES), path)
        except InputError as error:
            raise InputError(
                f"{error.message}; mend it or delete it, a sidecar is optional",
                path=path,
                line=error.line,
                column=error.column,
            ) from None
        if not isinstance(document, dict):
            raise InputError("must hold one JSON object, {...}", path=path)
        _refuse_unwritable(document, path)
        gpus = _gpu_list(document.get("gpu"), path)
        if gpus is not None:
            document["gpu"] = " and ".join(dict.fromkeys(gpus))
        known = {name: _known_field(name, document.pop(name, None), path) for name in _FIELDS}
        if not isinstance(document.get(INCLUDES_RECOMPUTATION, False), bool):
            raise InputError("must be true or false", path=path, column=INCLUDES_RECOMPUTATION)
        for name in document.keys() - set(_DECISIVE):
            refuse_slip(name, _DECISIVE, path)
        return cls(**known, stage_gpus=gpus, extra=document)

    def to_json(self) -> str:
        """The sidecar's text; fields that say nothing are left out."""
        known = {name: getattr(self, name) for name in _FIELDS}
        document = {name: value for name, value in known.items() if value is not None}
        if self.stage_gpus is not None:
            document["gpu"] = list(self.stage_gpus)
        return json.dumps(document | dict(self.extra), indent=2, ensure_ascii=False) + "\n"


_INTEGER_FIELDS: Final = frozenset({"microbatch_size", "tensor_parallel", "num_microbatches"})
#: Fields that plans and their labels depend on.
_DECISIVE: Final = ("schedule", "num_microbatches", "gpu", "source", INCLUDES_RECOMPUTATION)
_FIELDS: Final = tuple(
    f.name for f in dataclasses.fields(ProfileMetadata) if f.name not in ("stage_gpus", "extra")
)


def _refuse_unwritable(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """What is read here is written again with what is made from the profile."""
    try:
        json.dumps(document, indent=2, allow_nan=False)
    except (ValueError, RecursionError):
        raise InputError("has a number beyond 1e308, or is nested too deeply", path=path) from None


def _gpu_list(value: object, path: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """The names in a list of GPUs; None where `gpu` is no list."""
    if not isinstance(value, list):
        return None
    if not value or not all(isinstance(name, str) and name for name in value):
        raise InputError("must name one GPU, or list one for each stage", path=path, column="gpu")
    return tuple(value)


def _known_field(name: str, value: object, path: str | os.PathLike[str]) -> Any:
    if value is None:
        return None
    if name in _INTEGER_FIELDS:
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            return value
        raise InputError(
            f"must be a positive whole number, not {shown(value)}", path=path, column=name
        )
    if not isinstance(value, str):
        raise InputError(f"must be text, not {shown(value)}", path=path, column=name)
    if name == "source" and value not in ("measured", "modelled"):
        raise InputError(
            f'must be "measured" or "modelled", not {shown(value)}', path=path, column=name
        )
    return value


class Profile:
    """A validated stage profile.

    Made by read_csv, builtin, open or from_rows, never directly.

    Attributes:
        num_stages: S; the profile's stages are 0 .. S - 1.
        instructions: names of its operations, known ones first; `blocking` is not one of them.
        name: the file's name without .csv.
        path: where it was read from, None when made by from_rows.
        sha256: hexadecimal digest of the CSV's bytes.
        metadata: what the sidecar says.
        blocking_power_w: W per stage, the mean of energy / time over the stage's `blocking` rows;
            a stage without such rows takes the mean of those that have some. None where the
            file has no such rows at all.
        adjustments: what was derived from the file's rows; nothing unless `adjusted` made this.
    """

    def __init__(
        self,
        content: bytes,
        *,
        name: str,
        path: Path | None,
        metadata: ProfileMetadata,
    ) -> None:
        rows = _read_rows(content, path)
        self.num_stages = _check_stages(rows, path)
        self.instructions = _check_instructions(rows, self.num_stages, path)
        self.name = name
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.metadata = metadata
        gpus = metadata.stage_gpus
        if gpus is not None and len(gpus) != self.num_stages:
            raise InputError(
                f"its sidecar lists {len(gpus)} GPUs for {self.num_stages} stages; list one for "
                "each, or name one for all",
                path=path,
                column="gpu",
            )
        self.blocking_power_w = _blocking_power(rows, self.num_stages)
        self.adjustments = Adjustments()
        self._content = content
        self._tables = _tables(rows)
        self._measured = self._tables
        self._spreads = {
            (row.stage, row.instruction, row.frequency, row.config): row.time_std_s / row.time_s
            for row in rows
            if row.time_std_s is not None
        }

    def __repr__(self) -> str:
        return f"Profile({self.name!r}, num_stages={self.num_stages})"

    @property
    def sidecar(self) -> Path | None:
        """Where its sidecar is, if it has one; None when made by from_rows."""
        return None if self.path is None else _sidecar(self.path)

    def has(self, stage: int, instruction: str) -> bool:
        """Whether the profile times this instruction on this stage."""
        return (stage, instruction) in self._tables

    def time_spread(
        self, stage: int, instruction: str, frequency: int, config: str = ""
    ) -> float | None:
        """Standard deviation of a row's time by column `time_std`, as a fraction of that time.

        None where the file does not say, or the row was derived from others.
        """
        if self.adjustments:
            return None
        return self._spreads.get((stage, instruction, frequency, config))

    def table(self, stage: int, instruction: str) -> OptionTable:
        """The options of an instruction on a stage.

        Raises:
            InputError: the profile has none.
        """
        table = self._tables.get((stage, instruction))
        if table is not None:
            return table
        if not 0 <= stage < self.num_stages:
            raise InputError(
                f"profile {self.name} has stages 0 to {self.num_stages - 1}, no stage {stage}",
                path=self.path,
            )
        present = [name for name in self.instructions if self.has(stage, name)]
        remedy = "profile that instruction too or choose another schedule"
        if instruction in _SPLIT_BACKWARD and "backward" in present:
            remedy += ", or derive it: Profile.adjusted(backward_input_share=0.5)"
        elif instruction == "backward" and set(present) >= _SPLIT_BACKWARD:
            remedy += ", or add them up: Profile.adjusted(join_backward=True)"
        raise InputError(
            f"profile {self.name} has no rows for {instruction} on stage {stage}, only for "
            f"{', '.join(present)}; {remedy}",
            path=self.path,
        )

    def adjusted(
        self,
        recompute: bool = False,
        backward_input_share: float | None = None,
        *,
        join_backward: bool = False,
    ) -> Profile:
        """This profile with what can be derived from its rows, and what it was derived with.

        Name, sha256 and what save_csv writes stay those of the measured rows. Adjustments do not
        add up: they are those of the last call.

        Args:
            recompute: add, at equal frequency and config, the time and energy of each stage's
                forward (of its `recompute` rows, where it has some) to its backward, to
                backward_input where that is split.
            backward_input_share: where the profile lacks `backward_input` or `backward_weight`,
                make it of `backward`: this share of its time and energy at each frequency is
                backward_input, the rest backward_weight. None: do not.
            join_backward: where the profile lacks `backward`, make it the sum of both.

        Raises:
            InputError: the share is not between 0 and 1, rows to be added have no frequency and
                config in common (names the stage), or the file says that recomputation is in it
                already.
        """
        if recompute and self.metadata.extra.get(INCLUDES_RECOMPUTATION):
            raise InputError(
                f"profile {self.name} says that its backward includes recomputation already; leave "
                "--recompute out",
                path=self.path,
            )
        adjustments = Adjustments(recompute, backward_input_share, join_backward)
        other = copy.copy(self)
        other.adjustments = adjustments
        other._tables = adjusted_tables(self._measured, adjustments)
        names = dict.fromkeys((*self.instructions, *(name for _, name in other._tables)))
        other.instructions = _known_first(name for name in names if name != BLOCKING)
        return other

    def fitted(self, instructions: Iterable[str], *, recompute: bool = False) -> Profile:
        """This profile, adjusted as far as operations of these instructions need it.

        A backward that is split although the profile has only the whole is assumed to be half
        `backward_input`; one that is whole although the profile has only the parts is their sum.

        Args:
            recompute: as for adjusted.

        Raises:
            InputError: as for adjusted.
        """
        needed = set(instructions)

        def lacks(instruction: str) -> bool:
            stages = range(self.num_stages)
            return any((stage, instruction) not in self._measured for stage in stages)

        split = any(name in needed and lacks(name) for name in _SPLIT_BACKWARD)
        return self.adjusted(
            recompute,
            DEFAULT_BACKWARD_INPUT_SHARE if split else None,
            join_backward="backward" in needed and lacks("backward"),
        )

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> Profile:
        """Read and check a profile and, where there is one, its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        file = Path(path)
        content = read_bounded(file, _MAX_BYTES)
        metadata = ProfileMetadata.read_json(_sidecar(file))
        return cls(content, name=file.stem, path=file, metadata=metadata)

    @classmethod
    def builtin(cls, name: str) -> Profile:
        """A profile that ships with envplan, by name.

        Raises:
            InputError: there is none of that name; the message lists those there are.
        """
        paths = builtin_paths()
        if name not in paths:
            raise InputError(
                f"there is no built-in profile named {name!r}; there are: {', '.join(paths)}"
            )
        return cls.read_csv(paths[name])

    @classmethod
    def open(cls, path_or_name: str | os.PathLike[str]) -> Profile:
        """The profile at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or the file is not a valid profile.
        """
        if _exists(path_or_name):
            return cls.read_csv(path_or_name)
        paths = builtin_paths()
        name = os.fspath(path_or_name)
        if name in paths:
            return cls.read_csv(paths[name])
        raise InputError(
            "no such file, and no built-in profile of that name; give the path of a profile CSV "
            f"or one of: {', '.join(paths)}",
            path=path_or_name,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Sequence[Any]],
        *,
        columns: Sequence[str] = (*_COLUMNS, "config"),
        name: str = "profile",
        metadata: ProfileMetadata | None = None,
    ) -> Profile:
        """A profile of rows in memory, checked like a file.

        Args:
            rows: tuples of stage, instruction, frequency (MHz), time (s), energy (J) and, if need
                be, config; or whatever `columns` says. They may stop early, after energy say.
            columns: names of the values in each row; only those any row reaches are written.
            name: the profile's name.
            metadata: what the sidecar shall say.

        Raises:
            InputError: as in read_csv; lines count from the header, as in the saved file.
        """
        listed = [tuple(row) for row in rows]
        width = max((len(row) for row in listed), default=len(_COLUMNS))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns[:width])
        writer.writerows([_plain(value) for value in row] for row in listed)
        return cls(
            text.getvalue().encode("utf-8"),
            name=name,
            path=None,
            metadata=metadata or ProfileMetadata(),
        )

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, byte for byte as it was read or made, and its sidecar.

        Each of the two files appears whole or not at all.

        Raises:
            InputError: the folder is missing or not writable.
        """
        atomic_write(path, self._content)
        atomic_write(_sidecar(Path(path)), self.metadata.to_json())


def builtin_profiles() -> list[Profile]:
    """The profiles that ship with envplan, by name."""
    return [Profile.read_csv(path) for path in builtin_paths().values()]


def builtin_paths() -> dict[str, Path]:
    """Where the profiles that ship with envplan lie, by name."""
    # An installed package carries the folder; a source or editable checkout has it at its top.
    installed = Path(str(files("envplan") / "profiles"))
    checkout = Path(__file__).resolve().parents[2] / "profiles"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.csv"))}


def read_cells(path: Path) -> list[dict[str, str]]:
    """The text of every cell of a profile's rows, by column.

    Raises:
        InputError: it is no such table.
    """
    content = read_bounded(path, _MAX_BYTES)
    return [dict(cells.texts) for cells in _read_cells(_decoded(content, path), path)]


def _sidecar(path: Path) -> Path:
    return path.with_name(path.stem + ".meta.json")


def _exists(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name too long for the file system, or no name at all
        return False


def _plain(value: object) -> object:
    """A float as the shortest decimal that reads back the same, without an exponent."""
    if isinstance(value, float) and math.isfinite(value):
        return np.format_float_positional(value, trim="-")
    return value


class _Row(NamedTuple):
    line: int
    stage: int
    instruction: str
    frequency: int
    config: str
    time_s: float
    energy_j: float
    time_std_s: float | None


@dataclass(frozen=True)
class _Cells:
    """The text of one line by column name, and how to complain about it."""

    path: Path | None
    line: int
    texts: Mapping[str, str]

    def error(self, column: str, message: str) -> InputError:
        return InputError(message, path=self.path, line=self.line, column=column)

    def number(self, column: str, meaning: str) -> float:
        text = self.texts[column]
        if not text:
            raise self.error(column, f"is empty; expected {meaning}")
        try:
            value = decimal(text)
        except ValueError:
            message = f"{_shown(text)} is not a number; expected {meaning}"
            raise self.error(column, message) from None
        if math.isinf(value) and re.search(r"\d", text):
            raise self.error(column, f"{_shown(text)} overflows the range; expected {meaning}")
        if not math.isfinite(value):
            raise self.error(column, f"{_shown(text)} is not finite; expected {meaning}")
        return value

    def whole(self, column: str, meaning: str, largest: int) -> int:
        value = self.number(column, meaning)
        text = _shown(self.texts[column])
        if not value.is_integer():
            raise self.error(column, f"{text} is not a whole number; expected {meaning}")
        if value < 0:
            raise self.error(column, f"{text} is negative; expected {meaning}")
        if value > largest:
            raise self.error(column, f"{text} is above the limit of {largest}; expected {meaning}")
        return int(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _read_rows(content: bytes, path: Path | None) -> list[_Row]:
    """Every data line of a profile, each value checked by itself and for duplicates."""
    lines = _read_cells(_decoded(content, path), path)
    rows: list[_Row] = []
    seen: dict[tuple[int, str, int, str], int] = {}
    for cells in lines:
        row = _parse_row(cells)
        first = seen.setdefault((row.stage, row.instruction, row.frequency, row.config), row.line)
        if first != row.line:
            label = f" config {row.config}" if row.config else ""
            raise InputError(
                f"repeats line {first}: stage {row.stage} {row.instruction} at {row.frequency} "
                f"MHz{label}; keep one of the two, or tell them apart in a config column",
                path=path,
                line=row.line,
            )
        rows.append(row)
    if not rows:
        raise InputError("has a header but no rows; profile the stages first", path=path)
    return rows


def _decoded(content: bytes, path: Path | None) -> str:
    expected = f"expected a CSV file with the header {','.join(_COLUMNS)}"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if not text.strip():
        raise InputError(f"is empty; {expected}", path=path)
    if "\0" in text:
        raise InputError(f"is not UTF-8 text; {expected}", path=path)
    if text.lstrip().startswith(("{", "[")):
        raise InputError(f"is JSON, not CSV; {expected}", path=path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_cells(text: str, path: Path | None) -> list[_Cells]:
    """The non-blank lines below the header."""
    skipped = text[: len(text) - len(text.lstrip())].count("\n")
    table = _split(text.lstrip(), skipped, path)
    header = [name.strip() for name in table[0]]
    _check_header(header, skipped + 1, path)
    lines: list[_Cells] = []
    for line, values in enumerate(table[1:], start=skipped + 2):
        texts = {name: value.strip() for name, value in zip(header, values, strict=True)}
        if any(texts.values()):
            lines.append(_Cells(path, line, texts))
    return lines


def _split(text: str, skipped: int, path: Path | None) -> list[list[str]]:
    """Lines and cells of a CSV text; `skipped` lines of the file come before it."""
    import pandas as pd

    try:
        frame = pd.read_csv(
            io.StringIO(text),
            header=None,
            dtype=object,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except pd.errors.ParserError as error:
        message = str(error)
        if ragged := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
            expected, line, found = map(int, ragged.groups())
            raise InputError(
                f"has {found} values where the header has {expected}; check its commas",
                path=path,
                line=line + skipped,
            ) from error
        if quote := re.search(r"EOF inside string starting at row (\d+)", message):
            raise InputError(
                "opens a quote that is never closed",
                path=path,
                line=int(quote[1]) + 1 + skipped,
            ) from error
        raise InputError(f"is not a CSV file ({message.strip()})", path=path) from error
    table: list[list[str]] = frame.to_numpy().tolist()
    for line, values in enumerate(table, start=skipped + 1):
        if any("\n" in value for value in values):
            raise InputError("has a quoted value with a line break in it", path=path, line=line)
    return table


def _check_header(header: list[str], line: int, path: Path | None) -> None:
    for name in _COLUMNS:
        if name not in header:
            found = _shown(",".join(header))
            raise InputError(
                f"the column is missing from the header {found}; a profile needs "
                f"{','.join(_COLUMNS)}",
                path=path,
                line=line,
                column=name,
            )
    for name in (*_COLUMNS, "config", *_SPREAD_COLUMNS, *RAW_COLUMNS):
        if header.count(name) > 1:
            raise InputError(
                "the header names this column twice; remove one",
                path=path,
                line=line,
                column=name,
            )


def _parse_row(cells: _Cells) -> _Row:
    instruction = cells.texts["instruction"]
    if not instruction.isidentifier():
        raise cells.error(
            "instruction",
            f"{_shown(instruction)} is not a name; expected one such as forward or backward",
        )
    for column in _SPREAD_COLUMNS:
        if cells.texts.get(column) and cells.number(column, "a number or nothing") < 0:
            raise cells.error(column, "is negative; expected a number from 0 up or nothing")
    for column, parse in (("raw_time", _parse_time), ("raw_energy", _parse_energy)):
        if cells.texts.get(column):
            parse(cells, column)
    return _Row(
        line=cells.line,
        stage=cells.whole("stage", "a stage number from 0 up", _MAX_STAGE),
        instruction=instruction,
        frequency=cells.whole(
            "frequency", "an SM clock in MHz, or 0 for a constant time", _MAX_FREQUENCY_MHZ
        ),
        config=cells.texts.get("config", ""),
        time_s=_parse_time(cells),
        energy_j=_parse_energy(cells),
        time_std_s=cells.number("time_std", "seconds") if cells.texts.get("time_std") else None,
    )


def _parse_time(cells: _Cells, column: str = "time") -> float:
    value = cells.number(column, "seconds above 0")
    shown = _shown(cells.texts[column])
    if value <= 0:
        raise cells.error(column, f"{shown} is not above 0; expected the seconds it takes")
    if value > _MAX_TIME_S:
        raise cells.error(
            column, f"{shown} overflows the integer range (1e9 s); expected seconds, check the unit"
        )
    if ns_from_s(value) == 0:
        raise cells.error(column, f"{shown} is below a nanosecond; expected seconds")
    return value


def _parse_energy(cells: _Cells, column: str = "energy") -> float:
    value = cells.number(column, "joules from 0 up")
    shown = _shown(cells.texts[column])
    if value < 0:
        raise cells.error(column, f"{shown} is negative; expected joules from 0 up")
    if value > _MAX_ENERGY_J:
        raise cells.error(
            column,
            f"{shown} overflows the integer range (9000 J an operation); expected joules, check "
            "the unit",
        )
    return value


def _check_stages(rows: Sequence[_Row], path: Path | None) -> int:
    stages = {row.stage for row in rows}
    for expected in range(len(stages)):
        if expected not in stages:
            beyond = next(row for row in rows if row.stage > expected)
            raise InputError(
                f"stage {expected} has no rows but stage {beyond.stage} has; stages must be "
                "numbered 0, 1, 2, ... without gaps",
                path=path,
                line=beyond.line,
                column="stage",
            )
    return len(stages)


def _check_instructions(
    rows: Sequence[_Row], num_stages: int, path: Path | None
) -> tuple[str, ...]:
    """Names of all operations, known ones first, once every stage is seen to have what it needs."""
    names: dict[str, None] = dict.fromkeys(row.instruction for row in rows)
    present = {(row.stage, row.instruction) for row in rows}
    needed = {"forward"} | (names.keys() - _SOME_STAGES_ONLY)
    if not {"backward_input", "backward_weight"} <= needed:
        needed.add("backward")
    for stage in range(num_stages):
        lacking = sorted(name for name in needed if (stage, name) not in present)
        if lacking:
            raise InputError(
                f"stage {stage} has no rows for {', '.join(lacking)}; every stage needs "
                f"{', '.join(sorted(needed))} (backward may be split on all stages into "
                "backward_input and backward_weight)",
                path=path,
                column="instruction",
            )
    return _known_first(name for name in names if name != BLOCKING)


def _known_first(names: Iterable[str]) -> tuple[str, ...]:
    listed = list(names)
    known = [name for name in INSTRUCTIONS if name in listed]
    return (*known, *(name for name in listed if name not in INSTRUCTIONS))


def _blocking_power(rows: Sequence[_Row], num_stages: int) -> tuple[float, ...] | None:
    samples: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.instruction == BLOCKING:
            samples[row.stage].append(row.energy_j / row.time_s)
    if not samples:
        return None
    means = {stage: math.fsum(powers) / len(powers) for stage, powers in samples.items()}
    elsewhere = math.fsum(means.values()) / len(means)
    return tuple(means.get(stage, elsewhere) for stage in range(num_stages))


def _tables(rows: Sequence[_Row]) -> dict[tuple[int, str], OptionTable]:
    groups: defaultdict[tuple[int, str], list[tuple[int, int, int, str]]] = defaultdict(list)
    for row in rows:
        groups[row.stage, row.instruction].append(
            (ns_from_s(row.time_s), fj_from_j(row.energy_j), -row.frequency, row.config)
        )
    tables = {}
    for (stage, instruction), options in sorted(groups.items()):
        options.sort()
        tables[stage, instruction] = OptionTable(
            stage=stage,
            instruction=instruction,
            frequency_mhz=_frozen([-option[2] for option in options]),
            config=tuple(option[3] for option in options),
            time_ns=_frozen([option[0] for option in options]),
            energy_fj=_frozen([option[1] for option in options]),
        )
    return tables
