"""A site of measured jobs under falling budgets: python -m benchmarks.site_results [PAGE].

Ten measured jobs (Perseus's artifact) fill 1,024 GPUs. The page sets sharing by price beside three
simpler ways to shed power, for budgets from 95 to 60% of what the site draws without plans, and for
a day on which the grid asks for a quarter less for three hours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.report import table
from benchmarks.running import note
from envplan import FrontierFile, Profile, trace_frontier
from envplan.plan.frontier_file import distinct, less_powerful
from envplan.plotting.figures import save_figure
from envplan.plotting.site import site_figure
from envplan.site import Budget, SiteJob, SitePlan, plan_site
from envplan.site.budget import Interval
from envplan.site.jobs import frontier_sha256
from envplan.site.plan import SiteOverheads
from envplan.site.shedding import ShedPoint, shed_curve

#: Jobs of Perseus's artifact and their data-parallel replicas: 512 A100s and 512 A40s.
REPLICAS: Final = {
    "sosp24-a100-gpt3-xl-4stage": 32,
    "sosp24-a100-bloom-3b-4stage": 24,
    "sosp24-a100-bert-huge-uncased-4stage": 24,
    "sosp24-a100-t5-3b-4stage": 24,
    "sosp24-a100-wide-resnet101_8-4stage": 24,
    "sosp24-a40-gpt3-2.7b-8stage": 16,
    "sosp24-a40-bloom-3b-8stage": 12,
    "sosp24-a40-bert-huge-uncased-8stage": 12,
    "sosp24-a40-t5-3b-8stage": 12,
    "sosp24-a40-wide-resnet101_8-8stage": 12,
}
BUDGET_PERCENTS: Final = (95, 90, 85, 80, 75, 70, 65, 60)
#: Plans along each half of a frontier.
NUM_PLANS: Final = 25

#: An Emerald-like day: full power, a ramp down within an hour, three hours of a quarter less, a
#: ramp up. Shares of the power without plans, by quarters of an hour.
_QUARTER_S: Final = 900.0
_RAMP: Final = (1.0, 0.9375, 0.875, 0.8125)
DAY: Final = (
    *(1.0,) * 56,
    *_RAMP,
    *(0.75,) * 12,
    *reversed(_RAMP),
    *(1.0,) * 20,
)


def site_job(name: str, replicas: int) -> SiteJob:
    """A measured job whose frontier is traced up to T_max; it may pause."""
    note(name)
    profile = Profile.builtin(name)
    frontier = trace_frontier(profile.pipeline(), profile, full=True)
    plans = distinct(frontier.sample_plans(NUM_PLANS))
    slower = less_powerful(frontier.sample_plans(NUM_PLANS, beyond=True), plans[-1])
    file = FrontierFile.from_plans(frontier, plans, slower)
    short_name = name.removeprefix("sosp24-")
    return SiteJob(
        short_name, file, sha256=frontier_sha256(file), replicas=replicas, may_pause=True
    )


def losses_at(curve: Sequence[ShedPoint], power_w: float) -> list[float | None]:
    """Throughput lost at a power in each of the four ways, %; the curve is read between its points.

    None: a way cannot keep to it. Above the curve nothing is lost but what the first point loses.
    """
    powers_w = [point.power_w for point in reversed(curve)]
    losses: list[float | None] = []
    for losses_percent in (
        [point.shared_percent for point in reversed(curve)],
        [point.alike_percent for point in reversed(curve)],
        [point.capped_percent for point in reversed(curve)],
        [point.paused_percent for point in reversed(curve)],
    ):
        known_w, known_percent = [], []
        for known_power_w, loss_percent in zip(powers_w, losses_percent, strict=True):
            if loss_percent is not None:
                known_w.append(known_power_w)
                known_percent.append(loss_percent)
        is_known = bool(known_w) and known_w[0] <= power_w
        losses.append(float(np.interp(power_w, known_w, known_percent)) if is_known else None)
    return losses


def loss_words(loss_percent: float | None) -> str:
    """A loss as a table has it."""
    return "cannot" if loss_percent is None else f"{loss_percent:.2f}"


def at_budgets(curve: Sequence[ShedPoint], unplanned_w: float) -> list[list[str]]:
    """Rows of losses at each budget."""
    rows = []
    for percent in BUDGET_PERCENTS:
        power_w = unplanned_w * percent / 100
        losses = map(loss_words, losses_at(curve, power_w))
        rows.append([f"{percent}%", f"{power_w / 1e3:.1f}", *losses])
    return rows


def over_the_day(curve: Sequence[ShedPoint], unplanned_w: float) -> list[list[str]]:
    """Rows of losses while the grid calls, and as the mean over the day."""
    called = losses_at(curve, min(DAY) * unplanned_w)
    quarters = [losses_at(curve, share * unplanned_w) for share in DAY]
    means: list[float | None] = []
    for of_way in zip(*quarters, strict=True):
        known = [loss_percent for loss_percent in of_way if loss_percent is not None]
        means.append(float(np.mean(known)) if len(known) == len(of_way) else None)
    return [
        ["the three hours", *map(loss_words, called)],
        ["the day", *map(loss_words, means)],
    ]


def day_of(unplanned_w: float) -> Budget:
    """The budget of the day."""
    return Budget(
        tuple(
            Interval(k * _QUARTER_S, (k + 1) * _QUARTER_S, share * unplanned_w, 0.0)
            for k, share in enumerate(DAY)
        )
    )


def page(
    jobs: Sequence[SiteJob], curve: Sequence[ShedPoint], unplanned_w: float, day: SitePlan
) -> str:
    """The page in Markdown."""
    worst = max(interval.gap for interval in day.intervals)
    called = [i for i, share in zip(day.intervals, DAY, strict=True) if share == min(DAY)]
    num_gpus = sum(job.num_gpus for job in jobs)
    ways = [
        "shared by price (%)",
        "each job cut alike (%)",
        "clocks capped alike (%)",
        "least valuable paused (%)",
    ]
    return f"""# A site under a power budget

Made by `python -m benchmarks.site_results docs/results-site.md`. Ten jobs of Perseus's artifact,
with their times and waiting powers measured and their energies identified from measured iterations
([profiles](profiles.md)), on {num_gpus:,} GPUs, each with as many replicas as fill the site.
Without plans, at maximum frequency, their GPUs draw {unplanned_w / 1e3:.1f} kW on average. Every
job counts alike and may pause. Power is that of GPUs, averaged over an iteration; nothing was run
on real GPUs for this page.

## Throughput lost at falling budgets

{table(["budget", "kW", *ways], at_budgets(curve, unplanned_w))}

*Shared by price* is what `envplan site` does ([how](site.md)). *Each job cut alike* follows the
same plans, but takes the same share of power from every job. The other two know no plans: all
clocks capped at the same share of their highest ("cannot": no clock is low enough), and jobs at
maximum frequency of which those of least value for a watt pause.

## A day on which the grid asks for a quarter less

Full power, a ramp down within an hour, three hours at 75%, a ramp up. In the three hours
{called[0].throughput_loss_percent:.2f}% of throughput is lost; over the day
{day.throughput_loss_percent:.2f}%. The next kilowatt is then worth
{called[0].price_percent_per_kw:.4f}% of throughput. No plans of these jobs lose less by more than a
certified {100 * worst:.4f}% of what is left. The table is read off the curves, between points.

{table(["throughput lost over", *ways], over_the_day(curve, unplanned_w))}

![The day](results-site.png)
"""


def main() -> None:
    """Plan the site, and write the page and its picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.site_results", description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", help="default: it is printed")
    options = parser.parse_args()
    jobs = [site_job(name, replicas) for name, replicas in REPLICAS.items()]
    note("sharing")
    curve = shed_curve(jobs, SiteOverheads())
    unplanned_w = curve[0].power_w
    day = plan_site(jobs, day_of(unplanned_w))
    text = page(jobs, curve, unplanned_w, day)
    if options.page is None:
        print(text)
        return
    options.page.write_text(text)
    save_figure(site_figure(day, curve), options.page.with_suffix(".png"))


if __name__ == "__main__":
    main()
