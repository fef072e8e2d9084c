"""A profile: the options of every operation, and what can be derived from them."""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import math
import os
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from envplan._io.files import atomic_write, named_file, read_bounded
from envplan._io.tables import MAX_TABLE_BYTES
from envplan.errors import InputError, unknown
from envplan.profile.clock_latency import SwitchLatency
from envplan.profile.composition import ByParts, retimed
from envplan.profile.derived import DEFAULT_BACKWARD_INPUT_SHARE, Adjustments, adjusted_tables
from envplan.profile.instructions import (
    BACKWARD_HALVES,
    DEFAULT_BLOCKING_POWER_W,
    INCLUDES_RECOMPUTATION,
    in_usual_order,
)
from envplan.profile.options import OptionTable
from envplan.profile.part_costs import OperationKey
from envplan.profile.reading import COLUMNS, OptionKey, ProfileContents, parse_profile
from envplan.profile.sidecar import ProfileMetadata, sidecar_path
from envplan.profile.smoothing import jump_clocks, noise_is_clear

if TYPE_CHECKING:
    import pandas as pd

    from envplan.pipeline import Pipeline


class Profile:
    """A validated stage profile.

    Made by read_csv, builtin, open or from_rows, never directly.

    Attributes:
        name: the file's name without .csv.
        path: where it was read from, None when made by from_rows.
        sha256: hexadecimal digest of the CSV's bytes.
        metadata: what the sidecar says.
        num_stages: S; the profile's stages are 0 .. S - 1.
        instructions: names of its operations, usual ones first; `blocking` is not one of them.
        measured_costs: costs of each operation's parts, as the file says them.
        spreads: relative standard deviation of a row's time, where the file tells.
        energy_spreads: the same of its energy.
        blocking_power_w: W per stage, the mean of energy / time over the stage's `blocking` rows;
            a stage without such rows takes the mean of those that have some. None where the
            file has no such rows at all.
        notes: what a reader of figures should know of the rows, a phrase each.
        noisy: whether the file's rows go against physics in so many places that noise is clear.
        adjustments: what was derived from the file's rows: the noise was taken out if it is clear
            (unless the rows were asked for raw), and what `adjusted` was asked for.
    """

    def __init__(
        self,
        content: bytes,
        *,
        name: str,
        path: Path | None,
        metadata: ProfileMetadata,
        raw: bool = False,
    ) -> None:
        self.name = name
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.metadata = metadata
        self._content = content
        self._take(parse_profile(content, path))
        self._check_gpus()
        waiting_w = self.blocking_power_w or (DEFAULT_BLOCKING_POWER_W,) * self.num_stages
        self.noisy = noise_is_clear(self.measured_costs, waiting_w)
        # Parts of operations add up to the rows as they are.
        self.adjustments = Adjustments(smoothed=self.noisy and not raw and not self.has_parts)

    def _take(self, contents: ProfileContents) -> None:
        self.num_stages = contents.num_stages
        self.instructions = contents.instructions
        self.measured_costs = contents.measured_costs
        self.spreads = contents.spreads
        self.energy_spreads = contents.energy_spreads
        self.blocking_power_w = contents.blocking_power_w
        self.notes = contents.notes

    def _check_gpus(self) -> None:
        gpus = self.metadata.stage_gpus
        if gpus is not None and len(gpus) != self.num_stages:
            raise InputError(
                f"its sidecar lists {len(gpus)} GPUs for {self.num_stages} stages; list one for "
                "each, or name one for all",
                path=self.path,
                column="gpu",
            )

    @cached_property
    def _tables(self) -> dict[OperationKey, OptionTable]:
        return adjusted_tables(self.measured_costs, self.adjustments)

    @property
    def jumps(self) -> dict[str, int]:
        """Instructions that are, as measured, faster up to a clock, MHz, than right above it."""
        return jump_clocks(self.measured_costs)

    @property
    def clocks_mhz(self) -> list[int]:
        """Every clock that some operation has a row at, MHz, ascending."""
        clocks: set[int] = set()
        for parts in self.measured_costs.values():
            clocks.update(setting.frequency_mhz for setting in parts.settings)
        return sorted(clocks - {0})

    def __repr__(self) -> str:
        return f"Profile({self.name!r}, num_stages={self.num_stages})"

    @property
    def sidecar(self) -> Path | None:
        """Where its sidecar is, if it has one; None when made by from_rows."""
        return None if self.path is None else sidecar_path(self.path)

    @property
    def switch_latency(self) -> SwitchLatency | None:
        """How late the GPU's clocks come, by its sidecar; None where that does not say."""
        return self.metadata.switch_latency

    @property
    def measured_latency_s(self) -> float | None:
        """The switch latency to plan with, s: the largest measured median over the rows' clocks.

        None where none was measured.
        """
        latency = self.switch_latency
        if latency is None or latency.source != "measured":
            return None
        return latency.largest_median_s(self.clocks_mhz)

    def pipeline(self) -> Pipeline:
        """The pipeline of the job that the sidecar describes; see `pipeline_of_job`.

        Raises:
            InputError: the sidecar says too little, or what cannot be.
        """
        from envplan.profile.job import pipeline_of_job

        return pipeline_of_job(self)

    def has(self, stage: int, instruction: str) -> bool:
        """Whether the profile times this instruction on this stage."""
        return OperationKey(stage, instruction) in self._tables

    def time_spread(
        self, stage: int, instruction: str, frequency: int, config: str = ""
    ) -> float | None:
        """Standard deviation of a row's time by column `time_std`, as a fraction of that time.

        None where the file does not say, or the row was derived from others, or the column is the
        error of a model.
        """
        if (
            self.adjustments.makes_operations
            or self.metadata.model_error_between_clocks is not None
        ):
            return None
        return self.spreads.get(OptionKey(stage, instruction, frequency, config))

    @property
    def has_parts(self) -> bool:
        """Whether it splits any operation into parts."""
        return any(parts.is_split for parts in self.measured_costs.values())

    def retimed(self, configs: Container[str], latency_ns: int) -> Profile:
        """This profile as it is where clocks come at another latency than it was made for.

        Args:
            configs: the options with clocks by part that are kept.
            latency_ns: from a request until the clock changes, ns.
        """
        other = copy.copy(self)
        other._tables = {
            operation: retimed(table, configs, latency_ns)
            for operation, table in self._tables.items()
        }
        return other

    def table(self, stage: int, instruction: str) -> OptionTable:
        """The options of an instruction on a stage.

        Raises:
            InputError: the profile has none.
        """
        table = self._tables.get(OperationKey(stage, instruction))
        if table is not None:
            return table
        if not 0 <= stage < self.num_stages:
            raise InputError(
                f"profile {self.name} has stages 0 to {self.num_stages - 1}, no stage {stage}",
                path=self.path,
            )
        present = [name for name in self.instructions if self.has(stage, name)]
        raise InputError(
            f"profile {self.name} has no rows for {instruction} on stage {stage}, only for "
            f"{', '.join(present)}; profile it too, choose another schedule, or derive a backward "
            "from its halves or these from it (Profile.fitted)",
            path=self.path,
        )

    def tables(self, stage: int | None = None) -> list[OptionTable]:
        """The options of every instruction of a stage, or of all stages in turn (None)."""
        stages = range(self.num_stages) if stage is None else [stage]
        operations = [OperationKey(s, name) for s in stages for name in self.instructions]
        return [self._tables[key] for key in operations if key in self._tables]

    def adjusted(
        self,
        recompute: bool = False,
        backward_input_share: float | None = None,
        *,
        join_backward: bool = False,
        by_parts: ByParts | None = None,
        raw: bool | None = None,
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
            by_parts: how operations are made of their parts, as far as they have some; None: each
                has one clock.
            raw: whether the rows keep their noise; None: as they do now.

        Raises:
            InputError: the share is not between 0 and 1, rows to be added have no frequency and
                config in common (names the stage), or the file says that recomputation is in it
                already.
        """
        return self.with_adjustments(
            Adjustments.of(
                recompute=recompute,
                backward_input_share=backward_input_share,
                joined_backward=join_backward,
                smoothed=self.adjustments.smoothed if raw is None else not raw,
                by_parts=by_parts,
            )
        )

    def with_adjustments(self, adjustments: Adjustments) -> Profile:
        """This profile with these adjustments in place of those it has; see adjusted.

        Raises:
            InputError: as for adjusted.
        """
        if adjustments.recompute and self.metadata.extra.get(INCLUDES_RECOMPUTATION):
            raise InputError(
                f"profile {self.name} says that its backward includes recomputation already; leave "
                "--recompute out",
                path=self.path,
            )
        rule = adjustments.by_parts if self.has_parts else None
        if rule is not None and rule.blocking_power_w is None:
            # Options are set against the power of waiting.
            power_w = max(self.blocking_power_w or (DEFAULT_BLOCKING_POWER_W,))
            rule = rule.model_copy(update={"blocking_power_w": power_w})
        other = copy.copy(self)
        other.adjustments = adjustments.model_copy(update={"by_parts": rule})
        other.__dict__.pop("_tables", None)
        made = (instruction for _, instruction in other._tables)
        other.instructions = in_usual_order((*self.instructions, *made))
        return other

    def fitted(
        self,
        instructions: Iterable[str],
        *,
        recompute: bool = False,
        by_parts: ByParts | None = None,
    ) -> Profile:
        """This profile, adjusted as far as operations of these instructions need it.

        A backward that is split although the profile has only the whole is assumed to be half
        `backward_input`; one that is whole although the profile has only the parts is their sum.

        Args:
            recompute, by_parts: as for adjusted.

        Raises:
            InputError: as for adjusted.
        """
        lacking = {name for name in instructions if not self._measures_everywhere(name)}
        needs_halves = not lacking.isdisjoint(BACKWARD_HALVES)
        return self.adjusted(
            recompute,
            DEFAULT_BACKWARD_INPUT_SHARE if needs_halves else None,
            join_backward="backward" in lacking,
            by_parts=by_parts,
        )

    def _measures_everywhere(self, instruction: str) -> bool:
        """Whether the file has rows of an instruction on every stage."""
        stages = range(self.num_stages)
        return all(OperationKey(stage, instruction) in self.measured_costs for stage in stages)

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str], *, raw: bool = False) -> Profile:
        """Read and check a profile and, where there is one, its sidecar.

        Args:
            raw: keep noise where it is clear; else it is taken out (envplan.profile.smoothing).

        Raises:
            InputError: naming file, line, column and what to do.
        """
        file = Path(path)
        content = read_bounded(file, MAX_TABLE_BYTES)
        sidecar = sidecar_path(file)
        name = sidecar.name.removesuffix(".meta.json")
        metadata = ProfileMetadata.read_json(sidecar)
        return cls(content, name=name, path=file, metadata=metadata, raw=raw)

    @classmethod
    def builtin(cls, name: str, *, raw: bool = False) -> Profile:
        """A profile that ships with envplan, by name; `raw` as for read_csv.

        Raises:
            InputError: there is none of that name; the message lists those there are.
        """
        paths = builtin_paths()
        if name not in paths:
            raise InputError(unknown("built-in profile", name, paths))
        return cls.read_csv(paths[name], raw=raw)

    @classmethod
    def open(cls, path_or_name: str | os.PathLike[str], *, raw: bool = False) -> Profile:
        """The profile at a path or, where no such path exists, the built-in one of that name.

        Args:
            path_or_name: of the profile.
            raw: as for read_csv.

        Raises:
            InputError: it is neither, or the file is not a valid profile.
        """
        listed = " (`envplan profiles` lists them)"
        return cls.read_csv(named_file(path_or_name, builtin_paths(), "profile", listed), raw=raw)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Sequence[object]],
        *,
        columns: Sequence[str] = (*COLUMNS, "config"),
        name: str = "profile",
        metadata: ProfileMetadata | None = None,
    ) -> Profile:
        """A profile of rows in memory, checked like a file and taken as they are, noise and all.

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
        width = max((len(row) for row in listed), default=len(COLUMNS))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns[:width])
        writer.writerows([_plain(value) for value in row] for row in listed)
        return cls(
            text.getvalue().encode("utf-8"),
            name=name,
            path=None,
            metadata=metadata or ProfileMetadata(),
            raw=True,
        )

    @classmethod
    def from_dataframe(
        cls, frame: pd.DataFrame, *, name: str = "profile", metadata: ProfileMetadata | None = None
    ) -> Profile:
        """A profile of a table in memory, with the columns of a profile's file.

        Raises:
            InputError: as in from_rows.
        """
        rows = frame.astype(object).where(frame.notna(), "").itertuples(index=False, name=None)
        return cls.from_rows(
            rows, columns=list(map(str, frame.columns)), name=name, metadata=metadata
        )

    def to_frame(self) -> pd.DataFrame:
        """The rows as they were read or made, with the columns of a profile's file."""
        import pandas as pd

        return pd.read_csv(io.BytesIO(self._content), comment="#")

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, byte for byte as it was read or made, and its sidecar.

        Each of the two files appears whole or not at all.

        Raises:
            InputError: the folder is missing or not writable.
        """
        atomic_write(path, self._content)
        atomic_write(sidecar_path(Path(path)), self.metadata.to_json())

    def describe(self) -> str:
        """Its name, its GPU, whether it was measured or modelled, and what was derived."""
        source = [text for text in (self.metadata.gpu, self.metadata.source) if text]
        facts = [*source, *self.notes, *self.adjustments.in_words()]
        return f"{self.name} ({', '.join(facts)})" if facts else self.name


def builtin_profiles() -> list[Profile]:
    """The profiles that ship with envplan, by name."""
    return [Profile.read_csv(path) for path in builtin_paths().values()]


def builtin_paths() -> dict[str, Path]:
    """Where the profiles that ship with envplan lie, by name."""
    # An installed package carries the folder; a source or editable checkout has it at its top.
    installed = Path(str(files("envplan") / "profiles"))
    checkout = Path(__file__).resolve().parents[3] / "profiles"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.csv"))}


def _plain(value: object) -> object:
    """A float as the shortest decimal that reads back the same, without an exponent."""
    if isinstance(value, float) and math.isfinite(value):
        return np.format_float_positional(value, trim="-")
    return value
