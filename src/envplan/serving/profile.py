"""Serving profiles: what an instance draws and how fast it answers, by TP, clock and load.

A serving profile is a CSV file in one of two forms. By phases, one row for each measured point,

    tp,frequency,phase,size,time_s,power_w

    phase, size            prefill and a prompt's tokens; decode and the requests in the batch; idle
    time_s                 of the whole prompt, or of one decode step, s; 0 for idle
    power_w                W of the whole instance meanwhile

from which the loads of every class follow (`phases.steady`); the sidecar must say in
`kv_tokens` how many tokens of context fit into the memory of each TP. Or by class and load,

    class,tp,frequency,load,energy_per_request_j,power_w,ttft_s,tbt_s

    class                  SS, SM, ... LL
    tp                     GPUs of the instance: 1, 2, 4 or 8
    frequency              SM clock, MHz
    load                   tokens per second, input and output, through one instance
    energy_per_request_j   J; or, instead, in the same row or all of them,
    power_w                W of the whole instance
    ttft_s, tbt_s          time to first token, time between tokens, s

Between two loads, power and latencies are interpolated linearly; below the lowest they stay what
they are there, and above the highest there is nothing. A point that cannot meet its SLO may be left
out. A sidecar NAME.meta.json may say where the figures come from, and the mean lengths and SLOs of
the classes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from envplan._documents import parse_document, read_json
from envplan._files import atomic_write, exists, read_bounded, refuse_slip
from envplan._model import Model
from envplan._tables import MAX_TABLE_BYTES, Table, parse_table
from envplan.errors import InputError
from envplan.profile import builtin_paths
from envplan.profile.sidecar import sidecar_path
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES, RequestClass, Slo, check_class
from envplan.serving.phases import Phases, steady

__all__ = [
    "BUILTIN",
    "Curve",
    "Segment",
    "ServingProfile",
    "builtin_folder",
    "builtin_names",
    "with_slos",
]

#: The serving profile that ships with envplan.
BUILTIN: Final = "h100-llama2-70b"

DEGREES: Final = (1, 2, 4, 8)
ENERGY: Final = "energy_per_request_j"
POWER: Final = "power_w"
_CHUNK_TOKENS: Final = 1024  # of an iteration, where the sidecar says nothing
_FIRST_TOKENS: Final = 128.0
_MOST_W: Final = 5000.0  # on a GPU, W; far above any there is
_CLIP: Final = 1e6  # loads are cut to whole millionths of a token per second


class Segment(NamedTuple):
    """A stretch of load on which an instance's power is a straight line.

    Loads are in tokens/s, powers in W.
    """

    low: float
    high: float
    power_low: float
    power_high: float


@dataclass(frozen=True, eq=False)
class Curve:
    """One configuration: a class served by so many GPUs at a clock.

    Attributes:
        name: the class.
        tp: GPUs of the instance.
        frequency_mhz: SM clock, MHz.
        load: tokens/s, ascending, n >= 1 of them.
        power_w: W of the instance at these loads.
        ttft_s: time to first token, s.
        tbt_s: time between tokens, s.
    """

    name: str
    tp: int
    frequency_mhz: int
    load: tuple[float, ...]
    power_w: tuple[float, ...]
    ttft_s: tuple[float, ...]
    tbt_s: tuple[float, ...]

    @property
    def max_load(self) -> float:
        """The highest load it was measured at, tokens/s."""
        return self.load[-1]

    def power_at(self, load: float) -> float:
        """W at a load.

        Raises:
            InputError: the load lies beyond the highest measured one.
        """
        return self._at(load, self.power_w)

    def ttft_at(self, load: float) -> float:
        """Time to first token at a load, s. Raises as power_at."""
        return self._at(load, self.ttft_s)

    def tbt_at(self, load: float) -> float:
        """Time between tokens at a load, s. Raises as power_at."""
        return self._at(load, self.tbt_s)

    def meets(self, slo: Slo, load: float) -> bool:
        """Whether it meets the SLO at a load it was measured up to."""
        return (
            load <= self.max_load
            and self.ttft_at(load) <= slo.ttft_s
            and self.tbt_at(load) <= slo.tbt_s
        )

    def segments(self, slo: Slo) -> list[Segment]:
        """All loads at which it meets the SLO, as straight stretches in ascending order."""
        found = []
        if self.load[0] > 0 and self.meets(slo, self.load[0]):
            found.append(Segment(0.0, self.load[0], self.power_w[0], self.power_w[0]))
        for k in range(len(self.load) - 1):
            low, high = self.load[k], self.load[k + 1]
            begin, end = _within(self.ttft_s[k], self.ttft_s[k + 1], slo.ttft_s)
            first, last = _within(self.tbt_s[k], self.tbt_s[k + 1], slo.tbt_s)
            begin, end = max(begin, first), min(end, last)
            if begin >= end:
                continue
            # The next millionth inwards, so that the SLO is met there whatever the last bit says.
            first_in, last_in = (low + share * (high - low) for share in (begin, end))
            start = low if begin == 0 else (math.floor(first_in * _CLIP) + 1) / _CLIP
            stop = high if end == 1 else (math.ceil(last_in * _CLIP) - 1) / _CLIP
            if start < stop and self.meets(slo, start) and self.meets(slo, stop):
                found.append(Segment(start, stop, self.power_at(start), self.power_at(stop)))
        return found

    def capacity(self, slo: Slo) -> float:
        """The highest load, tokens/s, up to which it meets the SLO at every load; 0 if at none."""
        reached = 0.0
        for segment in self.segments(slo):
            if segment.low > reached:
                break
            reached = segment.high
        return reached

    def _at(self, load: float, values: Sequence[float]) -> float:
        if load > self.max_load:
            raise InputError(
                f"{self.name} on TP{self.tp} at {self.frequency_mhz} MHz was measured up to "
                f"{self.max_load:g} tokens/s, not at {load:g}"
            )
        k = bisect_right(self.load, load)
        if k == 0 or load == self.load[k - 1]:
            return values[max(0, k - 1)]
        share = (load - self.load[k - 1]) / (self.load[k] - self.load[k - 1])
        return values[k - 1] + share * (values[k] - values[k - 1])


def _within(at_low: float, at_high: float, most: float) -> tuple[float, float]:
    """The part of [0, 1] on which a straight line stays at or below `most`; empty: (1, 0)."""
    if at_low <= most and at_high <= most:
        return 0.0, 1.0
    if at_low > most and at_high > most:
        return 1.0, 0.0
    crossing = (most - at_low) / (at_high - at_low)
    return (0.0, crossing) if at_low <= most else (crossing, 1.0)


@dataclass(frozen=True, eq=False)
class ServingProfile:
    """A validated serving profile. Made by read_csv, builtin, open or from_rows.

    Attributes:
        name: the file's name without .csv.
        path: where it was read from; None when made by from_rows.
        sha256: hexadecimal digest of the CSV's bytes, and of what the sidecar says of classes.
        curves: by (class, tp, frequency in MHz).
        classes: lengths and SLOs of every class.
        gpu: name of the GPU, or None.
        model: name of the served model, or None.
        phases: by (tp, frequency in MHz); empty for a profile by class and load.
        source: "measured", "identified" (from measurements), "modelled" or None.
        modelled: what of it is modelled, in words.
        content: the CSV's bytes.
    """

    name: str
    path: Path | None
    sha256: str
    curves: Mapping[tuple[str, int, int], Curve]
    classes: Mapping[str, RequestClass]
    phases: Mapping[tuple[int, int], Phases] = field(default_factory=dict)
    gpu: str | None = None
    model: str | None = None
    source: str | None = None
    modelled: str | None = None
    content: bytes = field(default=b"", repr=False)

    def degrees(self, name: str) -> list[int]:
        """The TP degrees it has for a class, ascending."""
        return sorted({tp for known, tp, _ in self.curves if known == name})

    def frequencies(self, name: str, tp: int) -> list[int]:
        """The clocks it has for a class on so many GPUs, MHz, ascending."""
        return sorted(f for known, degree, f in self.curves if (known, degree) == (name, tp))

    def of(self, name: str) -> list[Curve]:
        """All configurations of a class, by TP and clock."""
        return [self.curves[key] for key in sorted(self.curves) if key[0] == name]

    def gaps(self) -> list[tuple[str, int, int]]:
        """Class, TP and clock of blanks that no SLO explains.

        Other configurations have this TP and this clock, and the class itself has rows with no more
        GPUs at no higher clock, which are slower.
        """
        degrees = sorted({tp for _, tp, _ in self.curves})
        clocks = sorted({clock for _, _, clock in self.curves})
        return [
            (name, tp, clock)
            for name in CLASSES
            for tp in degrees
            for clock in clocks
            if (name, tp, clock) not in self.curves
            and any(curve.tp <= tp and curve.frequency_mhz <= clock for curve in self.of(name))
        ]

    def phases_of(self, name: str, tp: int, frequency_mhz: int) -> Phases:
        """What an instance of a class's pool does, phase by phase."""
        if self.phases:
            return self.phases[tp, frequency_mhz]
        return _phases_of(self.curves[name, tp, frequency_mhz], self.classes[name])

    def with_lengths(self, means: Mapping[str, tuple[float, float]]) -> ServingProfile:
        """The profile for other mean lengths of classes, (input, output) in tokens.

        One by class and load stays as it is: it holds for the lengths it was measured with.
        """
        if not self.phases:
            return self
        classes = {
            name: replace(known, input_tokens=means[name][0], output_tokens=means[name][1])
            if name in means
            else known
            for name, known in self.classes.items()
        }
        return replace(self, classes=classes, curves=_curves_of(self.phases, classes))

    def energy_per_request(self, curve: Curve, load: float) -> float:
        """J per request at a load above 0, in the terms of the CSV's column."""
        known = self.classes[curve.name]
        return curve.power_at(load) * known.tokens * known.shared_by / load

    def energy_within_slo(self, curve: Curve, load: float) -> float | None:
        """As energy_per_request; None where the class's SLO is violated."""
        met = curve.meets(self.classes[curve.name].slo, load)
        return self.energy_per_request(curve, load) if met else None

    @property
    def sidecar(self) -> Path | None:
        """Its sidecar, if it has one."""
        found = None if self.path is None else sidecar_path(self.path)
        return found if found and found.is_file() else None

    def save_copy(self, path: Path) -> None:
        """Write the CSV as it is and, beside it, its sidecar.

        Raises:
            InputError: it cannot be written.
        """
        atomic_write(path, self.content)
        if self.sidecar is not None:
            atomic_write(sidecar_path(path), self.sidecar.read_bytes())

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ServingProfile:
        """Read and check a profile and, where there is one, its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        file = Path(path)
        content = read_bounded(file, MAX_TABLE_BYTES)
        sidecar = sidecar_path(file)
        return _built(content, file.stem, file, _read_sidecar(sidecar), sidecar)

    @classmethod
    def builtin(cls, name: str = BUILTIN) -> ServingProfile:
        """A serving profile that ships with envplan.

        Raises:
            InputError: there is none of that name.
        """
        if name not in builtin_names():
            raise InputError(
                "no such file, and no built-in serving profile of that name; give the path of a "
                f"CSV or one of: {', '.join(builtin_names())}",
                path=name,
            )
        return cls.read_csv(builtin_folder() / f"{name}.csv")

    @classmethod
    def open(cls, path_or_name: str) -> ServingProfile:
        """The profile at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or no valid profile.
        """
        return cls.read_csv(path_or_name) if exists(path_or_name) else cls.builtin(path_or_name)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        *,
        name: str = "serving",
        sidecar: Mapping[str, Any] | None = None,
    ) -> ServingProfile:
        """A profile of rows by column name; checked like a file.

        Raises:
            InputError: as for a file.
        """
        content = csv_text(rows).encode()
        return _built(content, name, None, dict(sidecar or {}), None)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a profile CSV by class and load."""
    columns = ("class", "tp", "frequency", "load", ENERGY, POWER, "ttft_s", "tbt_s")
    lines = [",".join(str(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join([",".join(columns), *lines]) + "\n"


def with_slos(profile: ServingProfile, slos: Mapping[str, Slo], scale: float) -> ServingProfile:
    """The profile with other SLOs: those given, and all of them `scale` times as long."""
    classes = {
        name: replace(known, slo=slos.get(name, known.slo).scaled(scale))
        for name, known in profile.classes.items()
    }
    return replace(profile, classes=classes)


def builtin_folder() -> Path:
    """Where the serving profiles and traces that ship with envplan lie."""
    return next(iter(builtin_paths().values())).parent / "serving"


def builtin_names() -> list[str]:
    """Names of the serving profiles that ship with envplan."""
    return sorted(
        path.name.removesuffix(".meta.json") for path in builtin_folder().glob("*.meta.json")
    )


Above = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, le=10**9)]
ByTp = dict[Literal["1", "2", "4", "8"], Above]


class _ClassFacts(Model):
    """What a sidecar says of a class; the rest is as in DEFAULT_CLASSES."""

    input_tokens: Above | None = None
    output_tokens: Above | None = None
    ttft_slo_s: Above | None = None
    tbt_slo_s: Above | None = None
    shared_by: Above = 1.0

    def request(self, name: str) -> RequestClass:
        """The class."""
        usual = DEFAULT_CLASSES[name]
        slo = Slo(self.ttft_slo_s or usual.slo.ttft_s, self.tbt_slo_s or usual.slo.tbt_s)
        given = self.input_tokens or usual.input_tokens
        return RequestClass(
            name, given, self.output_tokens or usual.output_tokens, slo, self.shared_by
        )


class _Sidecar(Model):
    """What is said beside a profile; further fields are left out."""

    model_config = ConfigDict(extra="ignore")

    gpu: str | None = None
    model: str | None = None
    source: Literal["measured", "identified", "modelled"] | None = None
    modelled: str | None = None
    classes: dict[str, _ClassFacts] = Field(default_factory=dict)
    kv_tokens: ByTp = Field(default_factory=dict)
    chunk_tokens: ByTp = Field(default_factory=dict)


class _Configuration(BaseModel):
    """What both forms of the table have."""

    tp: Whole = Field(description="1, 2, 4 or 8 GPUs")
    frequency: Whole = Field(description="an SM clock in whole MHz")


class _PhaseRow(_Configuration):
    phase: Literal["prefill", "decode", "idle"] = Field(description="a phase")
    size: Amount = Field(0.0, description="tokens of the prompt or requests in the batch")
    time_s: Amount = Field(0.0, description="s of the prompt or of a step")
    power_w: Amount = Field(description="W of the whole instance")


class _LoadRow(_Configuration):
    load: Amount = Field(description="tokens/s from 0 up")
    energy_per_request_j: Amount | None = Field(None, description="J of a request")
    power_w: Amount | None = Field(None, description="W of the whole instance")
    ttft_s: Above = Field(description="s to the first token, above 0")
    tbt_s: Above = Field(description="s between tokens, above 0")


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = read_json(path)
    for name in set(document if isinstance(document, dict) else ()) - {"schema"}:
        if name not in _Sidecar.model_fields:
            refuse_slip(name, list(_Sidecar.model_fields), path)
    return document  # type: ignore[no-any-return]


def _built(
    content: bytes, name: str, path: Path | None, sidecar: dict[str, Any], where: Path | None
) -> ServingProfile:
    said = parse_document(sidecar, _Sidecar, kind="sidecar of a serving profile", path=where)
    for known in said.classes:
        check_class(known, path=where, column="classes")
    classes = {**DEFAULT_CLASSES} | {k: facts.request(k) for k, facts in said.classes.items()}
    header = content.split(b"\n", 1)[0].decode("utf-8", "replace")
    phases: dict[tuple[int, int], Phases] = {}
    by_phase = "phase" in [column.strip() for column in header.split(",")]
    row: Any = _PhaseRow if by_phase else _LoadRow
    table = parse_table(content, row, path=path, kind="a serving profile")
    for k, tp in enumerate(table.columns["tp"]):
        if tp not in DEGREES:
            raise table.error(k, f"must be 1, 2, 4 or 8, not {tp}", "tp")
    if by_phase:
        phases = _read_phases(table, said)
        curves = _curves_of(phases, classes)
    else:
        curves = _read_curves(table, classes)
    parts = ("classes", "kv_tokens", "chunk_tokens") if by_phase else ("classes",)
    decisive: Any = {key: sidecar[key] for key in parts if key in sidecar}
    decisive = decisive if by_phase else decisive.get("classes", {})
    digest = json.dumps(decisive, sort_keys=True).encode()
    return ServingProfile(
        name=name,
        path=path,
        sha256=hashlib.sha256(content + b"\0" + digest).hexdigest(),
        curves=curves,
        classes=classes,
        phases=phases,
        content=content,
        gpu=said.gpu,
        model=said.model,
        source=said.source,
        modelled=said.modelled,
    )


def _read_phases(table: Table[Any], said: _Sidecar) -> dict[tuple[int, int], Phases]:
    found: dict[tuple[int, int], dict[str, list[tuple[float, float, float]]]] = {}
    for k, row in enumerate(table.rows()):
        if str(row.tp) not in said.kv_tokens:
            raise table.error(
                k, f"the sidecar does not say in kv_tokens how much TP{row.tp} holds", "tp"
            )
        _refuse_power(table, k, row.power_w / row.tp)
        rows = found.setdefault((row.tp, row.frequency), {}).setdefault(row.phase, [])
        if row.phase != "idle":
            for column in ("size", "time_s"):
                if not getattr(row, column):
                    raise table.error(k, "must be a number above 0", column)
            if rows and row.size <= rows[-1][0]:
                raise table.error(k, f"must be above {rows[-1][0]:g}, the one before it", "size")
        rows.append((row.size, row.time_s, row.power_w))
    made = {}
    for (tp, clock), parts in sorted(found.items()):
        if missing := [phase for phase in ("prefill", "decode", "idle") if phase not in parts]:
            raise InputError(f"TP{tp} at {clock} MHz has no rows of {missing[0]}", path=table.path)
        prompt, step = (tuple(np.array(parts[phase]).T) for phase in ("prefill", "decode"))
        chunk = int(said.chunk_tokens.get(str(tp), _CHUNK_TOKENS))  # type: ignore[call-overload]
        room = said.kv_tokens[str(tp)]  # type: ignore[index]
        made[tp, clock] = Phases(parts["idle"][0][2], *prompt, *step, room, chunk)  # type: ignore[call-arg]
    return made


def _curves_of(
    phases: Mapping[tuple[int, int], Phases], classes: Mapping[str, RequestClass]
) -> dict[tuple[str, int, int], Curve]:
    """Steady loads of every class in every configuration that has memory for its requests."""
    found = {}
    for name, request in classes.items():
        loads = {key: known for key, each in phases.items() if (known := steady(each, request))}
        for (tp, clock), known in loads.items():
            most = max(float(other.load[-1]) for (n, _), other in loads.items() if n == tp)
            columns = (tuple(map(float, values)) for values in known.points(most))
            found[name, tp, clock] = Curve(name, tp, clock, *columns)
    return found


def _phases_of(curve: Curve, request: RequestClass) -> Phases:
    """The phases that a class's loads imply, by Little's law; prompts as at the least load."""
    output = max(1.0, request.output_tokens - 1)
    load, tbt, power = (np.array(x) for x in (curve.load, curve.tbt_s, curve.power_w))
    batch = np.maximum.accumulate(load / request.tokens * output * tbt) + 1e-9 * np.arange(
        len(load)
    )
    first = np.array([curve.ttft_s[0]])
    most = max(2.0, math.ceil(batch[-1]))
    return Phases(
        curve.power_w[0], np.array([_FIRST_TOKENS]), first, power[-1:],
        np.append(batch, most + 1e-6), np.append(tbt, tbt[-1]), np.append(power, power[-1]),
        most * request.tokens, _CHUNK_TOKENS,
    )  # fmt: skip


def _read_curves(
    table: Table[Any], classes: Mapping[str, RequestClass]
) -> dict[tuple[str, int, int], Curve]:
    places: dict[tuple[str, int, int], list[int]] = {}
    loads, powers = table.columns["load"], []
    if "class" not in table.texts:
        raise InputError("has no column class", path=table.path, line=1)
    for k, row in enumerate(table.rows()):
        name = table.texts["class"][k]
        check_class(name, path=table.path, line=table.lines[k], column="class")
        mine = places.setdefault((name, row.tp, row.frequency), [])
        for other in mine:
            if loads[other] == row.load:
                raise table.error(
                    k, f"is the same configuration and load as line {table.lines[other]}", "load"
                )
        if mine and row.load < loads[mine[-1]]:
            raise table.error(
                k,
                f"{row.load:g} comes after {loads[mine[-1]]:g} (line {table.lines[mine[-1]]}); the "
                "loads of a configuration must ascend",
                "load",
            )
        mine.append(k)
        powers.append(_power(table, k, row, classes[name]))
        _refuse_power(table, k, powers[k] / row.tp)
    _refuse_holes(table, places)
    columns = (loads, powers, table.columns["ttft_s"], table.columns["tbt_s"])
    return {
        key: Curve(*key, *(tuple(column[k] for k in mine) for column in columns))
        for key, mine in places.items()
    }


def _power(table: Table[Any], k: int, row: Any, request: RequestClass) -> float:
    """W of the instance in a row."""
    energy, power = row.energy_per_request_j, row.power_w
    if (energy is None) == (power is None):
        both = "both are blank" if power is None else "both are given"
        column = ENERGY if ENERGY in table.texts else POWER
        raise table.error(k, f"must be given, or {POWER} instead: {both}", column)
    if power is not None:
        return float(power)
    if row.load == 0:
        raise table.error(k, f"means nothing without load; give {POWER} in this row", ENERGY)
    return float(energy * row.load / (request.tokens * request.shared_by))


def _refuse_power(table: Table[Any], k: int, watts: float) -> None:
    """No GPU draws so much: some unit, or what the sidecar says of a class, is not what it was."""
    if watts <= _MOST_W:
        return
    column, mend = POWER, "give W"
    if table.columns[POWER][k] is None:
        sidecar = "the sidecar" if table.path is None else sidecar_path(table.path).name
        column, mend = (
            ENERGY,
            (
                f"{sidecar} must hold the class's mean lengths, and shared_by where requests share "
                "that energy"
            ),
        )
    raise table.error(k, f"means {watts:.0f} W on each GPU, which none draws; {mend}", column)


def _refuse_holes(table: Table[Any], places: Mapping[tuple[str, int, int], list[int]]) -> None:
    """A clock between two others, that other configurations have, must not be missing."""
    clocks = sorted({frequency for _, _, frequency in places})
    for name, tp in sorted({key[:2] for key in places}):
        mine = [f for f in clocks if (name, tp, f) in places]
        if missing := [f for f in clocks if mine[0] < f < mine[-1] and f not in mine]:
            above = min(f for f in mine if f > missing[0])
            raise table.error(
                places[name, tp, above][0],
                f"the table has a hole: {name} on TP{tp} has rows below and above {missing[0]} "
                "MHz but none at it; measure it, or leave out what lies below",
                "frequency",
            )
