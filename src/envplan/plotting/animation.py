"""The pipeline reshaping while its iteration time walks along the frontier."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from envplan._files import atomic_write
from envplan.errors import InputError
from envplan.plotting import page
from envplan.plotting.frontier import STYLE, energy_unit, in_joules, label_job, title
from envplan.simulation import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

__all__ = ["ANIMATION_TYPES", "animate_frontier"]

#: File endings that an animation can have.
ANIMATION_TYPES: Final = (".gif", ".mp4", ".html")

_FRAME_MS: Final = 180
_LAST_FRAME_MS: Final = 1600
_DPI: Final = 100
_FIGURE_IN: Final = (9.6, 7.2)
_STAGES_IN: Final = 7.4  # how wide the stages' axes come out

Progress = Callable[[int, int], None]


def animate_frontier(
    frontier: Frontier,
    plans: Sequence[Plan],
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> None:
    """Write an animation of plans along the frontier: .gif, .mp4 (with ffmpeg) or .html.

    Args:
        plans: at least one, by ascending time: a frame each.
        progress: called with (frames to go, 0).

    Raises:
        InputError: the file cannot be written, or is an .mp4 and there is no ffmpeg.
    """
    kind = Path(path).suffix.lower()
    if kind == ".mp4" and shutil.which("ffmpeg") is None:
        raise InputError(
            "needs the program ffmpeg, which is not installed; install it, or write .gif or .html",
            path=path,
        )
    timelines = [simulate(plan, frontier.profile) for plan in plans]
    if kind == ".html":
        page.save_page(_page(frontier, plans, timelines), path)
        return
    frames = _frames(frontier, plans, timelines, progress)
    atomic_write(path, _gif(frames) if kind == ".gif" else _mp4(frames))


def _page(frontier: Frontier, plans: Sequence[Plan], timelines: Sequence[Timeline]) -> str:
    name = f"From T_min to T* of {frontier.profile.name}"
    frames = [page.timeline_data(timeline, "plan") for timeline in timelines]
    clocked = [
        (mhz, watts)
        for frame in frames
        for mhz, watts in zip(frame["ops"]["mhz"], frame["ops"]["watts"], strict=True)
        if mhz
    ] or [(0, 0.0)]
    ranges = {
        key: [min(values), max(values)]
        for key, values in zip(("mhz", "watts"), zip(*clocked, strict=True), strict=True)
    }
    data = {
        "animation": {
            "frames": frames,
            "range": ranges,
            "span": max(timeline.sync_time for timeline in timelines),
            "frontier": page.frontier_data(frontier, plans),
        }
    }
    body = page.heading(name, label_job(frontier), frontier.profile.metadata.source)
    body += page.section("Along the frontier", page.chart("animation", "animation"))
    return page.document(name, body, data)


def _frames(
    frontier: Frontier,
    plans: Sequence[Plan],
    timelines: Sequence[Timeline],
    progress: Progress | None,
) -> list[NDArray[Any]]:
    """Pictures, uint8 (height, width, 3) each."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image

    from envplan.plotting.timeline import (
        colour_scale,
        draw_bubbles,
        draw_colour_bar,
        draw_legend,
        draw_operations,
        label_stages,
    )

    span = max(timeline.sync_time for timeline in timelines)
    scale = colour_scale(timelines, "frequency")
    pictures = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_FIGURE_IN, dpi=_DPI, layout="constrained")
        stages, curve = figure.subplots(2, 1, height_ratios=[1.25, 1])
        draw_colour_bar(figure, [stages], scale, "frequency")
        draw_legend(figure, timelines[:1], title(frontier))
        for k, (plan, timeline) in enumerate(zip(plans, timelines, strict=True)):
            if progress is not None:
                progress(len(plans) - k, 0)
            stages.clear()
            draw_bubbles(stages, timeline)
            draw_operations(stages, timeline, scale, "frequency", _STAGES_IN / span)
            label_stages(stages, timeline)
            stages.set_xlim(0, span)
            stages.set_xlabel("Time (s)")
            _draw_curve(curve, frontier, plans, plan)
            if k == 0:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # nothing moves from frame to frame but the data
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            pictures.append(np.asarray(Image.open(buffer).convert("RGB")))
    return pictures


def _draw_curve(axes: Axes, frontier: Frontier, plans: Sequence[Plan], now: Plan) -> None:
    axes.clear()
    scale, unit = energy_unit(now.predicted.baseline.energy_j)
    axes.plot(
        frontier.times,
        frontier.energies / scale,
        color="#0072B2",
        linewidth=2.2,
        label="Exact relaxed frontier (lower bound)",
    )
    axes.plot(
        [plan.iteration_time for plan in plans],
        [plan.energy / scale for plan in plans],
        "o",
        color="#E69F00",
        markersize=4,
        label="Plans",
    )
    axes.plot(now.iteration_time, now.energy / scale, "o", color="#6D28D9", markersize=11)
    predicted = now.predicted
    baseline = predicted.baseline
    axes.plot(
        baseline.iteration_time_s,
        baseline.energy_j / scale,
        "X",
        color="#D55E00",
        markersize=11,
        linestyle="none",
        label="Maximum frequency everywhere",
    )
    slower = predicted.slowdown_percent
    axes.set_title(
        f"{now.iteration_time:#.4g} s, {in_joules(now.energy)}, "
        f"{predicted.savings_percent:.1f}% saved, "
        + (f"{slower:.1f}% slower" if slower >= 0.05 else "no slowdown"),
        loc="left",
        color="#007A5A",
        weight="bold",
    )
    axes.set_xlabel("Iteration time (s), axis does not start at 0")
    axes.set_ylabel(f"Energy ({unit}),\naxis does not start at 0")
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.legend(loc="upper right", frameon=True, edgecolor="0.85", framealpha=1)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _gif(frames: Sequence[NDArray[Any]]) -> bytes:
    """Forwards and then back again, for ever."""
    import numpy as np
    from PIL import Image

    there = [Image.fromarray(frame) for frame in frames]
    # One palette for all frames, or colours would flicker; ends and middle have all there is.
    some = np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]])
    palette = Image.fromarray(some).quantize(256, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in there]
    images += images[-2:0:-1]
    times = [_FRAME_MS] * len(images)
    times[0] = times[len(there) - 1] = _LAST_FRAME_MS
    buffer = io.BytesIO()
    images[0].save(
        buffer, format="GIF", save_all=True, append_images=images[1:], duration=times, loop=0
    )
    return buffer.getvalue()


def _mp4(frames: Sequence[NDArray[Any]]) -> bytes:
    """Encoded by ffmpeg, which gets raw pictures."""
    height, width, _ = frames[0].shape
    with TemporaryDirectory() as folder:
        target = Path(folder) / "animation.mp4"
        command = ["ffmpeg", "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
        command += ["-s", f"{width}x{height}", "-r", f"{1000 / _FRAME_MS:.3f}", "-i", "-"]
        command += ["-pix_fmt", "yuv420p", "-vf", "crop=trunc(iw/2)*2:trunc(ih/2)*2", str(target)]
        pictures = b"".join(frame.tobytes() for frame in frames)
        done = subprocess.run(command, input=pictures, capture_output=True, check=False)
        if done.returncode != 0 or not target.exists():
            reason = done.stderr.decode(errors="replace").strip().splitlines()
            raise InputError(f"ffmpeg failed: {reason[-1] if reason else 'it said nothing'}")
        return target.read_bytes()
