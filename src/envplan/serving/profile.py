"""Serving profiles: what an instance draws and how fast it answers, by TP, clock and load.

The replay of traces runs on a profile's tables of iterations (`performance`). What an instance
draws and how fast it answers under a steady load of one class follows from them (`curves`), for the
planners.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from envplan._io.documents import readable_json
from envplan._io.files import atomic_write, named_file, parse_json, read_bounded
from envplan._io.tables import MAX_TABLE_BYTES
from envplan.profile.sidecar import sidecar_path
from envplan.serving.builtin import BUILTIN, builtin_profiles
from envplan.serving.class_file import class_list
from envplan.serving.classes import RequestClasses, Slo
from envplan.serving.performance import Configuration, InstancePerformance
from envplan.serving.profile_csv import read_profile_files
from envplan.serving.steady_state import CurveKey, LoadCurve, load_curves


class MeanLengths(NamedTuple):
    """Mean tokens of the inputs and of the outputs of some requests."""

    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Capacity of one configuration, and the energy of its requests at some load.

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

    def to_dict(self) -> dict[str, JsonValue]:
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
        path: the file it was read from.
        sha256: hexadecimal digest of all that decides what comes out of it.
        curves: steady loads, by (class, TP, MHz).
        classes: lengths and SLOs of every class.
        performance: of an instance, by (TP, MHz).
        gpu: name of the GPU, or None.
        model: name of the served model, or None.
        source: "measured", "identified" (from measurements), "modelled" or None.
        modelled: which part of it is modelled, in words, or None.
        max_context_tokens: the longest request that the model takes, input and output together;
            None: no limit but memory.
        kv_bytes_per_token: bytes of KV cache of a token of context, on all GPUs of an instance
            together, or None.
    """

    name: str
    path: Path
    sha256: str
    curves: Mapping[CurveKey, LoadCurve]
    classes: RequestClasses
    performance: Mapping[Configuration, InstancePerformance]
    gpu: str | None = None
    model: str | None = None
    source: str | None = None
    modelled: str | None = None
    max_context_tokens: float | None = None
    kv_bytes_per_token: float | None = None

    def curves_of(self, request_class: str, tp: int | None = None) -> list[LoadCurve]:
        """The curves of a class, by TP and clock; the last one is the largest TP at its highest.

        Args:
            request_class: the class.
            tp: only those of instances on so many GPUs; None: all.
        """
        curves = []
        for key in sorted(self.curves):
            is_of_tp = tp is None or key.tp == tp
            if key.request_class == request_class and is_of_tp:
                curves.append(self.curves[key])
        return curves

    def load_conversion_factor(self, request_class: str, pool_class: str) -> float:
        """Tokens of load that a token of a class becomes in another's pool.

        A request counts there as one of the pool's own, so by the ratio of their mean lengths.
        """
        return self.classes[pool_class].tokens / self.classes[request_class].tokens

    def with_lengths(self, means: Mapping[str, MeanLengths]) -> ServingProfile:
        """The profile for other mean lengths of some classes."""
        changed = {}
        for name, lengths in means.items():
            changed[name] = self.classes[name].model_copy(update=lengths._asdict())
        return self.with_classes(self.classes.replaced(changed))

    def with_classes(self, classes: RequestClasses) -> ServingProfile:
        """The profile for other classes of requests."""
        if classes.has_the_means_of(self.classes):
            return replace(self, classes=classes)
        return replace(self, classes=classes, curves=load_curves(self.performance, classes))

    def at_clocks(self, clocks_mhz: Collection[int]) -> ServingProfile:
        """The profile with what it knows of some clocks only."""
        curves = {
            key: curve for key, curve in self.curves.items() if key.frequency_mhz in clocks_mhz
        }
        performance = {
            configuration: performance
            for configuration, performance in self.performance.items()
            if configuration.frequency_mhz in clocks_mhz
        }
        return replace(self, curves=curves, performance=performance)

    def with_slos(self, slos: Mapping[str, Slo], scale: float = 1.0) -> ServingProfile:
        """The profile with other SLOs of some classes, and all of them `scale` times as long.

        Raises:
            InputError: there is no such class.
        """
        for name in slos:
            self.classes.check_name(name)
        changed = {}
        for name, request_class in self.classes.items():
            slo = slos.get(name, request_class.slo)
            scaled = {"ttft_slo_s": slo.ttft_s * scale, "tbt_slo_s": slo.tbt_s * scale}
            changed[name] = request_class.model_copy(update=scaled)
        return replace(self, classes=self.classes.replaced(changed))

    def energy_per_request(self, curve: LoadCurve, load_tokens_s: float) -> float:
        """Energy of a request at a load above 0, J."""
        request_tokens = self.classes[curve.request_class].tokens
        return curve.power_at(load_tokens_s) * request_tokens / load_tokens_s

    def efficiencies(self, load_tokens_s: float) -> list[Efficiency]:
        """Every configuration of every class, by class, TP and clock.

        Args:
            load_tokens_s: of an instance, above 0.
        """
        return [
            self._efficiency(curve, load_tokens_s)
            for name in self.classes
            for curve in self.curves_of(name)
        ]

    def _efficiency(self, curve: LoadCurve, load_tokens_s: float) -> Efficiency:
        slo = self.classes[curve.request_class].slo
        energy_j = None
        if curve.meets(slo, load_tokens_s):
            energy_j = self.energy_per_request(curve, load_tokens_s)
        return Efficiency(
            request_class=curve.request_class,
            tp=curve.tp,
            frequency_mhz=curve.frequency_mhz,
            capacity_tokens_s=curve.capacity(slo),
            max_load_tokens_s=curve.max_load,
            energy_per_request_j=energy_j,
        )

    @property
    def sidecar(self) -> Path:
        """The path of its sidecar."""
        return sidecar_path(self.path)

    def save_copy(self, path: Path, classes: RequestClasses | None = None) -> None:
        """Write the CSV as it is, and its sidecar with these classes beside it.

        Args:
            path: of the CSV.
            classes: None: those that it has.

        Raises:
            InputError: it cannot be written.
        """
        sidecar = read_bounded(self.sidecar)
        if classes is not None:
            fields = parse_json(sidecar, self.sidecar) | {"classes": class_list(classes)}
            sidecar = (readable_json(fields) + "\n").encode()
        atomic_write(path, read_bounded(self.path, MAX_TABLE_BYTES))
        atomic_write(sidecar_path(path), sidecar)

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ServingProfile:
        """Read and check a profile and its sidecar.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        path = Path(path)
        content = read_profile_files(path)
        return cls(
            name=path.stem,
            path=path,
            sha256=content.sha256,
            curves=load_curves(content.performance, content.classes),
            classes=content.classes,
            performance=content.performance,
            gpu=content.gpu,
            model=content.model,
            source=content.source,
            modelled=content.modelled,
            max_context_tokens=content.max_context_tokens,
            kv_bytes_per_token=content.kv_bytes_per_token,
        )

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
