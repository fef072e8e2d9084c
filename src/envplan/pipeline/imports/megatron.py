"""Megatron's pipeline schedules, as a configuration of Megatron or of NeMo's Megatron-Bridge asks.

Such a configuration is an object in memory (megatron.core's TransformerConfig, and what derives
from it), a file in YAML or JSON whose names are the same, under `model` or not, a script that gives
Megatron-LM its arguments, or the log in which it prints them. GPT-NeoX's files have names of their
own for the same. Megatron is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from envplan._io.files import decoded, parse_json, read_bounded
from envplan.errors import InputError, naming, shown
from envplan.pipeline.graph import Pipeline
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.imports import MAX_FILE_BYTES
from envplan.pipeline.schedules import interleaved, one_forward_one_backward
from envplan.pipeline.spec import whole_number

__all__ = ["layers_per_stage", "read_megatron", "read_megatron_file"]

#: In a layout: what is repeated, and how often.
_GROUP: Final = re.compile(r"\(([^)]+)\)\*(\d{1,5})")
_LETTER: Final = re.compile(r"(.)\*(\d{1,5})")
_LONGEST: Final = 100_000

#: An argument of Megatron-LM in a script, or in a YAML file of its tests, and its value if any.
_ARGUMENT: Final = re.compile(
    r"""--([a-z][a-z0-9_-]*)(?:(?:[ \t=]|:[ \t])[ \t]*("[^"\n]*"|'[^'\n]*'|(?!-)[^\s\\#]+))?"""
)
#: As Megatron-LM prints them all when it starts.
_PRINTED: Final = re.compile(r"(?:^|[\s:])(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"(^|\s)#.*")
_ASSIGNED: Final = re.compile(r"(?:^|\s)(\w+)=[\"']?(\w+)[\"']?\s*$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"\$\{?(\w+)(?::-(\w+)\})?\}?")
_WORDS: Final = {"none": None, "null": None, "true": True, "false": False}
#: Arguments of Megatron-LM, torchrun and GPT-NeoX that say what a configuration says otherwise.
_OTHER_NAMES: Final = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "nnodes": "num_nodes",
    "nproc_per_node": "devices",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}

#: Where a file says what the job is; Bridge's `dataset`, say, has a data_parallel_size of its own.
_PARTS: Final = ("model", "train", "trainer", "comm_overlap")
#: What may count as a layer each.
_EMBEDDING: Final = "account_for_embedding_in_pipeline_split"
_LOSS: Final = "account_for_loss_in_pipeline_split"


def read_megatron(config: Any, num_microbatches: int | None = None) -> ImportedSchedule:
    """The order in which Megatron runs each rank.

    Args:
        config: an object with Megatron's names, or a mapping.
        num_microbatches: of an iteration; default: what the mapping's batch sizes make.

    Raises:
        InputError: a name is missing, or Megatron has no such schedule.
    """
    stages = _number(config, "pipeline_model_parallel_size")
    if stages is None:
        raise InputError("says no pipeline_model_parallel_size")
    if _value(config, overlap := "overlap_moe_expert_parallel_comm"):
        raise InputError(
            f"{overlap} runs a forward and a backward together, which a plan cannot follow"
        )
    microbatches = num_microbatches or _microbatches(config, stages)
    chunks = _chunks(config, stages)
    if chunks is None or stages == 1:
        orders = one_forward_one_backward(stages, microbatches, 1)
    else:
        group = _number(config, "microbatch_group_size_per_vp_stage") or stages
        orders = interleaved(stages, microbatches, chunks, microbatch_group=group)
    return ImportedSchedule(tuple(map(tuple, orders)))


def read_megatron_file(
    path: str | os.PathLike[str], num_microbatches: int | None = None
) -> ImportedSchedule:
    """The order that a configuration file asks for, and what else it says of the pipeline.

    That is the layers of each model stage, if it says them, and whether ranks compute during
    transfers.

    Raises:
        InputError: the file is neither YAML nor JSON, or as for read_megatron.
    """
    with naming(path):
        text = decoded(read_bounded(path, MAX_FILE_BYTES), path)
        document = _arguments(text) or _document(text, path)
        if not isinstance(document, dict):
            raise InputError("must hold a configuration's names and values")
        named = {str(name).replace("-", "_"): value for name, value in document.items()}
        document = {_OTHER_NAMES.get(name, name): value for name, value in named.items()}
        schedule = read_megatron(document, num_microbatches)
        # Megatron's 1F1B has no such transfers.
        overlap = schedule.num_chunks > 1 and bool(_value(document, "overlap_p2p_comm"))
        layers = layers_per_stage(document)
        return replace(
            schedule, overlap_p2p=overlap, layers_per_stage=tuple(layers) if layers else None
        )


def _arguments(text: str) -> dict[str, Any]:
    """Megatron-LM's arguments in a script, in a log, or in a file of its tests; empty: none there.

    Raises:
        InputError: one is given twice, with different values.
    """
    printed = _PRINTED.findall(text)
    if "pipeline_model_parallel_size" not in dict(printed):
        printed = []
        if "--pipeline-model-parallel-" not in text:
            return {}
    script = _COMMENT.sub("", text)
    known = dict(_ASSIGNED.findall(script))
    said: dict[str, Any] = {} if printed else {"overlap_p2p_comm": True}
    for name, written in printed or _ARGUMENT.findall(script):
        value = _VARIABLE.sub(lambda found: known.get(found[1]) or found[2] or found[0], written)
        value = value.strip("\"'")
        value = value if "(" in value else value.rstrip(")")
        means: Any = int(value) if value.isdecimal() else _WORDS.get(value.lower(), value or True)
        own = name.replace("-", "_")
        if "$" in value and "pipeline" not in own:
            continue
        if own == "no_overlap_p2p_communication":
            own, means = "overlap_p2p_comm", False
        elif own in said and said[own] != means and "pipeline" in own:
            raise InputError(f"says two things under --{name}: {shown(said[own])} and {value}")
        said[own] = means
    return said


def _document(text: str, path: str | os.PathLike[str]) -> Any:
    with suppress(InputError):
        return parse_json(text.encode(), path)
    try:  # JSON with comments in it, as that of GPT-NeoX, is YAML, too
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InputError("is not JSON; for YAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "cannot be parsed"
        where = mark and mark.line + 1
        raise InputError(f"is neither JSON nor YAML: {reason}", line=where) from None


def _chunks(config: Any, stages: int) -> int | None:
    """Model chunks of each rank; None where there is one.

    Raises:
        InputError: layers or a layout do not make as many on each rank.
    """
    chunks = _number(config, "virtual_pipeline_model_parallel_size")
    if chunks is not None:
        return chunks
    if count := len(_listed(config)):
        if count % stages:
            raise InputError(f"lists layers of {count} model stages for {stages} ranks")
    elif each := _number(config, asked := "num_layers_per_virtual_pipeline_stage"):
        layers = _number(config, "num_layers")
        if layers is None:
            raise InputError(f"says {asked}, but no num_layers")
        layers += bool(_value(config, _EMBEDDING)) + bool(_value(config, _LOSS))
        count, over = divmod(layers, each)
        if over or count % stages:
            raise InputError(f"{layers} layers do not make chunks of {each} on {stages} ranks")
    return count // stages if count > stages else None


def layers_per_stage(config: Any) -> list[int]:
    """Transformer layers of each model stage, as Megatron shares them out; none if nothing says.

    Follows megatron.core's rules: the first and the last rank may have layers of their own number
    (`num_layers_in_first_pipeline_stage`, `..._last_...`), or embedding and loss may count as a
    layer each (`account_for_embedding_in_pipeline_split`, `account_for_loss_...`). Or
    `pipeline_model_parallel_layout` says them all: as lists of names, or as "Et*3|(tt|)*14tL".

    Raises:
        InputError: the layers cannot be shared out so.
    """
    stages = _number(config, "pipeline_model_parallel_size") or 1
    if listed := _listed(config):
        return listed
    layers = _number(config, "num_layers")
    if layers is None:
        return []
    chunks = _chunks(config, stages) or 1
    ranks = [0] * stages
    for rank, end in ((0, "first"), (-1, "last")):
        ranks[rank] = _number(config, f"num_layers_in_{end}_pipeline_stage") or ranks[rank]
    embedding, loss = bool(_value(config, _EMBEDDING)), bool(_value(config, _LOSS))
    each, over = divmod(layers + embedding + loss - sum(ranks), ranks.count(0) or 1)
    ranks = [own or each for own in ranks]
    if over or each < 0 or sum(ranks) != layers + embedding + loss:
        raise InputError(f"{layers} layers cannot be shared out over {stages} stages so")
    if any(count % chunks for count in ranks):
        raise InputError(f"{chunks} chunks do not divide the layers of every rank, {ranks}")
    shared = [count // chunks for count in ranks] * chunks
    shared[0] -= embedding
    shared[-1] -= loss
    return shared


def _listed(config: Any) -> list[int]:
    """Transformer layers of each model stage as a configuration lists them, if it does.

    Raises:
        InputError: it lists them in no way that Megatron knows.
    """
    layout = _value(config, named := "pipeline_model_parallel_layout")
    if not layout:
        # Layers of several kinds, a character each, without those that predict further tokens.
        pattern, *_ = str(_value(config, "hybrid_layer_pattern") or "").split("/")
        return [len(part) for part in pattern.split("|")] if "|" in pattern else []
    layout = getattr(layout, "input_data", layout)
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for repeated in (_GROUP, _LETTER):
            length = sum(len(part) * int(times) for part, times in repeated.findall(text))
            if len(text) + length > _LONGEST:
                raise InputError(f"{named} {shown(layout)} is too long")
            text = repeated.sub(lambda found: found[1] * int(found[2]), text)
        layout = [list(stage) for stage in text.split("|")]
    if not isinstance(layout, list) or not all(isinstance(stage, list) for stage in layout):
        raise InputError(f"{named} {shown(layout)} is no list of stages")
    return [sum(layer in ("t", "decoder") for layer in stage) for stage in layout]


def _microbatches(config: Any, stages: int) -> int:
    """How many the batch sizes make, where they and the number of replicas are said."""
    if steps := _number(config, "gradient_accumulation_steps"):  # of GPT-NeoX, which is DeepSpeed's
        return steps
    batch, size, replicas = (
        _number(config, f"{name}_size") for name in ("global_batch", "micro_batch", "data_parallel")
    )
    nodes, devices = _number(config, "num_nodes"), _number(config, "devices")
    tensor, context = (_number(config, f"{k}_parallel_size") for k in ("tensor_model", "context"))
    if replicas is None and nodes and devices:
        replicas = nodes * devices // (stages * (tensor or 1) * (context or 1))
    if not batch or not size or not replicas:
        raise InputError(
            "does not say how many microbatches an iteration has; give --microbatches M: the "
            "global batch over microbatch size and data-parallel degree"
        )
    return max(1, batch // (size * replicas))


def _number(config: Any, name: str) -> int | None:
    value = _value(config, name)
    return None if value is None else whole_number(value, name, least=1)


def _value(config: Any, name: str) -> Any:
    """What a configuration says under a name, at its top or in one of its parts."""
    if not isinstance(config, Mapping):
        return getattr(config, name, None)
    parts = [part for part in (config, *map(config.get, _PARTS)) if isinstance(part, Mapping)]
    found = {shown(part[name]): part[name] for part in parts if part.get(name) is not None}
    if len(found) > 1:
        raise InputError(f"says two things under {name}: {' and '.join(found)}")
    return next(iter(found.values()), None)


def pipeline_from_megatron(
    config: Any, num_microbatches: int | None = None, *, p2p_latency: float = 0.0
) -> Pipeline:
    """The pipeline that Megatron runs with a configuration: an object, or a mapping.

    Args:
        p2p_latency: seconds that a transfer between ranks takes.

    Raises:
        InputError: as for read_megatron and Pipeline.from_orders.
    """
    schedule = read_megatron(config, num_microbatches)
    return Pipeline.from_imported(schedule, p2p_latency=p2p_latency)
