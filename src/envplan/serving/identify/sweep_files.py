"""Reading sweeps: results of benchmarks of serving engines at several loads.

A file is a CSV table, a JSON document, or JSON lines. A format is a model of one record, a row or
an object, which says what Benchmark it is: add one with `@sweep_format("name")`. The first format
whose required fields a file's first record has is the file's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from envplan._io.documents import first_problem
from envplan._io.files import decoded, parse_json, read_bounded
from envplan._io.tables import parse_table
from envplan.errors import InputError, shown
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.catalogue import WEIGHT_BYTES, language_model, serving_gpu

_MAX_BYTES: Final = 64 * 2**20
_MAX_RECORDS: Final = 100_000
_MS: Final = 1e-3
_MOST_NAMED: Final = 4
_MOST_TENSOR_PARALLEL: Final = 8

#: What files call precisions, and we.
_PRECISIONS: Final = {
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "int4_wo": "int4",
}


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """What a file may leave unsaid about all of its rows, as the user says it; None: it says it.

    Attributes:
        model: name of the language model.
        gpu: name of the GPU.
        engine: name of the engine.
        tp: GPUs of the instance.
        precision: of the weights.
    """

    model: str | None = None
    gpu: str | None = None
    engine: str | None = None
    tp: int | None = None
    precision: str | None = None


class SweepRecord(BaseModel):
    """A record of a sweep: a base of the formats."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    def benchmark(self, facts: SweepFacts) -> Benchmark:
        """The benchmark that the record states.

        Raises:
            InputError: neither the record nor the user says something that it takes.
        """
        raise NotImplementedError


FORMATS: Final[dict[str, type[SweepRecord]]] = {}


def sweep_format(name: str) -> Callable[[type[SweepRecord]], type[SweepRecord]]:
    """Make the decorated model known as a format of sweeps."""

    def register(record: type[SweepRecord]) -> type[SweepRecord]:
        FORMATS[name] = record
        return record

    return register


def read_sweep(path: Path, facts: SweepFacts | None = None) -> list[Benchmark]:
    """The benchmarks of a file.

    Raises:
        InputError: it is of no known format, or a record is refused; says which.
    """
    records = _read_records(path)
    if not records:
        raise InputError("has no rows", path=path)
    name, form = _format_of(records[0].fields, path)
    rows = []
    for record in records:
        try:
            stated = form.model_validate(record.fields)
        except ValidationError as error:
            problem = first_problem(error, f"row of {name}", form)
            raise InputError(problem, path=path, line=record.line) from None
        try:
            rows.append(stated.benchmark(facts or SweepFacts()))
        except InputError as error:
            raise InputError(error.message, path=path, line=record.line) from None
    return rows


@dataclass(frozen=True)
class _Record:
    """Fields of a row or an object, and the line of the file that it is in, where that is known."""

    fields: Mapping[str, Any]
    line: int | None


def _read_records(path: Path) -> list[_Record]:
    content = read_bounded(path, _MAX_BYTES)
    start = content.lstrip()[:1]
    if start not in (b"{", b"["):
        return _table_records(content, path)
    text = decoded(content, path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if start == b"{" and len(lines) > 1 and lines[0][1].rstrip().endswith("}"):
        objects: list[tuple[int | None, Any]] = [
            (number, parse_json(line.encode(), path)) for number, line in lines
        ]
    else:
        document = parse_json(content, path)
        objects = [
            (None, item) for item in (document if isinstance(document, list) else [document])
        ]
    if len(objects) > _MAX_RECORDS:
        raise InputError(f"has more than {_MAX_RECORDS} results", path=path)
    records = []
    for line, item in objects:
        if not isinstance(item, dict):
            raise InputError(
                f"a result must be an object, not {shown(json.dumps(item))}", path=path
            )
        records.append(_Record(item, line))
    return records


class _AnyRow(BaseModel):
    """A row of any table."""


def _table_records(content: bytes, path: Path) -> list[_Record]:
    table = parse_table(content, _AnyRow, path=path, kind="a sweep")
    names = list(table.texts)
    rows = zip(*table.texts.values(), strict=True)
    records = []
    for line, cells in zip(table.lines, rows, strict=True):
        stated = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
        records.append(_Record(stated, line))
    return records


def _format_of(fields: Mapping[str, Any], path: Path) -> tuple[str, type[SweepRecord]]:
    """Name and model of the format that a record is of.

    Raises:
        InputError: it is of none.
    """
    for name, form in FORMATS.items():
        if all(_names(form, field) & fields.keys() for field in _required(form)):
            return name, form
    needs = "; ".join(
        f"{name} has {', '.join(sorted(_names(form, field))[0] for field in _required(form))}"
        for name, form in FORMATS.items()
    )
    raise InputError(
        f"is no sweep that envplan knows: its first row has {shown(','.join(fields))} ({needs})",
        path=path,
    )


def _required(form: type[SweepRecord]) -> Iterable[str]:
    return [name for name, field in form.model_fields.items() if field.is_required()]


def _names(form: type[SweepRecord], field: str) -> set[str]:
    """What a file may call a field."""
    alias = form.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return {choice for choice in alias.choices if isinstance(choice, str)}
    return {alias if isinstance(alias, str) else field}


def _aliases(*names: str) -> AliasChoices:
    return AliasChoices(*names)


def _number_or_none(value: object) -> object:
    """Zero stands for "not split" where tables have it."""
    return None if value in ("0", "0.0", 0) else value


Positive = Annotated[float, Field(gt=0, le=1e9)]
MaybePositive = Annotated[Positive | None, BeforeValidator(_number_or_none)]


def _needed(value: Any, name: str) -> Any:
    if value is None:
        raise InputError(f"the file does not say {name}: give it with --{name}")
    return value


def _precision(stated: str | None, model_name: str) -> str:
    """Precision of weights, as it is stated or the model's name says it; else bfloat16.

    A model that was published in 8 bit has these.
    """
    name = (stated or "").lower()
    name = _PRECISIONS.get(name, name)
    if not name:
        endings = {"fp8": "fp8", "nvfp4": "fp4", "fp4": "fp4", "gpt-oss": "fp4"}
        endings |= {"deepseek-r1": "fp8", "deepseek-v3": "fp8"}
        found = [known for mark, known in endings.items() if mark in model_name.lower()]
        name = found[0] if found else "bf16"
    if name not in WEIGHT_BYTES:
        raise InputError(f"there is no precision {shown(name)}: {', '.join(WEIGHT_BYTES)}")
    return name


class _Instance(NamedTuple):
    """GPUs that have a copy of the weights, and how they share the work.

    Attributes:
        num_gpus: how many.
        attention_groups: data-parallel groups of its attention.
        layout: how experts are split, as text.
    """

    num_gpus: float
    attention_groups: float
    layout: str


@sweep_format("aiconfigurator")
class ConfiguratorRecord(SweepRecord):
    """A row of aiconfigurator's tables, of its measured sample and of its own predictions."""

    model_path: str = Field(validation_alias=_aliases("model_path", "model"))
    system: str
    backend: str
    backend_version: str = Field("", validation_alias=_aliases("backend_version", "version"))
    precision: str | None = None
    mode: str = "agg"
    isl: Positive
    osl: Positive
    concurrency: Positive | None = None
    batch_size: Positive | None = Field(None, validation_alias=_aliases("batch_size", "bs"))
    tp_size: MaybePositive = Field(None, validation_alias=_aliases("tp_size", "tp"))
    attention_dp_size: MaybePositive = Field(
        None, validation_alias=_aliases("attention_dp_size", "dp")
    )
    moe_tp_size: MaybePositive = Field(None, validation_alias=_aliases("moe_tp_size", "moe_tp"))
    moe_ep_size: MaybePositive = Field(None, validation_alias=_aliases("moe_ep_size", "moe_ep"))
    prefill_num_workers: MaybePositive = None
    prefill_tp_size: MaybePositive = None
    prefill_attention_dp_size: MaybePositive = None
    decode_batch_size: Positive | None = None
    decode_num_workers: MaybePositive = None
    decode_tp_size: MaybePositive = None
    decode_attention_dp_size: MaybePositive = None
    decode_moe_tp_size: MaybePositive = None
    decode_moe_ep_size: MaybePositive = None
    ttft_ms: Positive = Field(validation_alias=_aliases("silicon_ttft_ms", "ttft_ms", "ttft"))
    tpot_ms: Positive = Field(validation_alias=_aliases("silicon_tpot_ms", "tpot_ms", "tpot"))

    def benchmark(self, facts: SweepFacts) -> Benchmark:
        """The benchmark of this row."""
        disaggregated = self.mode == "disagg" or self._adds_up_workers
        instance = self._decode_instance()
        known_workers = self._num_workers()
        workers = known_workers or 1.0
        concurrency = self.concurrency
        if concurrency is None:
            batch_size = self.decode_batch_size if self.mode == "disagg" else self.batch_size
            concurrency = _needed(batch_size, "concurrency") * workers
        prefill_gpus = instance.num_gpus
        if self.mode == "disagg" and self.prefill_tp_size:
            prefill_gpus = self.prefill_tp_size * (self.prefill_attention_dp_size or 1.0)
        model_name = self.model_path
        stated = self.precision
        if "gpt-oss" in model_name:  # its weights exist in this format only
            stated = "fp4"
        return Benchmark(
            model=language_model(model_name),
            gpu=serving_gpu(self.system),
            engine=self.backend.lower(),
            version=self.backend_version,
            precision=_precision(stated, model_name),
            disaggregated=disaggregated,
            input_tokens=self.isl,
            output_tokens=self.osl,
            concurrency=concurrency,
            num_gpus=instance.num_gpus,
            attention_groups=instance.attention_groups,
            layout=instance.layout,
            num_workers=workers,
            prefill_gpus=prefill_gpus,
            prefill_workers=(self.prefill_num_workers or 1.0) if disaggregated else workers,
            workers_known=known_workers is not None,
            first_token_s=self.ttft_ms * _MS,
            token_interval_s=self.tpot_ms * _MS,
        )

    @property
    def _adds_up_workers(self) -> bool:
        """Whether the GPUs of several workers stand where those of one belong.

        No engine splits every matrix over more than the eight GPUs of a server: 128 heads cannot
        be divided by 12, 28 or 72. Such rows are deployments of prefill and decode workers.
        """
        tp = self.tp_size or 1.0
        experts_stay_whole = (self.moe_ep_size or 1.0) == 1
        return self.mode != "disagg" and tp > _MOST_TENSOR_PARALLEL and experts_stay_whole

    def _num_workers(self) -> float | None:
        """Decode workers; of rows that do not tell prefill from decode, alike instances.

        These state the requests of one instance beside those of all. None: not stated.
        """
        if self.mode == "disagg":
            return self.decode_num_workers
        if self._adds_up_workers:
            return None
        stated_groups = self.attention_dp_size or 1.0
        if self.concurrency is None or self.batch_size is None or stated_groups > 1:
            return 1.0  # of several groups of attention, a row states the requests of one group
        instances = self.concurrency / self.batch_size
        return instances if instances == int(instances) else 1.0

    def _decode_instance(self) -> _Instance:
        """GPUs of an instance or a decode worker, groups of attention, and how experts are split.

        Some rows state a product where factors belong. Those whose experts are split both ways over
        all GPUs count each GPU as often as there are GPUs: 8 GPUs are 64 there. So do those that
        state as many groups of attention as GPUs, and the product as groups of experts: their
        times are those of rows that state tensor parallelism beside expert parallelism.
        """
        if self.mode == "disagg":
            tp, groups = self.decode_tp_size, self.decode_attention_dp_size
            moe_tp, moe_ep = self.decode_moe_tp_size, self.decode_moe_ep_size
        else:
            tp, groups = self.tp_size, self.attention_dp_size
            moe_tp, moe_ep = self.moe_tp_size, self.moe_ep_size
        groups = groups or 1.0
        num_gpus = _needed(tp, "tp") * groups
        if moe_tp and moe_tp == moe_ep and moe_tp > 1 and num_gpus == moe_tp * moe_ep:
            moe_tp, num_gpus = 1.0, moe_tp
        elif tp == groups and tp > 1 and num_gpus == moe_ep:
            moe_ep = num_gpus = tp
            groups = 1.0
        layout = f"{moe_tp or 1:g}x{moe_ep or 1:g}"
        return _Instance(num_gpus, min(groups, num_gpus), layout)


@sweep_format("InferenceX")
class InferenceXRecord(SweepRecord):
    """An aggregated result of InferenceX (formerly InferenceMAX); times are in seconds."""

    hw: str
    model: str
    framework: str
    conc: Positive
    tp: Positive
    precision: str | None = None
    isl: Positive
    osl: Positive
    median_ttft: Positive = Field(validation_alias=_aliases("median_ttft", "mean_ttft"))
    median_tpot: Positive = Field(validation_alias=_aliases("median_tpot", "mean_tpot"))

    def benchmark(self, facts: SweepFacts) -> Benchmark:
        """The benchmark of this result."""
        return Benchmark(
            model=language_model(self.model),
            gpu=serving_gpu(self.hw.lower().split("-")[0]),
            engine=self.framework.lower(),
            precision=_precision(self.precision, self.model),
            input_tokens=self.isl,
            output_tokens=self.osl,
            concurrency=self.conc,
            num_gpus=self.tp,
            prefill_gpus=self.tp,
            first_token_s=self.median_ttft,
            token_interval_s=self.median_tpot,
        )


class _ClientRecord(SweepRecord):
    """What the clients of vLLM and SGLang say alike: nothing of the GPUs."""

    backend: str = ""
    max_concurrency: Positive | None = None
    concurrency: Positive | None = None
    completed: Positive
    total_input_tokens: Positive
    total_output_tokens: Positive
    median_ttft_ms: Positive = Field(validation_alias=_aliases("median_ttft_ms", "mean_ttft_ms"))
    median_tpot_ms: Positive = Field(validation_alias=_aliases("median_tpot_ms", "mean_tpot_ms"))
    tensor_parallel_size: Positive | None = Field(
        None, validation_alias=_aliases("tensor_parallel_size", "tp_size", "tp")
    )
    gpu: str | None = None
    precision: str | None = None

    #: Who wrote the file.
    ENGINE: ClassVar[str]

    def _of(self, facts: SweepFacts, model_name: str | None) -> Benchmark:
        model_name = _needed(facts.model or model_name, "model")
        num_gpus = float(_needed(facts.tp or self.tensor_parallel_size, "tp"))
        concurrency = self.max_concurrency or self.concurrency
        if concurrency is None:
            raise InputError(
                "the result does not say how many requests were under way at once: run the "
                "benchmark with --max-concurrency"
            )
        return Benchmark(
            model=language_model(model_name),
            gpu=serving_gpu(_needed(facts.gpu or self.gpu, "gpu")),
            engine=facts.engine or self.ENGINE,
            precision=_precision(facts.precision or self.precision, model_name),
            input_tokens=self.total_input_tokens / self.completed,
            output_tokens=self.total_output_tokens / self.completed,
            concurrency=concurrency,
            num_gpus=num_gpus,
            prefill_gpus=num_gpus,
            first_token_s=self.median_ttft_ms * _MS,
            token_interval_s=self.median_tpot_ms * _MS,
        )


@sweep_format("vLLM")
class VllmRecord(_ClientRecord):
    """A result file of `vllm bench serve --save-result`."""

    model_id: str

    ENGINE = "vllm"

    def benchmark(self, facts: SweepFacts) -> Benchmark:
        """The benchmark of this result."""
        return self._of(facts, self.model_id)


@sweep_format("SGLang")
class SglangRecord(_ClientRecord):
    """A line of the output file of `sglang.bench_serving`."""

    ENGINE = "sglang"

    def benchmark(self, facts: SweepFacts) -> Benchmark:
        """The benchmark of this result."""
        return self._of(facts, None)


def rows_of_one_profile(
    rows: Sequence[Benchmark], facts: SweepFacts, path: Path
) -> list[Benchmark]:
    """The rows of the model, GPU, engine and precision that the user names, or that all are of.

    Rows of deployments whose prefill has GPUs of its own are left out.

    Raises:
        InputError: there are none, or they are of several; names them.
    """
    chosen = [row for row in rows if _is_of(row, facts) and not row.disaggregated]
    if not chosen:
        raise InputError("has no results of that model, GPU, engine and precision", path=path)
    combinations = {(row.model.key, row.gpu.key, row.engine, row.precision) for row in chosen}
    if len(combinations) > 1:
        named = "; ".join(" ".join(words) for words in sorted(combinations)[:_MOST_NAMED])
        raise InputError(
            f"has results of {len(combinations)} combinations of model, GPU, engine and precision "
            f"({named}): choose with --model, --gpu, --engine, --precision",
            path=path,
        )
    return chosen


def _is_of(row: Benchmark, facts: SweepFacts) -> bool:
    return (
        (facts.model is None or language_model(facts.model).key == row.model.key)
        and (facts.gpu is None or serving_gpu(facts.gpu).key == row.gpu.key)
        and facts.engine in (None, row.engine)
        and facts.tp in (None, row.num_gpus)
        and (facts.precision is None or _precision(facts.precision, "") == row.precision)
    )
