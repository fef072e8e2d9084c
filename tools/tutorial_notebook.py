"""Writes docs/tutorial.ipynb: `python -m tools.tutorial_notebook docs/tutorial.ipynb`.

The notebook holds no outputs, so that it changes only with its text; a test runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

#: Cells in order: text in Markdown, or code after a line `# code`.
_CELLS: Final = (
    """# envplan in ten minutes

The [tutorial](tutorial.md) as a notebook: the same job, from Python. Everything here runs
on a laptop; no GPU is touched.""",
    """# code
import envplan

profile = envplan.Profile.builtin("sosp24-a100-gpt3-xl-4stage")
profile.to_frame().head()""",
    """A profile says what each operation costs at each clock: seconds and joules of one GPU.
This one comes from measurements that the authors of Perseus published: GPT-3 1.3B on four
A100. With 16 microbatches in place of its 128, the pictures show more.""",
    """# code
job = profile.pipeline()
pipeline = envplan.Pipeline("1f1b", 4, 16, p2p_latency=job.p2p_latency, extras=job.extras)
frontier = envplan.trace_frontier(pipeline, profile)
frontier""",
    """The frontier goes from `T_min`, the least time possible, to `T_star`, where the energy is
least. No plan lies below the curve.""",
    """# code
frontier.min_time, frontier.min_energy_time, frontier.energy_at(frontier.min_time)""",
    """A plan is a point of it: a clock for every operation. Without a target it is as fast as
ever. Percent are fractions in Python: `slowdown=0.02` is 2%.""",
    """# code
plan = frontier.plan()
slower = frontier.plan(slowdown=0.02)
print(f"no slowdown: {plan.savings.percent:.1f}% saved, gap {100 * plan.gap:.2f}%")
print(f"2% slower:   {slower.savings.percent:.1f}% saved")
plan.frequencies[0][:8]  # MHz of stage 0, in execution order""",
    """The timeline says who waits when, which operations are critical, and what power all GPUs
draw.""",
    """# code
timeline = envplan.simulate(plan, profile)
timeline""",
    """Conditions combine: clocks that come 10 ms late, and a cap on the power of all GPUs.""",
    """# code
capped = frontier.plan(slowdown=0.05, switch_latency=0.010, peak_power_cap=1250)
capped.iteration_time, capped.energy, timeline.peak_power""",
    """Save the plan; `envplan check plan.json` proves it from the file and the profile alone,
`envplan report plan.json` puts it on a page, and `envplan apply plan.json` writes what
every rank sets its clock to.""",
    """# code
from pathlib import Path
from tempfile import mkdtemp

path = Path(mkdtemp()) / "plan.json"
plan.save(path)
envplan.verify_plan(envplan.Plan.load(path), profile)""",
)


def notebook() -> str:
    """The notebook as the text of its file."""
    cells: list[dict[str, object]] = []
    for number, text in enumerate(_CELLS):
        is_code = text.startswith("# code\n")
        source = text.removeprefix("# code\n").splitlines(keepends=True)
        cell: dict[str, object] = {"id": f"cell-{number}", "metadata": {}, "source": source}
        cell["cell_type"] = "code" if is_code else "markdown"
        if is_code:
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(notebook(), encoding="utf-8")
