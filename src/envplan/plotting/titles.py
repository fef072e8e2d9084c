"""Titles, names and numbers with units, as pictures, pages and the command line show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envplan._io.words import counted, significant

if TYPE_CHECKING:
    from envplan.pipeline import Pipeline
    from envplan.profile import Profile
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

__all__ = [
    "T_MIN_LABEL",
    "T_STAR_LABEL",
    "job_line",
    "job_title",
    "modelled_suffix",
    "savings_words",
    "scale_to_unit",
    "shorten",
    "source_words",
    "with_unit",
    "workload_title",
]

#: The ends of a frontier, as pictures and pages name them.
T_MIN_LABEL: Final = "T_min, fastest"
T_STAR_LABEL: Final = "T_star, least energy"
_MAX_NAME_LENGTH: Final = 44
_VENDORS: Final = ("NVIDIA ", "Tesla ", "GeForce ")
_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
#: A slowdown in percent that one decimal shows as none.
_NO_SLOWDOWN: Final = 0.05


def scale_to_unit(value: float, unit: str) -> tuple[float, str]:
    """The number to divide joules or watts by, and their unit then, such as "kJ"."""
    for factor, prefix in _PREFIXES:
        if value >= 10 * factor:
            return factor, prefix + unit
    return 1.0, unit


def with_unit(value: float, unit: str) -> str:
    """Joules or watts to four digits, with their unit."""
    scale, scaled_unit = scale_to_unit(value, unit)
    return f"{significant(value / scale)} {scaled_unit}"


def savings_words(saved_percent: float, slower_percent: float) -> str:
    """Savings and slowdown in words, such as "11.2% saved, no slowdown"."""
    slowdown = "no slowdown"
    if slower_percent >= _NO_SLOWDOWN:
        slowdown = f"{slower_percent:.1f}% slower"
    return f"{saved_percent:.1f}% saved, {slowdown}"


def shorten(name: str) -> str:
    """A name cut to fit over a chart."""
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"


def modelled_suffix(source: str | None) -> str:
    """A note that figures are of a model, to follow a title; nothing for others."""
    return " (modelled)" if source == "modelled" else ""


def source_words(profile: Profile) -> str | None:
    """The source of a profile's figures; None where it does not say.

    They are measured, modelled, or times are measured and energies worked out from iterations.
    """
    metadata = profile.metadata
    if metadata.energies_are != metadata.source:
        return f"times {metadata.source}, energies {metadata.energies_in_words}"
    return metadata.source


def workload_title(profile: Profile, num_gpus: int) -> str:
    """The workload on its GPUs, such as "GPT-3 1.3B on 4x A40", or the profile's name.

    Args:
        profile: the profile, whose sidecar says what it is of.
        num_gpus: GPUs of the whole job.
    """
    workload, gpu = profile.metadata.workload, profile.metadata.gpu
    if not workload:
        return shorten(profile.name)
    model = workload.split(",")[0].removesuffix(" training")
    if not gpu or profile.metadata.stage_gpus is not None:
        return f"{model} on {counted(num_gpus, 'GPU')}"
    for vendor in _VENDORS:
        gpu = gpu.removeprefix(vendor)
    return f"{model} on {num_gpus}x {gpu}"


def job_line(pipeline: Pipeline, gpus_per_stage: int) -> str:
    """The job in a line, such as "1f1b, 4 stages, 8 microbatches, 4 GPUs".

    Args:
        pipeline: the job's pipeline.
        gpus_per_stage: GPUs of one stage, in all replicas.
    """
    chunks = f" x {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
    stages = counted(pipeline.num_stages, "stage")
    microbatches = counted(pipeline.num_microbatches, "microbatch")
    gpus = counted(gpus_per_stage * pipeline.num_stages, "GPU")
    return f"{pipeline.schedule}, {stages}{chunks}, {microbatches}, {gpus}"


def job_title(job: Frontier | Timeline) -> str:
    """Two lines that say what a figure is about: the workload on its GPUs, and the job."""
    workload = workload_title(job.profile, job.num_gpus * job.pipeline.num_stages)
    modelled = modelled_suffix(job.profile.metadata.source)
    return f"{workload}{modelled}\n{job_line(job.pipeline, job.num_gpus)}"
