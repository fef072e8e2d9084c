"""The files of a sweep: rows are added one by one, and a killed sweep can be continued."""

from __future__ import annotations

import csv
import fcntl
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from pydantic import TypeAdapter

from envplan._io.files import append_whole, atomic_write, check_writable, read_bounded
from envplan.errors import InputError
from envplan.profile import ProfileMetadata, SwitchLatency
from envplan.profile.sidecar import sidecar_path
from envplan.profiling.smoothing import nine_digits

__all__ = ["COLUMNS", "Measurement", "Row", "SweepFile"]

#: Field of the sidecar that holds the parameters of a sweep, and the one that says it ended.
_PARAMETERS: Final = "sweep"
_COMPLETE: Final = "complete"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Means of an operation over blocks of repetitions, outliers left out.

    Attributes:
        time: mean, s.
        energy: mean, J.
        time_std: standard error of the mean times the square root of samples, s.
        energy_std: the same, J; the counter's resolution is in it.
        samples: blocks that count.
    """

    time: float
    energy: float
    time_std: float
    energy_std: float
    samples: int

    @property
    def energy_error(self) -> float:
        """Standard error of energy, J."""
        return self.energy_std / math.sqrt(self.samples)

    @property
    def error(self) -> float:
        """Relative standard error, of time or energy, whichever is larger."""
        if not self.energy:
            return math.inf
        root = math.sqrt(self.samples)
        return max(self.time_std / self.time, self.energy_std / self.energy) / root


@dataclass(frozen=True, kw_only=True)
class Row(Measurement):
    """A measured operation; the fields are the columns of the file.

    Attributes:
        stage: 0-based.
        instruction: forward, backward or a part of it, or blocking.
        frequency: SM clock, MHz.
        clock: what the clock was seen at, MHz, the median.
        throttle: why the clock was held back, reasons joined by "+"; empty if it was not.
    """

    stage: int
    instruction: str
    frequency: int
    clock: int
    throttle: str


#: The fields of a row in the order of the file.
COLUMNS: Final = (
    *("stage", "instruction", "frequency", "time", "energy", "time_std", "energy_std"),
    *("samples", "clock", "throttle"),
)
_ROW: Final = TypeAdapter(Row)


class SweepFile:
    """A profile CSV that grows row by row, and the sidecar that says of which sweep.

    A row is flushed to the disk before `append` returns; half a row that a killed process left is
    cut off. A sweep that fails before its first row leaves no files. Only one process may have the
    file open.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parameters: Mapping[str, object],
        metadata: ProfileMetadata,
    ) -> None:
        """Start the sweep, or continue the one that is there.

        Args:
            path: of the CSV; its sidecar lies beside it.
            parameters: everything that must not change within a sweep; JSON values.
            metadata: the rest of what the sidecar shall say.

        Raises:
            InputError: the file is something else, of a sweep with other parameters, in use, or
                cannot be written.
        """
        self.path = Path(path)
        self._parameters, self._metadata = dict(parameters), metadata
        self._sidecar = sidecar_path(self.path)
        check_writable(self.path)
        if self.path.is_file() and self.path.stat().st_size:
            earlier = ProfileMetadata.read_json(self._sidecar)
            _check_same(self.path, earlier, self._parameters)
            self._metadata = replace(self._metadata, switch_latency=earlier.switch_latency)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_sidecar(complete=False)
            self.rows = self._read()
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise InputError(
                    "another sweep is writing it; wait for that one or choose another file",
                    path=self.path,
                ) from None
            raise

    def append(self, row: Row) -> None:
        """Add a row, safe from a crash.

        Raises:
            InputError: the disk is full.
        """
        values = [getattr(row, name) for name in COLUMNS]
        self._add([nine_digits(value) if isinstance(value, float) else value for value in values])
        self.rows.append(row)

    @property
    def switch_latency(self) -> SwitchLatency | None:
        """How late clocks come, where a sweep that was continued has measured it already."""
        return self._metadata.switch_latency

    def add_switch_latency(self, latency: SwitchLatency) -> None:
        """Note in the sidecar how late clocks come."""
        self._metadata = replace(self._metadata, switch_latency=latency)
        self._write_sidecar(complete=False)

    def finish(self, extra: Mapping[str, object]) -> None:
        """Note in the sidecar that the sweep has ended, and further fields."""
        self._metadata = replace(self._metadata, extra={**self._metadata.extra, **extra})
        self._write_sidecar(complete=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.rows:
            for file in (self.path, self._sidecar):
                file.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _write_sidecar(self, *, complete: bool) -> None:
        extra = {**self._metadata.extra, _PARAMETERS: self._parameters, _COMPLETE: complete}
        atomic_write(self._sidecar, replace(self._metadata, extra=extra).to_json())

    def _read(self) -> list[Row]:
        """The rows so far; a last line without its end is cut off."""
        content = read_bounded(self.path)
        whole = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        if not whole:
            self._add(COLUMNS)
            return []
        header, *lines = csv.reader(whole.decode("utf-8", errors="replace").splitlines())
        if header != list(COLUMNS):
            raise InputError(
                "is not the file of a sweep: its header differs; choose another file",
                path=self.path,
                line=1,
            )
        return [self._parse_row(cells, line) for line, cells in enumerate(lines, start=2)]

    def _parse_row(self, cells: Sequence[str], line: int) -> Row:
        try:
            return _ROW.validate_python(dict(zip(COLUMNS, cells, strict=True)))
        except ValueError:
            raise InputError(
                "is not a row of a sweep; delete the line to have it measured again",
                path=self.path,
                line=line,
            ) from None

    def _add(self, values: Sequence[object]) -> None:
        line = ",".join(map(str, values)) + "\n"  # no cell of ours has a comma or a quote
        try:
            append_whole(self._descriptor, line.encode("utf-8"))
        except OSError as error:
            raise InputError(
                f"cannot be written ({error.strerror}); run the same command again to continue "
                "once there is room",
                path=self.path,
            ) from error


def _check_same(path: Path, metadata: ProfileMetadata, parameters: Mapping[str, object]) -> None:
    """Refuse a file that is of something else.

    Raises:
        InputError: the file is not of a sweep, or of one with other parameters.
    """
    earlier = metadata.extra.get(_PARAMETERS)
    if not isinstance(earlier, dict):
        raise InputError(
            "exists and is not of a sweep; choose another file with -o, or delete it", path=path
        )
    if read_bounded(path).count(b"\n") < 2:  # nothing but a header: there is nothing to protect
        return
    for name in dict.fromkeys([*parameters, *earlier]):
        old, new = _parameter_text(earlier, name), _parameter_text(parameters, name)
        if old != new:
            raise InputError(
                f"is of a sweep with {name} {old}, not {new}; choose another file with -o, or "
                "delete this one to start anew",
                path=path,
            )


def _parameter_text(parameters: Mapping[str, object], name: str) -> str:
    value = parameters.get(name)
    return "not set" if value is None else str(value)
