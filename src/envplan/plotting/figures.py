"""What all figures share: how they look, how they are written, how titles and units read."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from envplan._io.files import atomic_write
from envplan._io.words import counted, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.pipeline import Pipeline
    from envplan.profile import Profile
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

# Okabe and Ito's palette, which colour-blind readers can tell apart; shapes differ as well.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#007A5A", "#D55E00"
OKABE_ITO: Final = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#000000")
_GRID: Final = "0.92"
#: T_min and T_star with a word for each, as pictures and pages name them.
ENDS: Final = ("T_min, fastest", "T_star, least energy")
_STYLE: Final[Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 13,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "envplan",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
_LONGEST_NAME: Final = 44
_VENDORS: Final = ("NVIDIA ", "Tesla ", "GeForce ")


@contextmanager
def figure(width: float, height: float, font: float = 12) -> Iterator[Figure]:
    """A figure of so many inches, laid out so that nothing is cut, while it is drawn.

    Args:
        font: size of its text; titles and legends follow.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    sizes = ("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize")
    scaled: Any = {name: _STYLE[name] * font / _STYLE["font.size"] for name in sizes}
    with mpl.rc_context({**_STYLE, **scaled}):
        yield Figure(figsize=(width, height), layout="constrained")


def made(drawn: Figure, kind: str, dpi: int = 200) -> bytes:
    """A figure as a file of a kind, "png", "svg" or "pdf". The same figure gives the same bytes."""
    import matplotlib as mpl

    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        drawn.savefig(buffer, format=kind, dpi=dpi, metadata=dated.get(kind))
    return buffer.getvalue()


def save_figure(drawn: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format its file name ends in, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    atomic_write(path, made(drawn, Path(path).suffix.lower().removeprefix(".")))


def label_axes(axes: Axes, x: str, y: str, heading: str = "") -> None:
    """Labels, title and grid of a chart."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if heading:
        axes.set_title(heading, loc="left")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def rows_in_time(axes: Axes, names: Sequence[str], window: tuple[float, float]) -> None:
    """Named rows, the first on top, between two times."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(*window)
    axes.tick_params(axis="y", length=0)


def bars(axes: Axes, left: Any, right: Any, low: Any, height: Any, **look: Any) -> Any:
    """Draw n bars; returns their corners, (n, 4, 2)."""
    from matplotlib.collections import PolyCollection

    corners = ((left, low), (right, low), (right, low + height), (left, low + height))
    boxes: Any = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(boxes, **look))
    return boxes


def ink(fill: Any) -> str:
    """Black or white, whichever is legible on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"


def unit_of(value: float, unit: str) -> tuple[float, str]:
    """What to divide joules or watts by, and what they are then called, such as "kJ"."""
    factors = {1e9: "G", 1e6: "M", 1e3: "k"}
    return next(((f, sign + unit) for f, sign in factors.items() if value >= 10 * f), (1.0, unit))


def in_unit(value: float, unit: str) -> str:
    """Joules or watts to four digits, with their unit."""
    scale, name = unit_of(value, unit)
    return f"{significant(value / scale)} {name}"


def savings_words(saved: float, slower: float) -> str:
    """What is saved and how much slower it is, both in percent."""
    return f"{saved:.1f}% saved, " + (f"{slower:.1f}% slower" if slower >= 0.05 else "no slowdown")


def shortened(name: str) -> str:
    """A name cut to fit over a chart."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def source_words(profile: Profile) -> str | None:
    """Where a profile's figures are from: measured, modelled, or energies identified from measured
    iterations; None where it does not say."""
    metadata = profile.metadata
    if metadata.energies_are != metadata.source:
        return f"times {metadata.source}, energies {metadata.energies_are}"
    return metadata.source


def workload_title(profile: Profile, gpus: int) -> str:
    """Such as "GPT-3 1.3B on 4x A40", from the sidecar; where it says nothing, the profile's name.

    Args:
        gpus: of the whole job.
    """
    workload, gpu = profile.metadata.workload, profile.metadata.gpu
    if not workload:
        return shortened(profile.name)
    what = workload.split(",")[0].removesuffix(" training")
    if not gpu or profile.metadata.stage_gpus is not None:
        return f"{what} on {counted(gpus, 'GPU')}"
    for vendor in _VENDORS:
        gpu = gpu.removeprefix(vendor)
    return f"{what} on {gpus}x {gpu}"


def job_line(pipeline: Pipeline, gpus: int) -> str:
    """Such as "1f1b, 4 stages, 8 microbatches, 4 GPUs".

    Args:
        gpus: of one stage, in all replicas.
    """
    chunks = f" x {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
    stages = pipeline.num_stages
    microbatches = counted(pipeline.num_microbatches, "microbatch")
    return (
        f"{pipeline.schedule}, {counted(stages, 'stage')}{chunks}, {microbatches}, "
        f"{counted(gpus * stages, 'GPU')}"
    )


def title(of: Frontier | Timeline) -> str:
    """Two lines that say what a figure is about: the workload on its GPUs, and the job."""
    modelled = " (modelled)" if of.profile.metadata.source == "modelled" else ""
    named = workload_title(of.profile, of.num_gpus * of.pipeline.num_stages) + modelled
    return f"{named}\n{job_line(of.pipeline, of.num_gpus)}"
