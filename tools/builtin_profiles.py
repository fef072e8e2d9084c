"""Makes the modelled built-in profiles anew: python -m tools.builtin_profiles OUTDIR [DOCUMENT].

Their sidecars say that they are modelled. The same code gives the same bytes. With DOCUMENT
(docs/profiles.md) its lists of profiles are written anew, too, also that of the measured ones,
which tools.sosp24 makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from envplan.profile import INCLUDES_RECOMPUTATION, Profile, builtin_profiles
from envplan.profiling import models
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.training_job import Model, TrainingJob
from tools.document import markdown_table, update_block

__all__ = ["BUILTINS", "Builtin", "Published", "build", "listing", "main", "measured"]

_DATE: Final = "2026-11-21"
_VERSION: Final = "0.1.0"
_A100: Final = "a100-pcie-80gb"


@dataclass(frozen=True)
class Published:
    """What others report of a workload: to stand beside ours, never to tune to.

    Attributes:
        savings_percent: energy saved against all GPUs at maximum frequency.
        slowdown_percent: at which slowdown; None where the source gives none.
        source: where it is published.
        note: what the figure means.
    """

    savings_percent: float
    slowdown_percent: float | None
    source: str
    note: str


_ENVPIPE_SINGLE: Final = Published(
    25.2,
    1.0,
    "EnvPipe (USENIX ATC 2023), 4 V100",
    "An upper figure: up to 25.2% over its single-node workloads, at a slowdown under 1%; what "
    "it saves on this one alone is not given here.",
)
_ENVPIPE_MULTI: Final = Published(
    28.4,
    1.0,
    "EnvPipe (USENIX ATC 2023), 16 V100",
    "An upper figure: up to 28.4% over its multi-node runs, at a slowdown under 1%; what it "
    "saves with this number of stages alone is not given here.",
)


@dataclass(frozen=True)
class Builtin:
    """A built-in profile.

    Attributes:
        name: of the profile.
        gpu: short name of the modelled GPU.
        job: what it is of.
        published: what others report of that, if anything.
    """

    name: str
    gpu: str
    job: TrainingJob
    published: Published | None = None


def _builtin(
    name: str,
    gpu: str,
    model: Model,
    stages: int,
    microbatches: int,
    published: Published | None = None,
    **more: Any,
) -> Builtin:
    job = TrainingJob(model=model, num_stages=stages, num_microbatches=microbatches, **more)
    return Builtin(f"{name}-{stages}stage", gpu, job, published)


def _builtins() -> Iterator[Builtin]:
    """All of them; microbatches as the benchmarks of EnvPipe set them."""
    # Perseus's jobs ship as they were measured (tools.sosp24); these are for trying other shapes.
    gpt3 = models.GPT3_1_3B
    yield _builtin("a40-gpt3-1.3b", "a40", gpt3, 4, 32)
    yield _builtin("a40-gpt3-1.3b", "a40", gpt3, 8, 64)
    yield _builtin("a100-gpt3-1.3b", _A100, gpt3, 4, 32)
    yield _builtin("a100-gpt3-1.3b", _A100, gpt3, 8, 64)
    # EnvPipe's benchmark scripts: minibatch over microbatch size, and over the replicas that fill
    # 16 GPUs for the last three.
    for name, model, stages, size, count, dtype, envpipe in (
        ("bert-336m", models.BERT_336M, 4, 4, 16, "float32", _ENVPIPE_SINGLE),
        ("gpt-125m", models.GPT_125M, 4, 2, 16, "float32", _ENVPIPE_SINGLE),
        ("megatron-125m", models.MEGATRON_125M, 4, 4, 16, "float16", _ENVPIPE_SINGLE),
        ("resnet-152", models.RESNET_152, 4, 2, 16, "float32", _ENVPIPE_SINGLE),
        ("megatron-1.3b", models.MEGATRON_1_3B, 8, 2, 128, "float16", _ENVPIPE_MULTI),
        ("megatron-1.3b", models.MEGATRON_1_3B, 4, 2, 64, "float16", _ENVPIPE_MULTI),
        ("megatron-1.3b", models.MEGATRON_1_3B, 2, 2, 32, "float16", _ENVPIPE_MULTI),
    ):
        how: dict[str, Any] = {"microbatch_size": size, "recompute": True, "dtype": dtype}
        yield _builtin(f"v100-{name}", "v100", model, stages, count, envpipe, **how)
    # 1,536 samples over 16 pipelines, as Perseus emulates 1,024 GPUs.
    gpt3 = models.GPT3_175B
    how = {"microbatch_size": 1, "tensor_parallel": 8}
    yield _builtin("h100-gpt3-175b", "h100-sxm", gpt3, 8, 96, **how)


BUILTINS: Final = tuple(sorted(_builtins(), key=lambda builtin: builtin.name))


def build(builtin: Builtin) -> Profile:
    """A built-in profile, the same on every day."""
    made = modelled_profile(builtin.job, builtin.gpu, name=builtin.name)
    extra: dict[str, Any] = dict(made.metadata.extra)
    if builtin.published:
        extra["published"] = vars(builtin.published)
        for name in (INCLUDES_RECOMPUTATION, "assumptions"):  # these stay last
            if name in extra:
                extra[name] = extra.pop(name)
    made.metadata = replace(made.metadata, date=_DATE, envplan_version=_VERSION, extra=extra)
    return made


def measured() -> list[Profile]:
    """The profiles that ship and were made from measurements, by tools.sosp24."""
    return [shipped for shipped in builtin_profiles() if shipped.metadata.source == "measured"]


def listing(profiles: list[Profile]) -> str:
    """A table of profiles for docs/profiles.md, from what their sidecars say."""
    rows = []
    for profile in profiles:
        metadata, extra = profile.metadata, profile.metadata.extra
        layers = extra.get("layers_per_stage", "-")
        size = metadata.microbatch_size
        rows.append(
            (
                f"`{profile.name}`",
                str(metadata.gpu),
                str(metadata.workload).partition(" training")[0],
                f"{metadata.num_microbatches} x {size or '?'}",
                layers if isinstance(layers, str) else "-".join(map(str, layers)),
                _published(extra.get("published")),
            )
        )
    headers = ("profile", "GPU", "model", "microbatches x samples", "layers")
    return markdown_table((*headers, "published, %"), rows)


def _published(published: dict[str, Any] | None) -> str:
    """What others report, in a few characters: the saving, and at which slowdown."""
    if published is None:
        return "-"
    savings, slowdown = published["savings_percent"], published["slowdown_percent"]
    if slowdown is None:
        return f"{savings:g}"
    if published["note"].startswith("An upper figure"):
        return f"up to {savings:g} at <{slowdown:g}"
    return f"{savings:g} at {slowdown:g}"


def main(folder: str, *documents: str) -> None:
    """Write every modelled profile and its sidecar into a folder, and its lists in documents."""
    profiles = [build(builtin) for builtin in BUILTINS]
    for profile in profiles:
        profile.save_csv(Path(folder) / f"{profile.name}.csv")
    for document in documents:
        update_block(Path(document), "measured", listing(measured()))
        update_block(Path(document), "list", listing(profiles))


if __name__ == "__main__":
    main(*sys.argv[1:])
