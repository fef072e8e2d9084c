"""The SM clocks that a GPU has: as a model of it, its driver, the profile or the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from envplan.devices.modelled import GPUS, ModelledGpu, gpu
from envplan.enforce.freqplan import ClockSource, StageClocks
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile

_MAX_CLOCKS: Final = 10_000
_MAX_MHZ: Final = 10**6


def _clocks(mhz: Iterable[int], source: ClockSource, name: str | None) -> StageClocks:
    clocks = sorted(set(mhz))
    return StageClocks(gpu=name, clocks_source=source, supported_clocks_mhz=clocks)


def modelled_clocks(name: str) -> StageClocks:
    """Those of a known GPU.

    Args:
        name: its short name, such as "a40", or the one its driver gives it.

    Raises:
        InputError: it is not known; the message lists those that are.
    """
    model = gpu(name)
    return _clocks(model.clocks_mhz, "modelled", model.name)


def refuse_other_gpus(profile: Profile, named: Sequence[StageClocks]) -> None:
    """Raises: InputError: a profile names a known GPU, and another one is named for its plan."""
    for stage in range(profile.num_stages) if len(named) in (1, profile.num_stages) else ():
        measured = _known(profile.metadata.gpu_of(stage))
        other = named[stage if len(named) > 1 else 0].gpu
        if measured is not None and other != measured.name:
            raise InputError(
                f"--gpu: the plan is for the {measured.name} of profile {profile.name}, and times "
                f"and energies on {other} are others; make a profile of that GPU, or go on with "
                "--force"
            )


def _known(name: str | None) -> ModelledGpu | None:
    """The modelled GPU of either of its names."""
    wanted = (name or "").lower()
    return next((m for m in GPUS.values() if wanted in (m.key, m.name.lower())), None)


def profile_clocks(profile: Profile, stage: int | None = None) -> StageClocks:
    """Those of the GPU that a profile names; if it is not a known one, those in the profile.

    Args:
        stage: of the profile; None: of all of them, which run on the same GPU.
    """
    name = profile.metadata.gpu if stage is None else profile.metadata.gpu_of(stage)
    clocks = {mhz for table in profile.tables(stage) for mhz in table.frequency_mhz.tolist()}
    return named_clocks(name, clocks - {0})


def named_clocks(name: str | None, measured: Iterable[int]) -> StageClocks:
    """Those of a GPU by its name; if it is not a known one, those that a profile measured, MHz."""
    if name is not None and _known(name):
        return modelled_clocks(name)
    return _clocks(measured, "profile", name)


def stage_clocks(
    profile: Profile, pipeline: Pipeline, given: StageClocks | Sequence[StageClocks] | None = None
) -> list[StageClocks]:
    """For each stage of a pipeline the clocks of its GPU, (num_stages,).

    Args:
        given: those of every stage, or one for each; None: those of the profile's GPUs.

    Raises:
        InputError: they are given for more or fewer stages than there are, or parts of the model
            that one stage runs were profiled on different GPUs.
    """
    if isinstance(given, StageClocks):
        return [given] * pipeline.num_stages
    if given is not None:
        if len(given) != pipeline.num_stages:
            raise InputError(
                f"{len(given)} GPUs are named for {pipeline.num_stages} stages; name one for all, "
                "or one for each"
            )
        return list(given)
    if profile.metadata.stage_gpus is None:
        return [profile_clocks(profile)] * pipeline.num_stages
    clocks = []
    for stage, (first, last) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        parts = sorted({op.profile_stage for op in pipeline.operations[first:last]})
        names = sorted({profile.metadata.gpu_of(part) or "" for part in parts})
        if len(names) > 1:
            raise InputError(
                f"stage {stage} runs stages {', '.join(map(str, parts))} of the profile, which "
                f"were profiled on {' and '.join(names)}; one stage runs on one GPU"
            )
        clocks.append(profile_clocks(profile, parts[0]))
    return clocks


def given_clocks(text: str, name: str | None = None) -> StageClocks:
    """Those that a text lists, as in "210,900,1410" or, in steps, "210-1410:15".

    Args:
        name: of the GPU.

    Raises:
        InputError: it lists none, or no clocks.
    """
    clocks: set[int] = set()
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}):(0*[1-9]\d{0,6}))?", part, re.ASCII)
        low, high, step = match.groups() if match else (0, 0, 1)
        span = range(int(low), int(high or low) + 1, int(step or 1))
        if not span or span[0] < 1 or span[-1] > _MAX_MHZ or len(span) > _MAX_CLOCKS:
            raise InputError(
                f"--clocks must list MHz, as in 210,900,1410 or 210-1410:15, not {part!r}"
            )
        clocks.update(span)
    return _clocks(clocks, "given", name)


def live_clocks(profile: Profile, *, force: bool = False) -> StageClocks:
    """Those that every NVIDIA GPU of this machine has, as its driver says.

    Args:
        force: take them though the profile was made on another GPU.

    Raises:
        DeviceError: there is no GPU or no driver.
        InputError: the GPUs differ, or the profile is another GPU's.
    """
    from envplan.devices import opened

    if profile.metadata.stage_gpus is not None and not force:
        raise InputError(
            "the plan's stages run on different GPUs, and this machine knows its own only; name "
            "one for each stage with --gpu, or leave both out to take what the profile says"
        )
    with opened("nvml") as source:
        infos = [device.info for device in source.devices()]
    names = sorted({info.name for info in infos})
    if len(names) > 1:
        raise InputError(
            f"this machine has different GPUs, {' and '.join(names)}; name one with --gpu, or its "
            "clocks with --clocks"
        )
    if profile.metadata.gpu not in (None, names[0]) and not force:
        raise InputError(
            f"the plan's profile is of {profile.metadata.gpu}, but this machine has {names[0]}; "
            "profile it and plan again, or go on with --force"
        )
    common = set.intersection(*(set(info.supported_clocks) for info in infos))
    if not common:
        raise InputError(
            f"the driver says of no clock that every {names[0]} here supports it; list them with "
            "--clocks"
        )
    return _clocks(common, "nvml", names[0])
