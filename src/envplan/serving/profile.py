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
import io
import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from envplan._files import parse_json, refuse_slip
from envplan.errors import InputError, shown
from envplan.profile import builtin_paths
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES, RequestClass, Slo, check_class
from envplan.serving.phases import Phases, steady
from envplan.serving.tables import Row, exists, read_bytes, read_rows

__all__ = [
    "BUILTIN",
    "Curve",
    "Segment",
    "ServingProfile",
    "builtin_folder",
    "builtin_names",
    "sidecar_path",
    "with_slos",
]

#: The serving profile that ships with envplan.
BUILTIN: Final = "h100-llama2-70b"

DEGREES: Final = (1, 2, 4, 8)
COLUMNS: Final = ("class", "tp", "frequency", "load", "ttft_s", "tbt_s")
ENERGY: Final = "energy_per_request_j"
POWER: Final = "power_w"
PHASE_COLUMNS: Final = ("tp", "frequency", "phase", "size", "time_s", "power_w")
_SOURCES: Final = ("measured", "identified", "modelled")
_FIELDS: Final = (  # of a sidecar
    "schema", "gpu", "model", "source", "modelled", "classes", "kv_tokens", "chunk_tokens"
)  # fmt: skip
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
    _content: bytes = field(default=b"", repr=False)

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

    @property
    def content(self) -> bytes:
        """The CSV's bytes."""
        return self._content

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ServingProfile:
        """Read and check a profile and, where there is one, its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        file = Path(path)
        content = read_bytes(file)
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
                f"there is no built-in serving profile {name!r}; there is: "
                f"{', '.join(builtin_names())}"
            )
        return cls.read_csv(builtin_folder() / f"{name}.csv")

    @classmethod
    def open(cls, path_or_name: str) -> ServingProfile:
        """The profile at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or no valid profile.
        """
        if exists(path_or_name):
            return cls.read_csv(path_or_name)
        if path_or_name in builtin_names():
            return cls.builtin(path_or_name)
        raise InputError(
            "no such file, and no built-in serving profile of that name; give the path of a CSV or "
            f"one of: {', '.join(builtin_names())}",
            path=path_or_name,
        )

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
    """The text of a profile CSV."""
    columns = ("class", "tp", "frequency", "load", ENERGY, POWER, "ttft_s", "tbt_s")
    stream = io.StringIO()
    stream.write(",".join(columns) + "\n")
    for row in rows:
        stream.write(",".join(str(row.get(column, "")) for column in columns) + "\n")
    return stream.getvalue()


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


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of a profile's CSV file is, if it has one."""
    return path.with_name(path.stem + ".meta.json")


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = parse_json(read_bytes(path), path)
    if not isinstance(document, dict):
        raise InputError("must hold one JSON object, {...}", path=path)
    for name in document.keys() - set(_FIELDS):
        refuse_slip(name, _FIELDS, path)
    return document


def _built(
    content: bytes, name: str, path: Path | None, sidecar: dict[str, Any], where: Path | None
) -> ServingProfile:
    classes = _classes(sidecar.get("classes", {}), where)
    texts = {key: _text(sidecar, key, where) for key in ("gpu", "model", "source", "modelled")}
    if texts["source"] not in (None, *_SOURCES):
        raise InputError(f"must be one of {', '.join(_SOURCES)}", path=where, column="source")
    header = content.split(b"\n", 1)[0].decode("utf-8", "replace")
    if "phase" in [name.strip() for name in header.split(",")]:
        phases = _read_phases(content, path, sidecar, where)
        curves = _curves_of(phases, classes)
    else:
        phases, curves = {}, _curves(content, path, classes)
    parts = {
        key: sidecar[key] for key in ("classes", "kv_tokens", "chunk_tokens") if key in sidecar
    }
    said = json.dumps(parts if phases else parts.get("classes", {}), sort_keys=True).encode()
    return ServingProfile(
        name=name,
        path=path,
        sha256=hashlib.sha256(content + b"\0" + said).hexdigest(),
        curves=curves,
        classes=classes,
        phases=phases,
        _content=content,
        **texts,
    )


def _text(sidecar: Mapping[str, Any], key: str, where: Path | None) -> str | None:
    value = sidecar.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"must be text, not {shown(value)}", path=where, column=key)
    return value


def _tokens_by_tp(sidecar: Mapping[str, Any], key: str, where: Path | None) -> dict[int, float]:
    """What a sidecar says for each TP, in tokens."""
    given = sidecar.get(key, {})
    good = isinstance(given, dict) and all(
        tp in map(str, DEGREES) and isinstance(value, int | float) and 0 < value < math.inf
        for tp, value in given.items()
    )
    if not good:
        raise InputError("must be an object of tokens above 0 by TP", path=where, column=key)
    return {int(tp): float(value) for tp, value in given.items()}


def _read_phases(
    content: bytes, path: Path | None, sidecar: Mapping[str, Any], where: Path | None
) -> dict[tuple[int, int], Phases]:
    room = _tokens_by_tp(sidecar, "kv_tokens", where)
    chunks = _tokens_by_tp(sidecar, "chunk_tokens", where)
    found: dict[tuple[int, int], dict[str, list[tuple[float, float, float]]]] = {}
    for row in read_rows(content, path, PHASE_COLUMNS):
        tp, phase = row.whole("tp"), row.text("phase")
        if tp not in DEGREES:
            raise row.error("tp", f"must be 1, 2, 4 or 8, not {tp}")
        if tp not in room:
            raise row.error("tp", f"the sidecar does not say in kv_tokens how much TP{tp} holds")
        if phase not in ("prefill", "decode", "idle"):
            raise row.error("phase", f"must be prefill, decode or idle, not {phase!r}")
        power = row.number("power_w")
        if power > _MOST_W * tp:
            raise row.error(
                POWER, f"means {power / tp:.0f} W on each GPU, which none draws; give W"
            )
        idle = phase == "idle"
        size = 0.0 if idle else row.number("size", above=True)
        point = (size, 0.0 if idle else row.number("time_s", above=True), power)
        rows = found.setdefault((tp, row.whole("frequency")), {}).setdefault(phase, [])
        if rows and size <= rows[-1][0]:
            raise row.error("size", f"must be above {rows[-1][0]:g}, the one before it")
        rows.append(point)
    if not found:
        raise InputError("has no rows", path=path)
    made = {}
    for (tp, clock), parts in sorted(found.items()):
        if missing := [phase for phase in ("prefill", "decode", "idle") if phase not in parts]:
            raise InputError(f"TP{tp} at {clock} MHz has no rows of {missing[0]}", path=path)
        columns = [
            np.array(c) for name in ("prefill", "decode") for c in zip(*parts[name], strict=True)
        ]
        chunk = int(chunks.get(tp, _CHUNK_TOKENS))
        tokens, prompt_s, prompt_w, batch, step_s, step_w = map(np.array, columns)
        made[tp, clock] = Phases(parts["idle"][0][2], tokens, prompt_s, prompt_w, batch, step_s,
                                 step_w, room[tp], chunk)  # fmt: skip
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


_CLASS_FIELDS: Final = ("input_tokens", "output_tokens", "ttft_slo_s", "tbt_slo_s", "shared_by")


def _classes(given: Any, where: Path | None) -> dict[str, RequestClass]:
    if not isinstance(given, dict):
        raise InputError("must be an object by class", path=where, column="classes")
    classes = dict(DEFAULT_CLASSES)
    for name, said in given.items():
        check_class(name, path=where, column="classes")
        if not isinstance(said, dict) or set(said) - set(_CLASS_FIELDS):
            raise InputError(
                f"must be an object with some of {', '.join(_CLASS_FIELDS)}",
                path=where,
                column=f"classes.{name}",
            )
        for key, value in said.items():
            positive = isinstance(value, int | float) and 0 < value < math.inf
            if not positive or isinstance(value, bool):
                raise InputError(
                    f"must be a number above 0, not {shown(value)}",
                    path=where,
                    column=f"classes.{name}.{key}",
                )
        usual = classes[name]
        classes[name] = RequestClass(
            name,
            said.get("input_tokens", usual.input_tokens),
            said.get("output_tokens", usual.output_tokens),
            Slo(said.get("ttft_slo_s", usual.slo.ttft_s), said.get("tbt_slo_s", usual.slo.tbt_s)),
            said.get("shared_by", 1.0),
        )
    return classes


class _Point(NamedTuple):
    load: float
    power: float
    ttft: float
    tbt: float
    line: int


def _curves(
    content: bytes, path: Path | None, classes: Mapping[str, RequestClass]
) -> dict[tuple[str, int, int], Curve]:
    points: dict[tuple[str, int, int], list[_Point]] = {}
    for row in read_rows(content, path, COLUMNS, (ENERGY, POWER)):
        if ENERGY not in row.cells and POWER not in row.cells:
            raise InputError(f"needs a column {ENERGY} or {POWER}", path=path, line=1)
        name = check_class(row.text("class"), path=path, line=row.line, column="class")
        tp, frequency = row.whole("tp"), row.whole("frequency")
        if tp not in DEGREES:
            raise row.error("tp", f"must be 1, 2, 4 or 8, not {tp}")
        known = points.setdefault((name, tp, frequency), [])
        _append(known, row, classes[name])
        _refuse_power(row, known[-1].power / tp)
    if not points:
        raise InputError("has no rows", path=path)
    _refuse_holes(points, path)
    return {
        key: Curve(
            *key,
            tuple(p.load for p in known),
            tuple(p.power for p in known),
            tuple(p.ttft for p in known),
            tuple(p.tbt for p in known),
        )
        for key, known in points.items()
    }


def _append(known: list[_Point], row: Row, request: RequestClass) -> None:
    load = row.number("load")
    for point in known:
        if point.load == load:
            raise row.error("load", f"is the same configuration and load as line {point.line}")
    if known and load < known[-1].load:
        raise row.error(
            "load",
            f"{load:g} comes after {known[-1].load:g} (line {known[-1].line}); the loads of a "
            "configuration must ascend",
        )
    power = _power(row, load, request)
    ttft, tbt = row.number("ttft_s", above=True), row.number("tbt_s", above=True)
    known.append(_Point(load, power, ttft, tbt, row.line))


def _power(row: Row, load: float, request: RequestClass) -> float:
    if row.blank(ENERGY) == row.blank(POWER):
        both = "both are blank" if row.blank(ENERGY) else "both are given"
        column = ENERGY if ENERGY in row.cells else POWER
        raise row.error(column, f"must be given, or {POWER} instead: {both}")
    if not row.blank(POWER):
        return row.number(POWER)
    if load == 0:
        raise row.error(ENERGY, f"means nothing without load; give {POWER} in this row")
    return row.number(ENERGY) * load / (request.tokens * request.shared_by)


def _refuse_power(row: Row, watts: float) -> None:
    """No GPU draws so much: some unit, or what the sidecar says of a class, is not what it was."""
    if watts <= _MOST_W:
        return
    if row.blank(ENERGY):
        raise row.error(POWER, f"means {watts:.0f} W on each GPU, which none draws; give W")
    sidecar = "the sidecar" if row.path is None else sidecar_path(row.path).name
    raise row.error(
        ENERGY,
        f"means {watts:.0f} W on each GPU, which none draws; {sidecar} must hold the class's mean "
        "lengths, and shared_by where requests share that energy",
    )


def _refuse_holes(points: Mapping[tuple[str, int, int], list[_Point]], path: Path | None) -> None:
    """A clock between two others, that other configurations have, must not be missing."""
    clocks = sorted({frequency for _, _, frequency in points})
    for name in CLASSES:
        for tp in DEGREES:
            mine = [f for f in clocks if (name, tp, f) in points]
            missing = [f for f in clocks if mine and mine[0] < f < mine[-1] and f not in mine]
            if missing:
                above = min(f for f in mine if f > missing[0])
                raise InputError(
                    f"the table has a hole: {name} on TP{tp} has rows below and above "
                    f"{missing[0]} MHz but none at it; measure it, or leave out what lies below",
                    path=path,
                    line=points[name, tp, above][0].line,
                    column="frequency",
                )
