"""What one instance does, phase by phase: prompts, decoding, nothing.

A table gives the time and power of one iteration: of a prompt by its tokens, and of a decode step
by the number of requests that decode. The replay runs on these tables; what an instance draws and
how fast it answers under a steady load of one class follows from them, for the planners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan.serving.classes import RequestClass

FloatArray = npt.NDArray[np.float64]

_BUSIEST: Final = 0.9  # share of an instance's time that prompts may take
_TAIL: Final = float(np.log(100.0))  # waits are exponential: the 99th percentile, in means
_ROUNDS: Final = 30  # of the fixed point between batch and pace


@dataclass(frozen=True)
class Phases:
    """One configuration, an instance size at a clock. Arrays ascend in the first of each pair.

    Attributes:
        idle_w: W of the instance when it does nothing.
        prompt_tokens, prompt_s, prompt_w: time and power of a prompt by its length.
        batch, step_s, step_w: time and power of a decode step by the requests in it.
        kv_tokens: tokens of context that fit into memory, of all requests together.
        chunk_tokens: prompt tokens that one iteration takes.
    """

    idle_w: float
    prompt_tokens: FloatArray
    prompt_s: FloatArray
    prompt_w: FloatArray
    batch: FloatArray
    step_s: FloatArray
    step_w: FloatArray
    kv_tokens: float
    chunk_tokens: int

    def prompt_time(self, tokens: Any) -> Any:
        """s of a prompt; above the longest one straight on."""
        beyond = np.maximum(0.0, np.asarray(tokens) - self.prompt_tokens[-1])
        slope = 0.0
        if len(self.prompt_tokens) > 1:
            (low, high), (first, last) = self.prompt_tokens[-2:], self.prompt_s[-2:]
            slope = max(0.0, (last - first) / (high - low))
        return np.interp(tokens, self.prompt_tokens, self.prompt_s) + slope * beyond

    def whole_prompt_time(self, tokens: Any) -> Any:
        """s of a prompt alone, in iterations of at most `chunk_tokens`."""
        chunk = self.chunk_tokens
        pieces = np.asarray(tokens) / chunk * self.prompt_time(chunk)
        return np.maximum(self.prompt_time(tokens), pieces)

    def step_time(self, batch: Any) -> Any:
        """s of a decode step with so many requests, at least one."""
        return np.interp(np.maximum(batch, 1.0), self.batch, self.step_s)

    def tables(self, grid: int = 32) -> tuple[float, Any, Any, float, Any, Any]:
        """The tables of csrc/serving.hpp: by whole requests, and every `grid` tokens."""
        count = np.arange(int(self.batch[-1]) + 1, dtype=np.float64)
        step_w = np.interp(np.maximum(count, 1.0), self.batch, self.step_w)
        tokens = np.arange(0, max(2 * grid, self.prompt_tokens[-1] + 2 * grid), grid)
        prompt_w = np.interp(tokens, self.prompt_tokens, self.prompt_w)
        return (self.idle_w, self.step_time(count), step_w, float(grid),
                self.prompt_time(tokens), prompt_w)  # fmt: skip


def steady(phases: Phases, request: RequestClass) -> FloatArray | None:
    """An instance under steady loads of one class; None if it has no memory for a request.

    Returns:
        (4, n): loads (tokens/s, ascending from 0), power (W), time to first token (s) and time
        between tokens (s).

    At r requests per second, prompts take r times their work of the instance's time; the rest is
    decode steps. A decoding request gets a token with each iteration of either kind, so that, by
    Little's law, r (output - 1) tokens per second need a batch of so many requests; that gives the
    pace. TTFT is the prompt's own time, half a decode step, and the wait in a queue with Poisson
    arrivals and constant service at its 99th percentile. An instance without decoding requests is
    idle, for Poisson numbers of them.
    """
    given = request.input_tokens
    work = float(phases.whole_prompt_time(given))
    chunks = max(1.0, given / phases.chunk_tokens)
    most = min(float(phases.batch[-1]), phases.kv_tokens / max(request.tokens, 1.0))
    rate = np.linspace(0.0, _BUSIEST / work, 200)
    steps = max(0.0, request.output_tokens - 1)
    batch = np.zeros_like(rate)
    for _ in range(_ROUNDS):
        more = np.maximum(0.0, phases.step_time(batch) - phases.step_s[0])
        busy = np.minimum(rate * (work + chunks * more), 0.999)
        pace = (1 - busy) / phases.step_time(batch) + busy / (work / chunks + more)
        batch = 0.5 * (batch + np.minimum(rate * steps / pace, 1e6))
    fits = np.flatnonzero((busy <= _BUSIEST) & (batch <= most))
    top = int(fits[np.nonzero(np.diff(fits, append=10**9) > 1)[0][0]]) if len(fits) else 0
    if top == 0:
        return None
    wait = _TAIL * busy * work / (2 * (1 - busy))
    decoding = 1 - np.exp(-batch)
    ttft = work + wait + 0.5 * decoding * phases.step_time(batch)
    prompt_w = float(np.interp(request.input_tokens, phases.prompt_tokens, phases.prompt_w))
    step_w = np.interp(np.maximum(batch, 1.0), phases.batch, phases.step_w)
    power = busy * np.maximum(prompt_w, decoding * step_w) + (1 - busy) * (
        decoding * step_w + (1 - decoding) * phases.idle_w
    )
    kept = slice(0, top + 1)
    return np.array([rate[kept] * request.tokens, power[kept], ttft[kept], 1 / pace[kept]])
