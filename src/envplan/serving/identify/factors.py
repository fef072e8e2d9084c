"""The factors that ship with envplan: what engines take on GPUs, and what GPUs draw.

`tools.serving.fit` finds them from published benchmarks. A user's own sweep is fitted around them,
so that what a small sweep cannot tell stays as it was found elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from envplan._io.documents import Model, parse_document, read_json
from envplan.serving.builtin import builtin_folder
from envplan.serving.classes import FloatArray
from envplan.serving.identify.benchmark import Benchmark

_FILE: Final = "factors.json"
#: What its field "schema" says.
SCHEMA: Final = "envplan/serving-factors/v1"
#: Stands for every engine that nothing is known about.
OTHER_ENGINE: Final = "other"


class TimeFactors(Model):
    """Logarithms of factors of the terms of a time.

    Attributes:
        by_engine: by engine, then by GPU; one for each term.
        by_model: what models add to them, by model.
    """

    by_engine: dict[str, dict[str, list[float]]]
    by_model: dict[str, list[float]]

    def centre(self, row: Benchmark) -> FloatArray:
        """Logarithms of the factors of a row whose engine, GPU and model may be known."""
        by_gpu = self.by_engine.get(row.engine, self.by_engine[OTHER_ENGINE])
        engine = np.array(by_gpu[row.gpu.key])
        of_model = self.by_model.get(row.model.key)
        return engine if of_model is None else engine + np.array(of_model)


class PowerFactors(Model):
    """Power of one GPU in a decode step.

    Attributes:
        base_w: of a GPU that decodes, whatever it does.
        memory_w: for each share of the memory's bandwidth that is used.
        arithmetic_w: for each share of peak arithmetic that is used.
    """

    base_w: float
    memory_w: float
    arithmetic_w: float


class Factors(Model):
    """All of factors.json.

    Attributes:
        step: of times between tokens.
        first_token: of times to the first token.
        power: of decode steps, by GPU, and by model and GPU: "qwen3-32b h100".
        prompt_tokens: lengths of prompts, ascending.
        prompt_power: share of the power limit that a GPU draws in each of them.
    """

    step: TimeFactors
    first_token: TimeFactors
    power: dict[str, PowerFactors]
    prompt_tokens: list[float]
    prompt_power: list[float]


@cache
def shipped_factors() -> Factors:
    """The factors that ship with envplan."""
    path = builtin_folder() / _FILE
    fields = {name: value for name, value in read_json(path).items() if name != "schema"}
    return parse_document(fields, Factors, kind="file of serving factors", path=path)
