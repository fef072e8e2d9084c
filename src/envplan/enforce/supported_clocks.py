"""The SM clocks that a GPU supports: as a model of it, its driver, the profile or the user says."""

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
#: "900", or "210-1410:15": the lowest and the highest clock, and the step between them.
_CLOCK_OR_RANGE: Final = re.compile(r"(\d{1,7})(?:-(\d{1,7}):(0*[1-9]\d{0,6}))?", re.ASCII)


def modelled_clocks(name: str) -> StageClocks:
    """The clocks of a GPU that gpus.toml describes.

    Args:
        name: its short name, such as "a40", or the one its driver gives it.

    Raises:
        InputError: there is no such GPU; the message lists those that there are.
    """
    model = gpu(name)
    return _stage_clocks_of(model.clocks_mhz, "modelled", model.name)


def refuse_other_gpus(profile: Profile, named: Sequence[StageClocks]) -> None:
    """Refuse GPUs that are named for a plan and are not those of its profile.

    Args:
        profile: of the plan.
        named: one GPU for all stages of the profile, or one for each; any other number passes.

    Raises:
        InputError: the profile names a GPU that gpus.toml describes, and another one is named.
    """
    if len(named) == 1:
        named = [named[0]] * profile.num_stages
    if len(named) != profile.num_stages:
        return
    for stage, target in enumerate(named):
        profiled = _modelled_gpu(profile.metadata.gpu_of(stage))
        if profiled is not None and target.gpu != profiled.name:
            raise InputError(
                f"--gpu: the plan is for the {profiled.name} of profile {profile.name}, and times "
                f"and energies on {target.gpu} are others; make a profile of that GPU, or go on "
                "with --force"
            )


def profile_clocks(profile: Profile, stage: int | None = None) -> StageClocks:
    """The clocks of the GPU that a profile names; if it is not modelled, those in the profile.

    Args:
        profile: the profile.
        stage: of the profile; None: all of them, which run on the same GPU.
    """
    name = profile.metadata.gpu if stage is None else profile.metadata.gpu_of(stage)
    profiled_mhz: set[int] = set()
    for table in profile.tables(stage):
        profiled_mhz.update(table.frequency_mhz.tolist())
    return named_clocks(name, profiled_mhz - {0})


def named_clocks(name: str | None, profiled_mhz: Iterable[int]) -> StageClocks:
    """The clocks of a GPU by its name; if it is not modelled, those that a profile has, MHz."""
    if name is not None and _modelled_gpu(name):
        return modelled_clocks(name)
    return _stage_clocks_of(profiled_mhz, "profile", name)


def stage_clocks(
    profile: Profile, pipeline: Pipeline, named: StageClocks | Sequence[StageClocks] | None = None
) -> list[StageClocks]:
    """The clocks of the GPU of each stage of a pipeline, (num_stages,).

    Args:
        profile: of the pipeline's operations.
        pipeline: whose stages run on the GPUs.
        named: the clocks of every stage, or one for each; None: those of the profile's GPUs.

    Raises:
        InputError: there are more or fewer of them than stages, or parts of the model that one
            stage runs were profiled on different GPUs.
    """
    if isinstance(named, StageClocks):
        return [named] * pipeline.num_stages
    if named is not None:
        if len(named) != pipeline.num_stages:
            raise InputError(
                f"{len(named)} GPUs are named for {pipeline.num_stages} stages; name one for all, "
                "or one for each"
            )
        return list(named)
    if profile.metadata.stage_gpus is None:
        return [profile_clocks(profile)] * pipeline.num_stages
    clocks = []
    for stage, (begin, end) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        profile_stages = {operation.profile_stage for operation in pipeline.operations[begin:end]}
        _require_one_gpu(profile, stage, sorted(profile_stages))
        clocks.append(profile_clocks(profile, min(profile_stages)))
    return clocks


def _require_one_gpu(profile: Profile, stage: int, profile_stages: Sequence[int]) -> None:
    """Raises: InputError: stages of the profile that one stage runs are of different GPUs."""
    names = sorted({profile.metadata.gpu_of(number) or "" for number in profile_stages})
    if len(names) > 1:
        raise InputError(
            f"stage {stage} runs stages {', '.join(map(str, profile_stages))} of the profile, "
            f"which were profiled on {' and '.join(names)}; one stage runs on one GPU"
        )


def parse_clocks(text: str, name: str | None = None) -> StageClocks:
    """The clocks that a text lists, as in "210,900,1410" or, in steps, "210-1410:15".

    Args:
        text: the list, MHz.
        name: of the GPU.

    Raises:
        InputError: it lists none, or no clocks.
    """
    clocks_mhz: set[int] = set()
    for part in text.split(","):
        clocks_mhz.update(_parse_clock_or_range(part.strip()))
    return _stage_clocks_of(clocks_mhz, "given", name)


def _parse_clock_or_range(text: str) -> range:
    """The clocks of one item of a list, MHz.

    Raises:
        InputError: it is neither a clock nor a range, or holds none or too many.
    """
    match = _CLOCK_OR_RANGE.fullmatch(text)
    if match:
        low, high, step = match.groups()  # of a single clock the lowest alone
        clocks_mhz = range(int(low), int(high or low) + 1, int(step or 1))
        has_few = 1 <= len(clocks_mhz) <= _MAX_CLOCKS
        if has_few and clocks_mhz[0] >= 1 and clocks_mhz[-1] <= _MAX_MHZ:
            return clocks_mhz
    raise InputError(f"--clocks must list MHz, as in 210,900,1410 or 210-1410:15, not {text!r}")


def live_clocks(profile: Profile, *, force: bool = False) -> StageClocks:
    """The clocks that every NVIDIA GPU of this machine supports, as its driver says.

    Args:
        profile: of the plan.
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
    common_mhz = set(infos[0].supported_clocks)
    for info in infos[1:]:
        common_mhz &= set(info.supported_clocks)
    if not common_mhz:
        raise InputError(
            f"the driver says of no clock that every {names[0]} here supports it; list them with "
            "--clocks"
        )
    return _stage_clocks_of(common_mhz, "nvml", names[0])


def _modelled_gpu(name: str | None) -> ModelledGpu | None:
    """The GPU of gpus.toml with this short name or driver's name; None if there is none."""
    lower_name = (name or "").lower()
    for model in GPUS.values():
        if lower_name in (model.key, model.name.lower()):
            return model
    return None


def _stage_clocks_of(
    clocks_mhz: Iterable[int], source: ClockSource, name: str | None
) -> StageClocks:
    return StageClocks(gpu=name, clocks_source=source, supported_clocks_mhz=sorted(set(clocks_mhz)))
