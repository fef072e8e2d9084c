"""Megatron's pipeline schedules, as a configuration of Megatron or of NeMo's Megatron-Bridge asks.

Such a configuration is an object in memory (megatron.core's TransformerConfig, and what derives
from it), a file in YAML or JSON whose names are the same, under `model` or not, a script that gives
Megatron-LM its arguments, or the log in which it prints them. GPT-NeoX's files have names of their
own for the same. Megatron is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from envplan._io.files import decoded, parse_json, read_bounded
from envplan._io.markup import parse_yaml
from envplan.errors import InputError, naming, shown
from envplan.pipeline.graph import Pipeline
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.imports import MAX_FILE_BYTES
from envplan.pipeline.schedules import interleaved, one_forward_one_backward
from envplan.pipeline.spec import refuse_too_large, whole_number

__all__ = ["layers_per_stage", "read_megatron", "read_megatron_file"]

#: In a layout: what is repeated, and how often.
_GROUP: Final = re.compile(r"\(([^)]+)\)\*(\d{1,5})")
_LETTER: Final = re.compile(r"(.)\*(\d{1,5})")
_LONGEST: Final = 100_000
#: Models have no more layers than that. A line that asks for many more is a mistake.
_MOST_MODEL_STAGES: Final = 4096

#: An argument of Megatron-LM in a script, or in a YAML file of its tests, and its value if any.
_ARGUMENT: Final = re.compile(
    r"""--([a-z][a-z0-9_-]*)(?:(?:[ \t=]|:[ \t])[ \t]*("[^"\n]*"|'[^'\n]*'|(?!-)[^\s\\#]+))?"""
)
#: As Megatron-LM prints them all when it starts.
_PRINTED: Final = re.compile(r"(?:^|[\s:])(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"(^|\s)#.*")
_ASSIGNED: Final = re.compile(r"(?:^|\s)(\w+)=[\"']?(\w+)[\"']?\s*$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"\$\{?(?P<name>\w+)(?::-(?P<default>\w+)\})?\}?")
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
_OVERLAP_MOE: Final = "overlap_moe_expert_parallel_comm"
_LAYOUT: Final = "pipeline_model_parallel_layout"
_LAYERS_PER_CHUNK: Final = "num_layers_per_virtual_pipeline_stage"
_OVERLAP_P2P: Final = "overlap_p2p_comm"
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
    if _value(config, _OVERLAP_MOE):
        raise InputError(
            f"{_OVERLAP_MOE} runs a forward and a backward together, which a plan cannot follow"
        )
    microbatches = num_microbatches or _microbatches(config, stages)
    refuse_too_large(2 * stages * microbatches)
    chunks = _num_chunks(config, stages)
    num_model_stages = stages * (chunks or 1)
    if num_model_stages > _MOST_MODEL_STAGES:
        raise InputError(
            f"ranks x chunks make {num_model_stages} model stages; at most {_MOST_MODEL_STAGES} "
            "are possible"
        )
    refuse_too_large(2 * num_model_stages * microbatches)
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
        document = _parse_arguments(text) or _parse_document(text, path)
        if not isinstance(document, dict):
            raise InputError("must hold a configuration's names and values")
        config = {_usual_name(str(name)): value for name, value in document.items()}
        schedule = read_megatron(config, num_microbatches)
        # Megatron's 1F1B has no such transfers.
        overlap = schedule.num_chunks > 1 and bool(_value(config, _OVERLAP_P2P))
        layers = tuple(layers_per_stage(config))
        return replace(schedule, overlap_p2p=overlap, layers_per_stage=layers or None)


def _usual_name(name: str) -> str:
    """The name under which a configuration of Megatron says the same."""
    name = name.replace("-", "_")
    return _OTHER_NAMES.get(name, name)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Megatron-LM's arguments in a script, in a log, or in a file of its tests; empty: none there.

    Raises:
        InputError: one is given twice, with different values.
    """
    printed = _PRINTED.findall(text)
    if "pipeline_model_parallel_size" in dict(printed):
        return _merge_arguments(printed, {}, {})
    if "--pipeline-model-parallel-" not in text:
        return {}
    script = _COMMENT.sub("", text)
    variables = dict(_ASSIGNED.findall(script))
    # In a script transfers overlap unless an argument says otherwise.
    return _merge_arguments(_ARGUMENT.findall(script), variables, {_OVERLAP_P2P: True})


def _merge_arguments(
    arguments: Iterable[tuple[str, str]],
    variables: Mapping[str, str],
    defaults: Mapping[str, object],
) -> dict[str, Any]:
    """The values of arguments by name.

    Args:
        arguments: their names and texts, in order.
        variables: of a script.
        defaults: values that hold where no argument says otherwise.

    Raises:
        InputError: one of a pipeline is given twice, with different values.
    """
    values: dict[str, Any] = dict(defaults)
    for argument, written in arguments:
        text = _expand(written, variables)
        name = argument.replace("-", "_")
        is_of_pipeline = "pipeline" in name
        if "$" in text and not is_of_pipeline:
            continue
        if name == "no_overlap_p2p_communication":
            values[_OVERLAP_P2P] = False
            continue
        value = _parse_value(text)
        if is_of_pipeline and name in values and values[name] != value:
            raise InputError(
                f"says two things under --{argument}: {shown(values[name])} and {text}"
            )
        values[name] = value
    return values


def _expand(written: str, variables: Mapping[str, str]) -> str:
    """A value with its variables replaced where the script, or a default, says them."""

    def value_of(match: re.Match[str]) -> str:
        return variables.get(match["name"]) or match["default"] or match[0]

    text = _VARIABLE.sub(value_of, written).strip("\"'")
    return text if "(" in text else text.rstrip(")")


def _parse_value(text: str) -> object:
    """A number, a truth value, nothing or a text; an argument without a value is true."""
    if text.isdecimal():
        return int(text)
    return _WORDS.get(text.lower(), text or True)


def _parse_document(text: str, path: str | os.PathLike[str]) -> Any:
    """The value in a file of JSON or YAML."""
    with suppress(InputError):
        return parse_json(text.encode(), path)
    # JSON with comments in it, as that of GPT-NeoX, is YAML, too.
    return parse_yaml(text, path)


def _num_chunks(config: Any, num_ranks: int) -> int | None:
    """Model chunks of each rank; None where there is one.

    Raises:
        InputError: layers or a layout do not make as many on each rank.
    """
    chunks = _number(config, "virtual_pipeline_model_parallel_size")
    if chunks is not None:
        return chunks
    num_stages = len(_listed_layers(config)) or _num_stages_by_layers(config, num_ranks)
    if num_stages % num_ranks:
        raise InputError(f"lists layers of {num_stages} model stages for {num_ranks} ranks")
    return num_stages // num_ranks if num_stages > num_ranks else None


def _num_stages_by_layers(config: Any, num_ranks: int) -> int:
    """Model stages of so many layers each; 0 where a configuration does not say how many.

    Raises:
        InputError: the layers do not make as many on each rank.
    """
    per_stage = _number(config, _LAYERS_PER_CHUNK)
    if not per_stage:
        return 0
    layers = _number(config, "num_layers")
    if layers is None:
        raise InputError(f"says {_LAYERS_PER_CHUNK}, but no num_layers")
    layers += sum(_counted_as_layers(config))
    num_stages, left = divmod(layers, per_stage)
    if left or num_stages % num_ranks:
        raise InputError(f"{layers} layers do not make chunks of {per_stage} on {num_ranks} ranks")
    return num_stages


def _counted_as_layers(config: Any) -> tuple[bool, bool]:
    """Whether the embedding and the loss count as a layer each."""
    return bool(_value(config, _EMBEDDING)), bool(_value(config, _LOSS))


def layers_per_stage(config: Any) -> list[int]:
    """Transformer layers of each model stage, as Megatron shares them out; none if nothing says.

    Follows megatron.core's rules: the first and the last rank may have layers of their own number
    (`num_layers_in_first_pipeline_stage`, `..._last_...`), or embedding and loss may count as a
    layer each (`account_for_embedding_in_pipeline_split`, `account_for_loss_...`). Or
    `pipeline_model_parallel_layout` says them all: as lists of names, or as "Et*3|(tt|)*14tL".

    Raises:
        InputError: the layers cannot be shared out so.
    """
    num_ranks = _number(config, "pipeline_model_parallel_size") or 1
    listed = _listed_layers(config)
    if listed:
        return listed
    layers = _number(config, "num_layers")
    if layers is None:
        return []
    num_chunks = _num_chunks(config, num_ranks) or 1
    embedding, loss = _counted_as_layers(config)
    of_ranks = [0] * num_ranks
    of_ranks[0] = _number(config, "num_layers_in_first_pipeline_stage") or 0
    of_ranks[-1] = _number(config, "num_layers_in_last_pipeline_stage") or of_ranks[-1]
    counted = layers + embedding + loss
    shared, left = divmod(counted - sum(of_ranks), of_ranks.count(0) or 1)
    of_ranks = [stated or shared for stated in of_ranks]
    if left or shared < 0 or sum(of_ranks) != counted:
        raise InputError(f"{layers} layers cannot be shared out over {num_ranks} stages so")
    if any(count % num_chunks for count in of_ranks):
        raise InputError(f"{num_chunks} chunks do not divide the layers of every rank, {of_ranks}")
    of_stages = [count // num_chunks for count in of_ranks] * num_chunks
    of_stages[0] -= embedding
    of_stages[-1] -= loss
    return of_stages


def _listed_layers(config: Any) -> list[int]:
    """Transformer layers of each model stage as a configuration lists them, if it does.

    Raises:
        InputError: it lists them in no way that Megatron knows.
    """
    layout = _value(config, _LAYOUT)
    if not layout:
        # Layers of several kinds, a character each, without those that predict further tokens.
        pattern, *_ = str(_value(config, "hybrid_layer_pattern") or "").split("/")
        return [len(stage) for stage in pattern.split("|")] if "|" in pattern else []
    layout = getattr(layout, "input_data", layout)
    if isinstance(layout, str):
        layout = [list(stage) for stage in _unrolled(layout).split("|")]
    if not isinstance(layout, list) or not all(isinstance(stage, list) for stage in layout):
        raise InputError(f"{_LAYOUT} {shown(layout)} is no list of stages")
    return [sum(layer in ("t", "decoder") for layer in stage) for stage in layout]


def _unrolled(layout: str) -> str:
    """A layout such as "Et*3|(tt|)*14tL" with its repetitions written out.

    Raises:
        InputError: it is too long.
    """
    text = layout.replace(",", "")
    for repetition in (_GROUP, _LETTER):
        added = sum(len(part) * int(times) for part, times in repetition.findall(text))
        if len(text) + added > _LONGEST:
            raise InputError(f"{_LAYOUT} {shown(layout)} is too long")
        text = repetition.sub(lambda match: match[1] * int(match[2]), text)
    return text


def _microbatches(config: Any, num_stages: int) -> int:
    """The number of microbatches that batch sizes and replicas make.

    Raises:
        InputError: one of them is not said.
    """
    steps = _number(config, "gradient_accumulation_steps")  # of GPT-NeoX, which is DeepSpeed's
    if steps:
        return steps
    batch = _number(config, "global_batch_size")
    microbatch = _number(config, "micro_batch_size")
    replicas = _num_replicas(config, num_stages)
    if not batch or not microbatch or not replicas:
        raise InputError(
            "does not say how many microbatches an iteration has; give --microbatches M: the "
            "global batch over microbatch size and data-parallel degree"
        )
    return max(1, batch // (microbatch * replicas))


def _num_replicas(config: Any, num_stages: int) -> int | None:
    """The data-parallel degree, as it is said or as the GPUs of all nodes make it."""
    replicas = _number(config, "data_parallel_size")
    num_nodes, gpus_per_node = _number(config, "num_nodes"), _number(config, "devices")
    tensor = _number(config, "tensor_model_parallel_size") or 1
    context = _number(config, "context_parallel_size") or 1
    if replicas is None and num_nodes and gpus_per_node:
        return num_nodes * gpus_per_node // (num_stages * tensor * context)
    return replicas


def _number(config: Any, name: str) -> int | None:
    """A number of a configuration, at least 1; None where it says none."""
    value = _value(config, name)
    return None if value is None else whole_number(value, name, least=1)


def _value(config: Any, name: str) -> Any:
    """The value of a configuration under a name, at its top or in one of its parts.

    Raises:
        InputError: two of them say different things.
    """
    if not isinstance(config, Mapping):
        return getattr(config, name, None)
    parts = [config, *(config.get(part) for part in _PARTS)]
    values = {
        shown(part[name]): part[name]
        for part in parts
        if isinstance(part, Mapping) and part.get(name) is not None
    }
    if len(values) > 1:
        raise InputError(f"says two things under {name}: {' and '.join(values)}")
    return next(iter(values.values()), None)


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
