"""Serving profiles: what an instance draws and how fast it answers, by TP, clock and load.

A serving profile is a CSV file with one row for each measured point of prefill, decode or idle,

    tp,frequency,phase,size,time_s,power_w

and a sidecar NAME.meta.json, which must say in `kv_tokens` how many tokens of context fit into the
memory of each TP; it may say where the figures come from, and the mean lengths and SLOs of the
classes. docs/serving.md ("Your own profile") has columns and units. The replay runs on these tables
of iterations; what an instance draws and how fast it answers under a steady load of one class
follows from them (`steady`), for the planners.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from envplan._io.documents import Model, parse_document, read_json
from envplan._io.files import atomic_write, named_file, read_bounded, refuse_slip
from envplan._io.tables import MAX_TABLE_BYTES, Table, parse_table
from envplan.errors import InputError
from envplan.profile import builtin_paths
from envplan.profile.sidecar import sidecar_path
from envplan.serving.classes import Class, FloatArray, RequestClass, Slo, filled

#: The serving profile that ships with envplan.
BUILTIN: Final = "h100-llama2-70b"

_CHUNK_TOKENS: Final = 1024  # of an iteration, where the sidecar says nothing
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the highest load at any clock
_MOST_W: Final = 5000.0  # on a GPU, W; far above any there is
_DECISIVE: Final = ("classes", "kv_tokens", "chunk_tokens")  # of a sidecar, for what comes out
_ROUNDING: Final = 1 + 1e-9  # of an SLO, at the load that just meets it
_BUSIEST: Final = 0.9  # share of an instance's time that prompts may take
_TAIL: Final = float(np.log(100.0))  # waits are exponential: the 99th percentile, in means
_ROUNDS: Final = 30  # of the fixed point between batch and pace


@dataclass(frozen=True)
class Phases:
    """One configuration, an instance size at a clock. Arrays ascend in the first of each pair.

    Attributes:
        idle_w: W of the instance when it does nothing.
        prompt_tokens, prompt_s, prompt_w: time and power of a prompt by its length.
        batch, step_s, step_w: time and power of a decode step by the requests in it.
        kv_tokens: tokens of context that fit into memory, of all requests together.
        chunk_tokens: prompt tokens that one iteration takes.
    """

    idle_w: float
    prompt_tokens: FloatArray
    prompt_s: FloatArray
    prompt_w: FloatArray
    batch: FloatArray
    step_s: FloatArray
    step_w: FloatArray
    kv_tokens: float
    chunk_tokens: int

    def prompt_time(self, tokens: Any) -> Any:
        """s of a prompt; above the longest one straight on."""
        beyond = np.maximum(0.0, np.asarray(tokens) - self.prompt_tokens[-1])
        slope = 0.0
        if len(self.prompt_tokens) > 1:
            (low, high), (first, last) = self.prompt_tokens[-2:], self.prompt_s[-2:]
            slope = max(0.0, (last - first) / (high - low))
        return np.interp(tokens, self.prompt_tokens, self.prompt_s) + slope * beyond

    def whole_prompt_time(self, tokens: Any) -> Any:
        """s of a prompt alone, in iterations of at most `chunk_tokens`."""
        chunk = self.chunk_tokens
        pieces = np.asarray(tokens) / chunk * self.prompt_time(chunk)
        return np.maximum(self.prompt_time(tokens), pieces)

    def step_time(self, batch: Any) -> Any:
        """s of a decode step with so many requests, at least one."""
        return np.interp(np.maximum(batch, 1.0), self.batch, self.step_s)

    def tables(self, grid: int = 32) -> tuple[float, Any, Any, float, Any, Any]:
        """The tables of csrc/serving.hpp: by whole requests, and every `grid` tokens."""
        count = np.arange(int(self.batch[-1]) + 1, dtype=np.float64)
        step_w = np.interp(np.maximum(count, 1.0), self.batch, self.step_w)
        tokens = np.arange(0, max(2 * grid, self.prompt_tokens[-1] + 2 * grid), grid)
        prompt_w = np.interp(tokens, self.prompt_tokens, self.prompt_w)
        return (self.idle_w, self.step_time(count), step_w, float(grid),
                self.prompt_time(tokens), prompt_w)  # fmt: skip


def steady(phases: Phases, request: RequestClass) -> FloatArray | None:
    """An instance under steady loads of one class; None if it has no memory for a request.

    Returns:
        (4, n): loads (tokens/s, ascending from 0), power (W), time to first token (s) and time
        between tokens (s).

    At r requests per second, prompts take r times their work of the instance's time; the rest is
    decode steps. A decoding request gets a token with each iteration of either kind, so that, by
    Little's law, r (output - 1) tokens per second need a batch of so many requests; that gives the
    pace. TTFT is the prompt's own time, half a decode step, and the wait in a queue with Poisson
    arrivals and constant service at its 99th percentile. An instance without decoding requests is
    idle, for Poisson numbers of them.
    """
    given = request.input_tokens
    work = float(phases.whole_prompt_time(given))
    chunks = max(1.0, given / phases.chunk_tokens)
    most = min(float(phases.batch[-1]), phases.kv_tokens / max(request.tokens, 1.0))
    rate = np.linspace(0.0, _BUSIEST / work, 200)
    steps = max(0.0, request.output_tokens - 1)
    batch = np.zeros_like(rate)
    for _ in range(_ROUNDS):
        more = np.maximum(0.0, phases.step_time(batch) - phases.step_s[0])
        busy = np.minimum(rate * (work + chunks * more), 0.999)
        pace = (1 - busy) / phases.step_time(batch) + busy / (work / chunks + more)
        batch = 0.5 * (batch + np.minimum(rate * steps / pace, 1e6))
    fits = np.flatnonzero((busy <= _BUSIEST) & (batch <= most))
    top = int(fits[np.nonzero(np.diff(fits, append=10**9) > 1)[0][0]]) if len(fits) else 0
    if top == 0:
        return None
    wait = _TAIL * busy * work / (2 * (1 - busy))
    decoding = 1 - np.exp(-batch)
    ttft = work + wait + 0.5 * decoding * phases.step_time(batch)
    prompt_w = float(np.interp(request.input_tokens, phases.prompt_tokens, phases.prompt_w))
    step_w = np.interp(np.maximum(batch, 1.0), phases.batch, phases.step_w)
    power = busy * np.maximum(prompt_w, decoding * step_w) + (1 - busy) * (
        decoding * step_w + (1 - decoding) * phases.idle_w
    )
    kept = slice(0, top + 1)
    return np.array([rate[kept] * request.tokens, power[kept], ttft[kept], 1 / pace[kept]])


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
    """One configuration under steady loads: a class served by so many GPUs at a clock.

    Attributes:
        name: the class.
        tp: GPUs of the instance.
        frequency_mhz: SM clock, MHz.
        load: tokens/s, ascending from 0, n >= 2 of them; straight lines lead from each to the next.
        power_w: W of the instance at these loads.
        ttft_s: time to first token, s; it never falls.
        tbt_s: time between tokens, s; it never falls.
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
        """The highest load it can carry, tokens/s."""
        return float(self.load[-1])

    def power_at(self, load: float) -> float:
        """W at a load up to the highest."""
        return float(np.interp(load, self.load, self.power_w))

    def latencies_at(self, load: float) -> tuple[float, float]:
        """Time to first token and between tokens at a load up to the highest, s."""
        ttft, tbt = (np.interp(load, self.load, values) for values in (self.ttft_s, self.tbt_s))
        return float(ttft), float(tbt)

    def meets(self, slo: Slo, load: float) -> bool:
        """Whether it carries a load within the SLO."""
        ttft, tbt = self.latencies_at(load)
        within = ttft <= slo.ttft_s * _ROUNDING and tbt <= slo.tbt_s * _ROUNDING
        return within and load <= self.max_load

    def capacity(self, slo: Slo) -> float:
        """The highest load, tokens/s, at which it meets the SLO; 0 if at none."""
        most = self.max_load
        for values, limit in ((self.ttft_s, slo.ttft_s), (self.tbt_s, slo.tbt_s)):
            k = int(np.searchsorted(values, limit, side="right"))  # so many points are within
            if k == 0:
                return 0.0
            if k < len(values):
                around = slice(k - 1, k + 1)
                most = min(most, float(np.interp(limit, values[around], self.load[around])))
        return most

    def segments(self, slo: Slo) -> list[Segment]:
        """All loads at which it meets the SLO, as straight stretches in ascending order."""
        most = self.capacity(slo)
        points = [(load, self.power_at(load)) for load in (*self.load[self.load < most], most)]
        return [Segment(a, b, at_a, at_b) for (a, at_a), (b, at_b) in pairwise(points)]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What one configuration carries, and what its requests cost at some load.

    Attributes:
        request_class: such as "LL".
        tp: GPUs of the instance.
        frequency_mhz: SM clock.
        capacity_tokens_s: the highest load at which it meets the SLO.
        max_load_tokens_s: the highest load that it carries.
        energy_per_request_j: at the load in question; None where the SLO is violated.
    """

    request_class: str
    tp: int
    frequency_mhz: int
    capacity_tokens_s: float
    max_load_tokens_s: float
    energy_per_request_j: float | None

    def to_dict(self) -> dict[str, Any]:
        """The same in JSON types."""
        return {
            "class": self.request_class,
            "tp": self.tp,
            "frequency_mhz": self.frequency_mhz,
            "capacity_tokens_s": self.capacity_tokens_s,
            "max_load_tokens_s": self.max_load_tokens_s,
            "energy_per_request_j": self.energy_per_request_j,
        }


@dataclass(frozen=True, eq=False)
class ServingProfile:
    """A validated serving profile. Made by read_csv, builtin or open.

    Attributes:
        name: the file's name without .csv.
        path: where it was read from.
        sha256: hexadecimal digest of the CSV's bytes, and of what the sidecar says of classes.
        curves: by (class, tp, frequency in MHz).
        classes: lengths and SLOs of every class.
        phases: by (tp, frequency in MHz).
        gpu: name of the GPU, or None.
        model: name of the served model, or None.
        source: "measured", "identified" (from measurements), "modelled" or None.
        modelled: what of it is modelled, in words.
    """

    name: str
    path: Path
    sha256: str
    curves: Mapping[tuple[str, int, int], Curve]
    classes: Mapping[str, RequestClass]
    phases: Mapping[tuple[int, int], Phases]
    gpu: str | None = None
    model: str | None = None
    source: str | None = None
    modelled: str | None = None

    def of(self, name: str, tp: int | None = None) -> list[Curve]:
        """All configurations of a class, or those on so many GPUs, by TP and clock."""
        keys = [key for key in sorted(self.curves) if key[0] == name and tp in (None, key[1])]
        return [self.curves[key] for key in keys]

    def needed_for(self, request: str, pool: str) -> float:
        """Tokens of load that a token of a class becomes in another's pool.

        A request counts there as one of the pool's own, so by the ratio of their mean lengths.
        """
        return self.classes[pool].tokens / self.classes[request].tokens

    def with_lengths(self, means: Mapping[str, tuple[float, float]]) -> ServingProfile:
        """The profile for other mean lengths of classes.

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
        """J per request at a load above 0."""
        return curve.power_at(load) * self.classes[curve.name].tokens / load

    def efficiencies(self, load: float) -> list[Efficiency]:
        """Every configuration of every class, by class, TP and clock.

        Args:
            load: of an instance, tokens/s, above 0.
        """
        return [self._efficiency(curve, load) for name in self.classes for curve in self.of(name)]

    def _efficiency(self, curve: Curve, load: float) -> Efficiency:
        slo = self.classes[curve.name].slo
        within_slo = curve.meets(slo, load)
        return Efficiency(
            request_class=curve.name,
            tp=curve.tp,
            frequency_mhz=curve.frequency_mhz,
            capacity_tokens_s=curve.capacity(slo),
            max_load_tokens_s=curve.max_load,
            energy_per_request_j=self.energy_per_request(curve, load) if within_slo else None,
        )

    @property
    def sidecar(self) -> Path:
        """Its sidecar."""
        return sidecar_path(self.path)

    def save_copy(self, path: Path) -> None:
        """Write the CSV as it is, and its sidecar beside it.

        Raises:
            InputError: it cannot be written.
        """
        atomic_write(path, self.path.read_bytes())
        atomic_write(sidecar_path(path), self.sidecar.read_bytes())

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ServingProfile:
        """Read and check a profile and its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        path = Path(path)
        content, where = read_bounded(path, MAX_TABLE_BYTES), sidecar_path(path)
        sidecar = read_json(where)
        said = parse_document(sidecar, _Sidecar, kind="sidecar of a serving profile", path=where)
        for name in sidecar.keys() - {"schema", *_Sidecar.model_fields}:
            refuse_slip(name, list(_Sidecar.model_fields), where)
        table = parse_table(content, _Row, path=path, kind="a serving profile")
        phases = _read_phases(table, said)
        decisive = {part: sidecar[part] for part in _DECISIVE if part in sidecar}
        digest = json.dumps(decisive, sort_keys=True).encode()
        sha256 = hashlib.sha256(content + b"\0" + digest).hexdigest()
        known = said.model_dump(include={"gpu", "model", "source", "modelled"})
        curves = _curves_of(phases, said.classes)
        return cls(path.stem, path, sha256, curves, said.classes, phases, **known)

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


class _Row(BaseModel):
    tp: Tp = Field(description="1, 2, 4 or 8 GPUs")
    frequency: Annotated[int, Field(ge=1, le=10**9)] = Field(description="an SM clock, whole MHz")
    phase: Literal["prefill", "decode", "idle"] = Field(description="a phase")
    size: Amount = Field(0.0, description="tokens of the prompt or requests in the batch")
    time_s: Amount = Field(0.0, description="s of the prompt or of a step")
    power_w: Amount = Field(description="W of the whole instance")


def _read_phases(table: Table[Any], said: _Sidecar) -> dict[tuple[int, int], Phases]:
    points: dict[Any, list[tuple[float, float, float]]] = {}
    for k, row in enumerate(table.rows()):
        if row.tp not in said.kv_tokens:
            raise table.error(
                k, f"the sidecar does not say in kv_tokens how much TP{row.tp} holds", "tp"
            )
        if (watts := row.power_w / row.tp) > _MOST_W:
            raise table.error(k, f"means {watts:.0f} W on each GPU, which none draws", "power_w")
        for column in ("size", "time_s") if row.phase != "idle" else ():
            if not getattr(row, column):
                raise table.error(k, "must be a number above 0", column)
        mine = points.setdefault((row.tp, row.frequency, row.phase), [])
        if mine and row.size <= mine[-1][0]:
            raise table.error(
                k, f"must be above {mine[-1][0]:g}, the one before of this configuration", "size"
            )
        mine.append((row.size, row.time_s, row.power_w))
    made = {}
    for tp, clock in sorted({key[:2] for key in points}):
        found: list[Any] = []
        for phase in ("idle", "prefill", "decode"):
            if (tp, clock, phase) not in points:
                raise InputError(f"TP{tp} at {clock} MHz has no rows of {phase}", path=table.path)
            found.append(np.array(points[tp, clock, phase]).T)
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
            power, *latencies = (np.interp(at, loads, values) for values in rest)
            rising = map(np.maximum.accumulate, latencies)  # tables may be noisy
            found[name, tp, clock] = Curve(name, tp, clock, at, power, *rising)
    return found
