"""Serving profiles: what an instance draws and how fast it answers, by TP, clock and load.

A serving profile is a CSV file in one of two forms; docs/serving.md ("Your own profile") has their
columns and units. By phases, one row for each measured point of prefill, decode or idle,

    tp,frequency,phase,size,time_s,power_w

from which the loads of every class follow (`phases.steady`); the sidecar must say in
`kv_tokens` how many tokens of context fit into the memory of each TP. Or by class and load,

    class,tp,frequency,load,energy_per_request_j,power_w,ttft_s,tbt_s

with an energy or a power in each row. Loads are tokens/s, input and output, through one instance.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from envplan._files import atomic_write, named_file, read_bounded, refuse_slip
from envplan._model import Model, parse_document, read_json
from envplan._tables import MAX_TABLE_BYTES, Table, parse_table
from envplan.errors import InputError
from envplan.profile import builtin_paths
from envplan.profile.sidecar import sidecar_path
from envplan.serving.classes import CLASSES, Class, RequestClass, Slo, check_class, filled
from envplan.serving.phases import FloatArray, Phases, steady

#: The serving profile that ships with envplan.
BUILTIN: Final = "h100-llama2-70b"

_CHUNK_TOKENS: Final = 1024  # of an iteration, where the sidecar says nothing
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the highest load at any clock
_KIND: Final = "a serving profile"
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
    load: FloatArray
    power_w: FloatArray
    ttft_s: FloatArray
    tbt_s: FloatArray

    @property
    def max_load(self) -> float:
        """The highest load it was measured at, tokens/s."""
        return float(self.load[-1])

    def power_at(self, load: float) -> float:
        """W at a load.

        Raises:
            InputError: the load lies beyond the highest measured one.
        """
        if load > self.max_load:
            raise InputError(
                f"{self.name} on TP{self.tp} at {self.frequency_mhz} MHz was measured up to "
                f"{self.max_load:g} tokens/s, not at {load:g}"
            )
        return float(np.interp(load, self.load, self.power_w))

    def latencies_at(self, load: float) -> tuple[float, float]:
        """Time to first token and between tokens at a load up to the highest measured one, s."""
        ttft, tbt = (np.interp(load, self.load, values) for values in (self.ttft_s, self.tbt_s))
        return float(ttft), float(tbt)

    def meets(self, slo: Slo, load: float) -> bool:
        """Whether it meets the SLO at a load it was measured up to."""
        ttft, tbt = self.latencies_at(load)
        return load <= self.max_load and ttft <= slo.ttft_s and tbt <= slo.tbt_s

    def segments(self, slo: Slo) -> list[Segment]:
        """All loads at which it meets the SLO, as straight stretches in ascending order."""
        found = []
        loads, powers = self.load.tolist(), self.power_w.tolist()
        if loads[0] > 0 and self.meets(slo, loads[0]):
            found.append(Segment(0.0, loads[0], powers[0], powers[0]))
        latencies = ((self.ttft_s.tolist(), slo.ttft_s), (self.tbt_s.tolist(), slo.tbt_s))
        for k, (low, high) in enumerate(pairwise(loads)):
            parts = [_within(values[k], values[k + 1], most) for values, most in latencies]
            begin, end = max(first for first, _ in parts), min(last for _, last in parts)
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
    """A validated serving profile. Made by read_csv, builtin or open.

    Attributes:
        name: the file's name without .csv.
        path: where it was read from.
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
    path: Path
    sha256: str
    curves: Mapping[tuple[str, int, int], Curve]
    classes: Mapping[str, RequestClass]
    phases: Mapping[tuple[int, int], Phases] = field(default_factory=dict)
    gpu: str | None = None
    model: str | None = None
    source: str | None = None
    modelled: str | None = None

    def of(self, name: str, tp: int | None = None) -> list[Curve]:
        """All configurations of a class, or those on so many GPUs, by TP and clock."""
        keys = [key for key in sorted(self.curves) if key[0] == name and tp in (None, key[1])]
        return [self.curves[key] for key in keys]

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

    def needed_for(self, request: str, pool: str) -> float:
        """Tokens of load that a token of a class becomes in another's pool.

        A request counts there as one of the pool's own, so by the ratio of their mean lengths.
        """
        return self.classes[pool].tokens / self.classes[request].tokens

    def with_lengths(self, means: Mapping[str, tuple[float, float]]) -> ServingProfile:
        """The profile, one by phases, for other mean lengths of classes.

        Args:
            means: (input, output) of some classes, tokens.
        """
        classes = dict(self.classes)
        for name, (given, made) in means.items():
            lengths = {"input_tokens": given, "output_tokens": made}
            classes[name] = classes[name].model_copy(update=lengths)
        return replace(self, classes=classes, curves=_curves_of(self.phases, classes))

    def with_slos(self, slos: Mapping[str, Slo], scale: float = 1.0) -> ServingProfile:
        """The profile with other SLOs: those given, and all of them `scale` times as long."""
        classes = {}
        for name, known in self.classes.items():
            slo = slos.get(name, known.slo)
            scaled = {"ttft_slo_s": slo.ttft_s * scale, "tbt_slo_s": slo.tbt_s * scale}
            classes[name] = known.model_copy(update=scaled)
        return replace(self, classes=classes)

    def energy_per_request(self, curve: Curve, load: float) -> float:
        """J per request at a load above 0, in the terms of the CSV's column."""
        known = self.classes[curve.name]
        return curve.power_at(load) * known.tokens * known.shared_by / load

    @property
    def sidecar(self) -> Path | None:
        """Its sidecar, if it has one."""
        found = sidecar_path(self.path)
        return found if found.is_file() else None

    def save_copy(self, path: Path) -> None:
        """Write the CSV as it is and, beside it, its sidecar.

        Raises:
            InputError: it cannot be written.
        """
        atomic_write(path, self.path.read_bytes())
        if self.sidecar is not None:
            atomic_write(sidecar_path(path), self.sidecar.read_bytes())

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ServingProfile:
        """Read and check a profile and, where there is one, its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        path = Path(path)
        content, where = read_bounded(path, MAX_TABLE_BYTES), sidecar_path(path)
        sidecar = read_json(where) if where.is_file() else {}
        said = parse_document(sidecar, _Sidecar, kind="sidecar of a serving profile", path=where)
        for name in sidecar.keys() - {"schema", *_Sidecar.model_fields}:
            refuse_slip(name, list(_Sidecar.model_fields), where)
        header = content.split(b"\n", 1)[0].decode("utf-8", "replace")
        phases: dict[tuple[int, int], Phases] = {}
        if "phase" in [column.strip() for column in header.split(",")]:
            phases = _read_phases(parse_table(content, _PhaseRow, path=path, kind=_KIND), said)
            curves = _curves_of(phases, said.classes)
            parts = ("classes", "kv_tokens", "chunk_tokens")
            decisive = {part: sidecar[part] for part in parts if part in sidecar}
        else:
            table = parse_table(content, _LoadRow, path=path, kind=_KIND)
            curves = _read_curves(table, said.classes)
            decisive = sidecar.get("classes", {})
        digest = json.dumps(decisive, sort_keys=True).encode()
        sha256 = hashlib.sha256(content + b"\0" + digest).hexdigest()
        known = said.model_dump(include={"gpu", "model", "source", "modelled"})
        profile = cls(path.stem, path, sha256, curves, said.classes, phases, **known)
        for name, tp, clock in [] if phases else profile.gaps():
            mine = [curve.frequency_mhz for curve in profile.of(name, tp)]
            if mine and mine[0] < clock < mine[-1]:
                raise InputError(
                    f"the table has a hole: {name} on TP{tp} has rows below and above {clock} MHz "
                    "but none at it; measure it, or leave out what lies below",
                    path=path,
                    column="frequency",
                )
        return profile

    @classmethod
    def builtin(cls, name: str = BUILTIN) -> ServingProfile:
        """A serving profile that ships with envplan."""
        return cls.read_csv(builtin_profiles()[name])

    @classmethod
    def open(cls, path_or_name: str) -> ServingProfile:
        """The profile at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or no valid profile.
        """
        return cls.read_csv(named_file(path_or_name, builtin_profiles(), "serving profile"))


def builtin_folder() -> Path:
    """Where the serving profiles and traces that ship with envplan lie."""
    return next(iter(builtin_paths().values())).parent / "serving"


def builtin_profiles() -> dict[str, Path]:
    """The serving profiles that ship with envplan, by name."""
    sidecars = sorted(builtin_folder().glob("*.meta.json"))
    names = [path.name.removesuffix(".meta.json") for path in sidecars]
    return {name: builtin_folder() / f"{name}.csv" for name in names}


Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0)]
Tp = Annotated[Literal["1", "2", "4", "8"], AfterValidator(int)]
ByTp = dict[Tp, Above]


class _Sidecar(Model):
    """What is said beside a profile; further fields are left out."""

    model_config = ConfigDict(extra="ignore")

    gpu: str | None = None
    model: str | None = None
    source: Literal["measured", "identified", "modelled"] | None = None
    modelled: str | None = None
    classes: Annotated[dict[Class, RequestClass], BeforeValidator(filled)] = Field(
        default_factory=dict, validate_default=True
    )
    kv_tokens: ByTp = Field(default_factory=dict)
    chunk_tokens: ByTp = Field(default_factory=dict)


class _Configuration(BaseModel):
    """What both forms of the table have."""

    tp: Tp = Field(description="1, 2, 4 or 8 GPUs")
    frequency: Annotated[int, Field(ge=1, le=10**9)] = Field(description="an SM clock, whole MHz")


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


def _grouped(table: Table[Any], keys: Iterable[Any], along: str) -> dict[Any, list[int]]:
    """The rows of each configuration, which `keys` tells of every row; a column ascends in it."""
    found: dict[Any, list[int]] = {}
    values = table.columns[along]
    for k, key in enumerate(keys):
        mine = found.setdefault(key, [])
        if mine and values[k] <= values[mine[-1]]:
            raise table.error(
                k,
                f"must be above {values[mine[-1]]:g}, which line {table.lines[mine[-1]]} has for "
                "the same configuration",
                along,
            )
        mine.append(k)
    return found


def _read_phases(table: Table[Any], said: _Sidecar) -> dict[tuple[int, int], Phases]:
    columns = table.columns
    for k, row in enumerate(table.rows()):
        if row.tp not in said.kv_tokens:
            raise table.error(
                k, f"the sidecar does not say in kv_tokens how much TP{row.tp} holds", "tp"
            )
        _refuse_power(table, k, row.power_w / row.tp)
        for column in ("size", "time_s") if row.phase != "idle" else ():
            if not getattr(row, column):
                raise table.error(k, "must be a number above 0", column)
    keys = zip(columns["tp"], columns["frequency"], columns["phase"], strict=True)
    rows = _grouped(table, keys, "size")
    made = {}
    for tp, clock in sorted({key[:2] for key in rows}):
        found: list[Any] = []
        for phase in ("idle", "prefill", "decode"):
            if (mine := rows.get((tp, clock, phase))) is None:
                raise InputError(f"TP{tp} at {clock} MHz has no rows of {phase}", path=table.path)
            points = [[columns[name][k] for k in mine] for name in ("size", "time_s", "power_w")]
            found.append(np.array(points))
        idle, prompts, steps = found
        chunk = int(said.chunk_tokens.get(tp, _CHUNK_TOKENS))
        made[tp, clock] = Phases(*[idle[2][0], *prompts, *steps, said.kv_tokens[tp], chunk])
    return made


def _curves_of(
    phases: Mapping[tuple[int, int], Phases], classes: Mapping[str, RequestClass]
) -> dict[tuple[str, int, int], Curve]:
    """Steady loads of every class in every configuration that has memory for its requests.

    Points lie at shares of a load that all clocks of a TP have in common, and at the highest load.
    """
    found = {}
    for name, request in classes.items():
        known = {key: steady(each, request) for key, each in phases.items()}
        for (tp, clock), points in known.items():
            if points is None:
                continue
            loads, *rest = points
            most = max(x[0, -1] for (n, _), x in known.items() if n == tp and x is not None)
            at = most * np.array(_SHARES)
            at = np.append(at[at < loads[-1] * (1 - 1e-9)], loads[-1])
            columns = [np.interp(at, loads, values) for values in rest]
            found[name, tp, clock] = Curve(name, tp, clock, at, *columns)
    return found


def _read_curves(
    table: Table[Any], classes: Mapping[str, RequestClass]
) -> dict[tuple[str, int, int], Curve]:
    if "class" not in table.texts:
        raise InputError("has no column class", path=table.path, line=1)
    names, columns, powers = table.texts["class"], table.columns, []
    asked = "energy_per_request_j" if "energy_per_request_j" in table.texts else "power_w"
    for k, (name, row) in enumerate(zip(names, table.rows(), strict=True)):
        check_class(name, path=table.path, line=table.lines[k], column="class")
        energy, power = row.energy_per_request_j, row.power_w
        if (energy is None) == (power is None):
            both = "both are blank" if power is None else "both are given"
            raise table.error(k, f"must be given, or power_w instead: {both}", asked)
        if power is None and row.load == 0:
            raise table.error(k, "means nothing without load; give power_w in this row", asked)
        if power is None:
            power = energy * row.load / (classes[name].tokens * classes[name].shared_by)
        _refuse_power(table, k, power / row.tp)
        powers.append(power)
    rows = _grouped(table, zip(names, columns["tp"], columns["frequency"], strict=True), "load")
    points = np.array([columns["load"], powers, columns["ttft_s"], columns["tbt_s"]])
    return {key: Curve(*key, *points[:, mine]) for key, mine in rows.items()}


def _refuse_power(table: Table[Any], k: int, watts: float) -> None:
    """No GPU draws so much: some unit, or what the sidecar says of a class, is not what it was."""
    if watts > _MOST_W:
        given = table.columns["power_w"][k] is not None
        mend = "W" if given else "J, and mean lengths and shared_by of the class in the sidecar"
        column = "power_w" if given else "energy_per_request_j"
        message = f"means {watts:.0f} W on each GPU, which none draws; give {mend}"
        raise table.error(k, message, column)
