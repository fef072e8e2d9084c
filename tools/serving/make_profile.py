# ruff: noqa: E501, RUF012 (the page's table has long rows)
"""Makes the built-in serving profile, and the page about its errors, from measured tables.

    python tools/serving/make_profile.py DATA ROOT

DATA holds splitwise_perf_model.csv.gz, ml_energy_v3.csv and the two hours of Azure. Below ROOT it
writes profiles/serving/h100-llama2-70b.{csv,meta.json} and docs/serving-profile.md, which says what
is measured, what is identified from measurements and what is assumed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from envplan.serving.classes import DEFAULT_CLASSES
from envplan.serving.performance import InstancePerformance
from envplan.serving.profile import ServingProfile

TPS = (2, 4, 8)
CLOCKS = (795, 1005, 1200, 1500, 1980)
TOP = CLOCKS[-1]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
CHUNK = {2: 512, 4: 1024, 8: 1024}

PARAMETERS = 70.6e9
BANDWIDTH, FLOPS, TDP_W, MEMORY = 3.35e12, 989e12, 700.0, 80e9  # of one H100 SXM, data sheet
KV_BYTES = 2 * 80 * 8 * 128 * 2  # of a token: keys and values, layers, heads, width, bytes
USED = 0.9  # of the memory, as vLLM's default
IDLE_W = 100.0  # of a GPU that holds the weights; assumed
FLOOR = 0.9  # of the shortest prompt's time: software, whatever the clock; assumed
PREFILL_BY_CLOCK = 0.85  # of a prompt's time beyond that, at the highest clock; assumed
KNEE_MHZ, RISE = 1200.0, 5e-4  # voltage floor, and its slope above: envplan's model of the H100

#: Wh per request of Llama2-70B on H100 at 2,000 tokens/s (DynamoLLM), by class and TP, at 0.8, 1.2,
#: 1.6 and 2.0 GHz; None where the SLO is violated.
_ = None
DYNAMO_WH = {
    "SS": {2: (_, 0.77, 0.97, 1.03), 4: (0.94, 0.79, 0.91, 1.01), 8: (1.35, 1.19, 1.29, 1.49)},
    "SM": {2: (_, 2.78, 3.45, 3.68), 4: (3.39, 2.82, 3.37, 3.81), 8: (4.55, 4.15, 4.43, 4.74)},
    "SL": {2: (_, _, _, _), 4: (4.84, 4.17, 4.97, 5.52), 8: (6.37, 5.62, 5.59, 6.95)},
    "MS": {2: (_, _, 1.02, 1.09), 4: (_, 1.08, 1.07, 1.20), 8: (1.51, 1.29, 1.34, 1.73)},
    "MM": {2: (_, _, _, _), 4: (_, 4.23, 3.91, 4.08), 8: (5.34, 4.39, 4.56, 5.44)},
    "ML": {2: (_, _, _, _), 4: (_, 4.99, 4.66, 4.53), 8: (6.86, 5.79, 6.52, 7.12)},
    "LS": {2: (_, _, _, _), 4: (_, 1.51, 1.64, 1.76), 8: (2.55, 2.53, 2.83, 2.94)},
    "LM": {2: (_, _, _, _), 4: (_, _, _, _), 8: (_, 7.71, 8.81, 9.17)},
    "LL": {2: (_, _, _, _), 4: (_, _, _, _), 8: (_, 12.99, 11.89, 13.21)},
}
DYNAMO_MHZ = (800, 1200, 1600, 2000)


def rms(errors: Any) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(errors))))


class Decode:
    """Time and power of a step without prompts, identified from ML.ENERGY's H100 points.

    Time, ms: a + b [TP above 1] + weights / (TP x bandwidth x share) + slope x batch. Power of a
    GPU, W: base + rise x share of the peak arithmetic that the batch takes. Points are those of
    dense bfloat16 models of 27 to 71 billion parameters on lm-arena-chat.
    """

    MODELS = {
        "Qwen/Qwen3-32B": 32.8e9,
        "google/gemma-3-27b-it": 27.4e9,
        "meta-llama/Llama-3.1-70B-Instruct": PARAMETERS,
        "meta-llama/Llama-3.3-70B-Instruct": PARAMETERS,
    }

    def __init__(self, table: pd.DataFrame) -> None:
        known = table[
            (table.gpu == "H100")
            & (table.task == "lm-arena-chat")
            & (table.weight_precision == "bfloat16")
            & table.model.isin(self.MODELS)
        ].copy()
        known["parameters"] = known.model.map(self.MODELS)
        self.points = known
        tp, batch, size = known.num_gpus, known.avg_batch_size, known.parameters
        measured = known.median_itl_ms

        def misfit(p: Any) -> Any:
            self.p = p
            return np.log(self.time_ms(tp, batch, size) / measured)

        bounds = ([0, 0, 0.5, 0], [10, 10, 0.95, 1])  # what can be: no more than the bandwidth
        misfit(least_squares(misfit, [2.0, 1.0, 0.8, 0.1], bounds=bounds).x)
        effort = 2 * size * batch / (tp * FLOPS * self.time_ms(tp, batch, size) * 1e-3)
        watts = known.avg_power_w / tp
        columns = np.column_stack([np.ones(len(known)), effort])
        self.base, self.rise = np.linalg.lstsq(
            columns / watts.to_numpy()[:, None], np.ones(len(known)), rcond=None
        )[0]

    def time_ms(self, tp: Any, batch: Any, size: float = PARAMETERS) -> Any:
        """Time of a decode step, ms, of a model of `size` parameters."""
        a, b, share, slope = self.p
        return a + b * (tp > 1) + 2e3 * size / (tp * BANDWIDTH * share) + slope * batch

    def gpu_w(self, tp: Any, batch: Any, size: float = PARAMETERS) -> Any:
        """Power of one GPU in a decode step, W."""
        effort = 2 * size * batch / (tp * FLOPS * self.time_ms(tp, batch, size) * 1e-3)
        return np.minimum(TDP_W, self.base + self.rise * effort)


def voltage_power(mhz: float) -> float:
    """Dynamic power at a clock, f v(f)^2, relative to the highest clock."""

    def value(f: float) -> float:
        return f * (1 + RISE * max(0.0, f - KNEE_MHZ)) ** 2

    return value(mhz) / value(TOP)


class Clocks:
    """Model of clocks below the highest.

    `fixed` of a decode step's time does not depend on the clock, and `static_w` of a GPU's power;
    the rest goes with 1/f, and with f v(f)^2.

    Both are identified from the ratios of energies within each row of DynamoLLM's table, for
    classes that are mostly decoding.
    """

    def __init__(self, gpu_w: float) -> None:
        pairs = [
            (mhz, cells[k] / cells[-1])
            for name in ("SM", "SL", "MM", "ML", "LL", "LM")
            for cells in DYNAMO_WH[name].values()
            for k, mhz in enumerate(DYNAMO_MHZ[:-1])
            if cells[k] is not None and cells[-1] is not None
        ]
        mhz, ratio = np.array(pairs).T

        def misfit(p: Any) -> Any:
            return [self.energy_ratio(f, *p, gpu_w) - r for f, r in zip(mhz, ratio, strict=True)]

        found = least_squares(misfit, [0.7, 250.0], bounds=([0.3, 150.0], [1.0, 400.0]))
        self.fixed, self.static_w = found.x
        self.points, self.error = len(ratio), rms(found.fun)

    @staticmethod
    def energy_ratio(mhz: float, fixed: float, static_w: float, gpu_w: float) -> float:
        """Energy of a decode step at a clock, relative to the highest clock."""
        power = static_w + (gpu_w - static_w) * voltage_power(mhz)
        return (fixed + (1 - fixed) * TOP / mhz) * power / gpu_w

    def power(self, gpu_w: Any, mhz: float) -> Any:
        """Power at a clock of a GPU that draws gpu_w at the highest, W."""
        static = np.minimum(self.static_w, gpu_w)
        return static + (gpu_w - static) * voltage_power(mhz)


def prompts(table: pd.DataFrame, tp: int, hardware: str = "h100-80gb") -> pd.DataFrame:
    """Median time of one prompt by its length, s."""
    rows = table[
        (table.model == "llama2-70b")
        & (table.hardware == hardware)
        & (table.tensor_parallel == tp)
        & (table.batch_size == 1)
        & (table.token_size == 128)
    ]
    return rows.groupby("prompt_size")[["prompt_time", "peak_power"]].median()


def rising(values: Any) -> Any:
    """The same, but never falling: between the highest so far and the lowest to come."""
    highest = np.maximum.accumulate(values)
    lowest = np.minimum.accumulate(values[::-1])[::-1]
    return (highest + lowest) / 2


def prompt_share(table: pd.DataFrame) -> tuple[Any, Any]:
    """Tokens and the share of the TDP that a prompt draws: A100, TP8 (the H100 rows lack power)."""
    known = prompts(table, 8, "a100-80gb").peak_power
    return known.index.to_numpy(float), np.maximum.accumulate(np.minimum(1.0, known.to_numpy()))


def rows(decode: Decode, clocks: Clocks, splitwise: pd.DataFrame) -> list[list[Any]]:
    """Rows of the profile: TP, clock, phase, size, time and power."""
    sizes, shares = prompt_share(splitwise)
    found: list[list[Any]] = []
    for tp in TPS:
        times = prompts(splitwise, tp).prompt_time
        lengths = times.index.to_numpy(float)
        at_top = rising(times.to_numpy()) / 1e3
        prompt_w = TDP_W * np.interp(lengths, sizes, shares)
        batch = np.array(BATCHES, float)
        step_s, step_w = decode.time_ms(tp, batch) / 1e3, decode.gpu_w(tp, batch)
        for mhz in CLOCKS:
            floor = FLOOR * at_top[0]
            slower = 1 - PREFILL_BY_CLOCK + PREFILL_BY_CLOCK * TOP / mhz
            prompt_s = floor + (at_top - floor) * slower
            stretched = clocks.fixed + (1 - clocks.fixed) * TOP / mhz
            found.append([tp, mhz, "idle", 0, 0, tp * IDLE_W])
            for n, t, w in zip(lengths, prompt_s, clocks.power(prompt_w, mhz), strict=True):
                found.append([tp, mhz, "prefill", int(n), f"{t:.6f}", f"{tp * w:.1f}"])
            for n, t, w in zip(batch, step_s * stretched, clocks.power(step_w, mhz), strict=True):
                found.append([tp, mhz, "decode", int(n), f"{t:.6f}", f"{tp * w:.1f}"])
    return found


def class_means(data: Path) -> dict[str, dict[str, float]]:
    """Mean lengths of each class over both hours."""
    files = [data / f"AzureLLMInferenceTrace_{name}.csv.gz" for name in ("code", "conv")]
    hours = pd.concat(pd.read_csv(file) for file in files)
    given, made = hours.ContextTokens.to_numpy(), hours.GeneratedTokens.to_numpy()
    place = DEFAULT_CLASSES.classify(given, made)
    return {
        name: {
            "input_tokens": round(float(given[place == k].mean()), 1),
            "output_tokens": round(float(made[place == k].mean()), 1),
        }
        for k, name in enumerate(DEFAULT_CLASSES)
    }


def sidecar(data: Path) -> dict[str, Any]:
    """The profile's sidecar: where its figures come from."""
    return {
        "schema": "envplan/serving-profile/v1",
        "gpu": "NVIDIA H100 80GB HBM3",
        "model": "Llama2-70B",
        "source": "identified",
        "modelled": (
            "time to the first token is measured (Splitwise, Llama2-70B on H100); decoding time "
            "and power are identified from measurements (ML.ENERGY, H100); what clocks below 1980 "
            "MHz do is modelled; power of prompts is the A100's share of its TDP; idle power is "
            "assumed (docs/serving-profile.md)"
        ),
        "classes": class_means(data),
        "kv_tokens": {str(tp): int((MEMORY * tp * USED - 2 * PARAMETERS) / KV_BYTES) for tp in TPS},
        "chunk_tokens": {str(tp): CHUNK[tp] for tp in TPS},
        "kv_bytes_per_token": KV_BYTES,
    }


def table(headers: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, its first column aligned to the left."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, rule, *lines])


def page(decode: Decode, clocks: Clocks, splitwise: pd.DataFrame, profile: ServingProfile) -> str:
    """The page that holds the profile against its measurements."""
    points = decode.points
    time = decode.time_ms(points.num_gpus, points.avg_batch_size, points.parameters)
    watts = decode.gpu_w(points.num_gpus, points.avg_batch_size, points.parameters)
    time_error = (time / points.median_itl_ms - 1).to_numpy()
    power_error = (watts * points.num_gpus / points.avg_power_w - 1).to_numpy()
    llama = points.model.str.contains("Llama-3").to_numpy()
    decoding = [
        [
            p.model.split("/")[1], str(p.num_gpus), f"{p.avg_batch_size:.0f}",
            f"{p.median_itl_ms:.1f}", f"{100 * te:+.1f}",
            f"{p.avg_power_w:.0f}", f"{100 * pe:+.1f}",
        ]
        for p, te, pe in zip(points.itertuples(), time_error, power_error, strict=True)
    ]  # fmt: skip
    prompt_lines, prompt_errors = prompt_errors_of(splitwise, profile)
    other = splitwise[
        (splitwise.model == "llama2-70b") & (splitwise.hardware == "h100-80gb")
        & (splitwise.token_size == 128) & (splitwise.prompt_size == 512)
    ].groupby(["tensor_parallel", "batch_size"]).token_time.median()  # fmt: skip
    older = [
        [f"TP{tp}", str(batch), f"{t:.1f}", f"{float(decode.time_ms(tp, batch)):.1f}"]
        for (tp, batch), t in other.items()
        if batch in (1, 8, 64)
    ]
    a, b, share, slope = decode.p
    return f"""# The built-in serving profile

`h100-llama2-70b` is Llama2-70B in bfloat16 on 2, 4 or 8 H100 SXM. `python
tools/serving/make_profile.py` makes it, and this page, from published measurements.

| what | how it is known |
| --- | --- |
| time to the first token, by prompt length and TP, at the highest clock | **measured**: Splitwise, Llama2-70B on DGX H100, medians, straight lines between |
| time of a decode step, by batch and TP | **identified** from ML.ENERGY's points of dense models on H100: {a:.1f} ms, {b:.1f} ms more above one GPU, the weights at {100 * share:.0f}% of the memory's bandwidth, and {slope:.3f} ms for each request |
| power of a decode step | **identified** from the same points: {decode.base:.0f} W a GPU, and {decode.rise:.0f} W times the share of peak arithmetic |
| power of a prompt | **measured on another GPU**: the share of its TDP that an A100 draws at its peak on a prompt of this length (Splitwise), times 700 W |
| memory for requests | **computed**: 90% of 80 GB a GPU, less the weights, at {KV_BYTES} bytes a token |
| an iteration with prompts and decoding requests | **modelled**: the time of its prompt tokens and what the batch adds to a step |
| clocks below 1980 MHz | **modelled**: {100 * clocks.fixed:.0f}% of a decode step's time and {100 * (1 - PREFILL_BY_CLOCK):.0f}% of a prompt's (beyond {100 * FLOOR:.0f}% of the shortest prompt's, which is software) do not depend on the clock; {clocks.static_w:.0f} W of a GPU neither, the rest goes with f v(f)^2. Share and watts of decoding are identified from the ratios within the rows of DynamoLLM's table: {clocks.points} ratios, rms error {100 * clocks.error:.1f}% |
| a GPU that holds the weights and does nothing | **assumed**: {IDLE_W:.0f} W |

## Decoding against every measured point

Time between tokens: rms error {100 * rms(time_error):.1f}% over all points, {100 * rms(time_error[llama]):.1f}% over
Llama-3.1 and 3.3 70B, the nearest to Llama2-70B. Power: {100 * rms(power_error):.1f}% and {100 * rms(power_error[llama]):.1f}%.
Measured is the median time between tokens, and the average power while requests come and go, a few
prompts included.

{table(["model", "GPUs", "batch", "ms", "error (%)", "W", "error (%)"], decoding)}

## First tokens against every measured point

Several prompts at once count as one of all their tokens. Single prompts are met exactly; over all
points with batches the rms error is {100 * rms(prompt_errors):.1f}%. TP2 with 64 prompts is left out: they do not
fit into memory, and what was measured there is a queue.

{table(["TP", "prompt", "batch", "ms", "profile", "error (%)"], prompt_lines)}

## Differences from other published figures

Splitwise's time between tokens comes from software of 2023, which spends most of it outside the
GPU: 30 ms on 8 GPUs, where memory traffic takes 5. The profile follows the software of 2025.

{table(["TP", "batch", "Splitwise, ms", "profile, ms"], older)}

DynamoLLM's table of Wh per request at 2,000 tokens/s is a check, and the profile is far below it:
taken as a request's own share it would mean more power than the GPUs can draw (a request of class
SS at 2,000 tokens/s and 1.49 Wh on TP8 comes to {1.49 * 3600 * 2000 / 220 / 8 / 1e3:.0f} kW a GPU). It looks like the energy of the
instance while a request is in it, shared with nobody. Its ratios between clocks do not depend on
that, and the profile uses those.

{table(["class", "TP", "table, Wh", "profile, Wh", "table: 1200 / highest MHz", "profile"], dynamo_lines(profile))}
"""


def prompt_errors_of(
    splitwise: pd.DataFrame, profile: ServingProfile
) -> tuple[list[list[str]], list[float]]:
    """Lines of a table and relative errors of prompts in batches, against the measured ones."""
    lines, errors = [], []
    known = splitwise[
        (splitwise.model == "llama2-70b") & (splitwise.hardware == "h100-80gb")
        & (splitwise.token_size == 128)
    ].groupby(["tensor_parallel", "prompt_size", "batch_size"]).prompt_time.median()  # fmt: skip
    for (tp, prompt, batch), measured in known.items():
        if (tp, batch) == (2, 64):
            continue
        performance: InstancePerformance = profile.performance[tp, TOP]
        value = 1e3 * float(performance.prompt_s_at(prompt * batch))
        error = value / measured - 1
        errors.append(error)
        lines.append(
            [f"TP{tp}", str(prompt), str(batch), f"{measured:.0f}", f"{value:.0f}",
             f"{100 * error:+.1f}"]
        )  # fmt: skip
    return lines, errors


def dynamo_lines(profile: ServingProfile) -> list[list[str]]:
    """Lines that set the profile's energies beside DynamoLLM's table."""
    lines = []
    for name, by_tp in DYNAMO_WH.items():
        for tp, cells in by_tp.items():
            if cells[-1] is None:
                continue
            ours = []
            for mhz in (1200, TOP):
                curve = profile.curves[name, tp, mhz]
                able = curve.max_load >= 2000
                ours.append(profile.energy_per_request(curve, 2000) / 3600 if able else None)
            ratio = "-" if None in ours else f"{ours[0] / ours[1]:.2f}"
            published = "-" if cells[1] is None else f"{cells[1] / cells[-1]:.2f}"
            mine = "-" if ours[1] is None else f"{ours[1]:.3f}"
            lines.append([name, f"TP{tp}", f"{cells[-1]:.2f}", mine, published, ratio])
    return lines


def main(data: Path, root: Path) -> None:
    """Write the profile, its sidecar and its page."""
    splitwise = pd.read_csv(data / "splitwise_perf_model.csv.gz")
    decode = Decode(pd.read_csv(data / "ml_energy_v3.csv"))
    clocks = Clocks(float(decode.gpu_w(4, 16)))
    target = root / "profiles/serving/h100-llama2-70b.csv"
    lines = ["tp,frequency,phase,size,time_s,power_w"]
    lines += [",".join(map(str, row)) for row in rows(decode, clocks, splitwise)]
    target.write_text("\n".join(lines) + "\n")
    document = json.dumps(sidecar(data), indent=2) + "\n"
    target.with_name("h100-llama2-70b.meta.json").write_text(document)
    profile = ServingProfile.read_csv(target)
    (root / "docs/serving-profile.md").write_text(page(decode, clocks, splitwise, profile))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/serving/make_profile.py DATA ROOT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
