"""The pipeline reshaping while its iteration time walks along the frontier."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envplan._files import atomic_write
from envplan.plotting import page
from envplan.plotting.figures import GREEN, figure, in_joules, savings_words, title
from envplan.simulation import simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

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
    """Write an animation of plans along the frontier: .gif or .html.

    Args:
        plans: at least one, by ascending time: a frame each.
        progress: called with (frames to go, 0).

    Raises:
        InputError: the file cannot be written.
    """
    timelines = [simulate(plan, frontier.profile) for plan in plans]
    if Path(path).suffix.lower() == ".html":
        atomic_write(path, _page(frontier, plans, timelines))
    else:
        atomic_write(path, _gif(list(_frames(frontier, plans, timelines, progress))))


def _page(frontier: Frontier, plans: Sequence[Plan], timelines: Sequence[Timeline]) -> str:
    data = {
        "animation": {
            "frames": [page.timeline_data(timeline, "plan") for timeline in timelines],
            "span": max(timeline.sync_time for timeline in timelines),
            "frontier": page.frontier_data(frontier, plans, beyond=False),
        }
    }
    body = [page.section("Along the frontier", page.chart("animation", "animation"))]
    return page.job_page("From T_min to T_star: {}", frontier, body, data)


def _frames(
    frontier: Frontier,
    plans: Sequence[Plan],
    timelines: Sequence[Timeline],
    progress: Progress | None,
) -> Iterator[NDArray[Any]]:
    """Pictures, uint8 (height, width, 3) each."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from envplan.plotting.frontier import draw_frontier
    from envplan.plotting.timeline import Drawn, colour_scale, draw_legend, windows

    shown = [Drawn(timeline, "frequency") for timeline in timelines]
    window = windows(timelines)[0]
    with figure(*_FIGURE_IN) as drawn:
        drawn.set_dpi(_DPI)
        canvas: Any = FigureCanvasAgg(drawn)
        stages, curve = drawn.subplots(2, 1, height_ratios=[1.25, 1])
        scale = colour_scale(drawn, [stages], shown, "frequency")
        draw_legend(drawn, timelines[:1], title(frontier))
        joules = draw_frontier(curve, frontier, plans, dot=4)
        (now,) = curve.plot([], [], "o", color="#6D28D9", markersize=11)
        drawn.legend(*curve.get_legend_handles_labels(), loc="outside lower left", ncols=2)
        headline = curve.set_title(" ", loc="left", color=GREEN, weight="bold")
        per_s = _STAGES_IN / (window[1] - window[0])
        shown[0].draw(stages, scale, window, per_s)
        stages.set_xlabel("Time (s)")
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")  # nothing moves from frame to frame but the data
        for moving in (stages, now, headline):
            moving.set_animated(True)
        canvas.draw()
        ground = canvas.copy_from_bbox(drawn.bbox)
        for k, (plan, one) in enumerate(zip(plans, shown, strict=True)):
            if progress is not None:
                progress(len(plans) - k, 0)
            stages.clear()
            one.draw(stages, scale, window, per_s)
            stages.set_xlabel("Time (s)")
            now.set_data([plan.iteration_time], [plan.energy / joules])
            words = savings_words(plan.predicted.savings_percent, plan.predicted.slowdown_percent)
            headline.set_text(f"{plan.iteration_time:#.4g} s, {in_joules(plan.energy)}, {words}")
            canvas.restore_region(ground)
            for moving in (stages, now, headline):
                drawn.draw_artist(moving)
            yield np.asarray(canvas.buffer_rgba())[..., :3].copy()


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
