"""Performance of an instance in prefill and decode, by its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.serving.classes import FloatArray

_PROMPT_GRID_TOKENS: Final = 32  # between two entries of the engine's prompt tables


#: A number, or an array of them.
Numbers = float | npt.NDArray[np.integer | np.floating]


class Configuration(NamedTuple):
    """The size of an instance and its clock.

    Attributes:
        tp: tensor-parallel degree, its number of GPUs.
        frequency_mhz: SM clock.
    """

    tp: int
    frequency_mhz: int


class EngineTables(NamedTuple):
    """Tables of a configuration in the order of the compiled replay (csrc/_serving.pyx).

    Attributes:
        idle_w: power of the instance when it does nothing.
        step_s: time of a decode step by the requests in it, from none up.
        step_w: power of these steps.
        grid_tokens: tokens between two entries of the prompt tables.
        prompt_s: time of a prompt of k * grid_tokens.
        prompt_w: power of these prompts.
        context_token_s: time that a token of context adds to a step.
        context_w: power while contexts are read.
    """

    idle_w: float
    step_s: FloatArray
    step_w: FloatArray
    grid_tokens: float
    prompt_s: FloatArray
    prompt_w: FloatArray
    context_token_s: float
    context_w: float


@dataclass(frozen=True, eq=False)
class InstancePerformance:
    """Times and powers of an instance in one configuration, as measured or modelled.

    Powers are those of the whole instance. `prompt_tokens` and `batch_sizes` ascend.

    Attributes:
        idle_w: power of the instance when it does nothing.
        prompt_tokens: lengths of prompts, (p,).
        prompt_s: time of each of these prompts, (p,).
        prompt_w: power of each of them, (p,).
        batch_sizes: requests in a decode step, (b,).
        step_s: time of each of these steps, (b,).
        step_w: power of each of them, (b,).
        kv_tokens: tokens of context that fit into memory, of all requests together.
        chunk_tokens: prompt tokens that one iteration takes.
        context_token_s: what each token of context, of all decoding requests together, adds to a
            decode step, s; `step_s` is for contexts of no length then. 0: contexts cost nothing,
            or `step_s` has a usual context in it.
        context_w: power while contexts are read.
    """

    idle_w: float
    prompt_tokens: FloatArray
    prompt_s: FloatArray
    prompt_w: FloatArray
    batch_sizes: FloatArray
    step_s: FloatArray
    step_w: FloatArray
    kv_tokens: float
    chunk_tokens: int
    context_token_s: float = 0.0
    context_w: float = 0.0

    @property
    def max_batch(self) -> float:
        """The largest batch that there are figures for."""
        return float(self.batch_sizes[-1])

    def prompt_s_at(self, tokens: Numbers) -> FloatArray:
        """Time of prompts of these lengths, s; above the longest one straight on."""
        beyond = np.maximum(0.0, np.asarray(tokens) - self.prompt_tokens[-1])
        within_s = np.interp(tokens, self.prompt_tokens, self.prompt_s)
        return np.asarray(within_s + self._last_slope * beyond)

    @property
    def _last_slope(self) -> float:
        """How a prompt's time grows with its length at the longest prompts, s per token."""
        if len(self.prompt_tokens) == 1:
            return 0.0
        tokens_step = self.prompt_tokens[-1] - self.prompt_tokens[-2]
        time_step_s = self.prompt_s[-1] - self.prompt_s[-2]
        return max(0.0, float(time_step_s / tokens_step))

    def chunked_prompt_s_at(self, tokens: Numbers) -> FloatArray:
        """Time of prompts alone on the instance, in iterations of at most `chunk_tokens`, s."""
        chunks = np.asarray(tokens) / self.chunk_tokens
        return np.maximum(self.prompt_s_at(tokens), chunks * self.prompt_s_at(self.chunk_tokens))

    def prompt_w_at(self, tokens: Numbers) -> FloatArray:
        """Power while prompts of these lengths run, W."""
        return np.asarray(np.interp(tokens, self.prompt_tokens, self.prompt_w))

    def step_s_at(self, batch_size: Numbers) -> FloatArray:
        """Time of decode steps with so many requests, at least one, s."""
        return np.asarray(np.interp(np.maximum(batch_size, 1.0), self.batch_sizes, self.step_s))

    def step_w_at(self, batch_size: Numbers) -> FloatArray:
        """Power of decode steps with so many requests, at least one, W."""
        return np.asarray(np.interp(np.maximum(batch_size, 1.0), self.batch_sizes, self.step_w))

    def context_s_at(self, context_tokens: Numbers) -> FloatArray:
        """What contexts of so many tokens together add to a decode step, s."""
        return np.asarray(self.context_token_s * np.asarray(context_tokens, dtype=np.float64))

    def step_power_beside(self, batch_size: Numbers, context_tokens: Numbers) -> FloatArray:
        """Mean power of decode steps with so many requests, whose contexts are read, W."""
        if not self.context_token_s:
            return self.step_w_at(batch_size)
        step_s, context_s = self.step_s_at(batch_size), self.context_s_at(context_tokens)
        energy_j = step_s * self.step_w_at(batch_size) + context_s * self.context_w
        return np.asarray(energy_j / (step_s + context_s))

    @cached_property
    def engine_tables(self) -> EngineTables:
        """The same by whole requests and every few tokens, for the compiled replay."""
        batch_sizes = np.arange(int(self.max_batch) + 1, dtype=np.float64)
        grid = _PROMPT_GRID_TOKENS
        end_tokens = max(2 * grid, self.prompt_tokens[-1] + 2 * grid)
        prompt_tokens = np.arange(0, end_tokens, grid)
        return EngineTables(
            idle_w=self.idle_w,
            step_s=self.step_s_at(batch_sizes),
            step_w=self.step_w_at(batch_sizes),
            grid_tokens=float(grid),
            prompt_s=self.prompt_s_at(prompt_tokens),
            prompt_w=self.prompt_w_at(prompt_tokens),
            context_token_s=self.context_token_s,
            context_w=self.context_w,
        )
