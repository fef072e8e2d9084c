"""Profiles of a workload of any size on a modelled GPU, for planning before one owns it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import date
from importlib.metadata import version
from typing import Final

from envplan.devices.modelled import gpu
from envplan.errors import InputError, shown
from envplan.profile import BLOCKING, Profile
from envplan.profiling import models
from envplan.profiling.builtin import Builtin, build
from envplan.profiling.workloads import (
    ConvolutionalModel,
    EncoderDecoderModel,
    Model,
    TransformerModel,
)
from envplan.units import j_from_fj, s_from_ns

__all__ = ["WORKLOADS", "Sizes", "model_of", "modelled_profile", "spaced_clocks"]

#: The workloads that sizes may be given for, and what each is without any.
WORKLOADS: Final[dict[str, Model]] = {
    "gpt": models.GPT3_1_3B,
    "bert": models.BERT_1_3B,
    "t5": models.T5_3B,
    "wide-resnet": models.WIDE_RESNET_101_8,
}

#: Bottleneck blocks of the four groups, by the number of layers that ResNets are named after.
_BLOCKS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

_TRANSFORMER_SIZES: Final = frozenset(
    {"layers", "hidden_size", "heads", "vocabulary_size", "sequence_length"}
)
_CONVOLUTIONAL_SIZES: Final = frozenset({"layers", "width_factor", "image_size"})
#: Far beyond any model, and within what can be reckoned.
_MOST_LAYERS: Final = 1000
_LARGEST: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a workload; None leaves what the workload has by itself.

    Attributes:
        layers: transformer layers, for t5 of the encoder and of the decoder each; for wide-resnet
            50, 101 or 152.
        hidden_size: width of a transformer.
        heads: attention heads; a new width without it keeps the width of a head.
        vocabulary_size: words; 0 leaves out embedding and head of gpt and bert.
        sequence_length: tokens of a sample, for t5 on either side.
        width_factor: how much wider than ResNet's the 3x3 convolutions are.
        image_size: pixels on a side.
    """

    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    vocabulary_size: int | None = None
    sequence_length: int | None = None
    width_factor: int | None = None
    image_size: int | None = None

    def given(self) -> dict[str, int]:
        """Those that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def model_of(workload: str, sizes: Sizes) -> Model:
    """The model of a workload with some of its sizes changed.

    Raises:
        InputError: there is no such workload, or it has no such size.
    """
    usual = WORKLOADS.get(workload)
    if usual is None:
        raise InputError(f"there is no workload {workload!r}; there are: {', '.join(WORKLOADS)}")
    given = sizes.given()
    convolutional = isinstance(usual, ConvolutionalModel)
    fitting = _CONVOLUTIONAL_SIZES if convolutional else _TRANSFORMER_SIZES
    for name in given:
        if name not in fitting:
            raise InputError(f"{_option(name)} does not go with workload {workload}")
        if given[name] < (0 if name == "vocabulary_size" else 1):
            raise InputError(f"{_option(name)} must be at least 1, not {given[name]}")
        most = _MOST_LAYERS if name == "layers" else _LARGEST
        if given[name] > most:
            raise InputError(f"{_option(name)} must be at most {most}, not {shown(given[name])}")
    if not given:
        return usual
    match usual:
        case ConvolutionalModel():
            return _resnet(usual, given)
        case EncoderDecoderModel():
            return _t5(usual, given)
        case TransformerModel():
            return _transformer(usual, given, workload)
    raise AssertionError(workload)


def _option(size: str) -> str:
    return "--" + size.replace("_", "-")


def _transformer(usual: TransformerModel, given: dict[str, int], workload: str) -> Model:
    hidden = given.get("hidden_size", usual.hidden_size)
    layers = given.get("layers", usual.num_layers)
    return replace(
        usual,
        name=f"{workload.upper()} of {layers} layers x {hidden}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=_heads(usual.num_heads, usual.hidden_size, hidden, given),
        vocabulary_size=given.get("vocabulary_size", usual.vocabulary_size),
        sequence_length=given.get("sequence_length", usual.sequence_length),
    )


def _t5(usual: EncoderDecoderModel, given: dict[str, int]) -> Model:
    hidden = given.get("hidden_size", usual.hidden_size)
    layers = given.get("layers", usual.num_encoder_layers)
    if given.get("vocabulary_size") == 0:
        raise InputError("--vocabulary-size must be at least 1 for workload t5, not 0")
    return replace(
        usual,
        name=f"T5 of 2 x {layers} layers x {hidden}",
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        hidden_size=hidden,
        num_heads=given.get("heads", usual.num_heads),
        feed_forward_size=usual.feed_forward_size * hidden // usual.hidden_size,
        vocabulary_size=given.get("vocabulary_size", usual.vocabulary_size),
        source_length=given.get("sequence_length", usual.source_length),
        target_length=given.get("sequence_length", usual.target_length),
    )


def _heads(usual_heads: int, usual_hidden: int, hidden: int, given: dict[str, int]) -> int:
    heads = given.get("heads", max(1, hidden * usual_heads // usual_hidden))
    if hidden % heads:
        raise InputError(f"--hidden-size {hidden} does not divide into {heads} heads; set --heads")
    return heads


def _resnet(usual: ConvolutionalModel, given: dict[str, int]) -> Model:
    layers = given.get("layers", 101)
    if layers not in _BLOCKS:
        raise InputError(f"--layers of workload wide-resnet must be 50, 101 or 152, not {layers}")
    image = given.get("image_size", usual.image_size)
    if image < 32:
        raise InputError(f"--image-size must be at least 32, not {image}")
    width = given.get("width_factor", usual.width_factor)
    return replace(
        usual,
        name=f"Wide-ResNet-{layers}-{width}",
        blocks=_BLOCKS[layers],
        width_factor=width,
        image_size=image,
    )


def spaced_clocks(clocks: tuple[int, ...], step: int) -> list[int]:
    """Clocks from the highest down, neighbours at least `step` apart.

    Args:
        clocks: supported SM clocks, MHz, in any order.
        step: MHz; 0 takes all of them.
    """
    taken: list[int] = []
    for clock in sorted(clocks, reverse=True):
        if not taken or taken[-1] - clock >= step:
            taken.append(clock)
    return taken


def modelled_profile(job: Builtin, *, step: int = 0, schedule: str = "1f1b") -> Profile:
    """The profile of a job on a modelled GPU.

    Args:
        job: what is trained, on what.
        step: MHz between clocks at least; 0 takes all.
        schedule: what the sidecar says the job runs.

    Raises:
        InputError: there is no such GPU, or the model cannot be split so.
    """
    highest, lowest = gpu(job.gpu).clocks_mhz[0], gpu(job.gpu).clocks_mhz[-1]
    if step > highest - lowest:
        raise InputError(f"--step {step} is wider than the clocks of {job.gpu} are apart")
    built = build(job)
    extra = {**built.metadata.extra, **({"step_mhz": step} if step else {})}
    metadata = replace(
        built.metadata,
        date=date.today().isoformat(),
        envplan_version=version("envplan"),
        schedule=schedule,
        extra=extra,
    )
    clocks = frozenset(spaced_clocks(gpu(job.gpu).clocks_mhz, step))
    return Profile.from_rows(_rows(built, clocks), name=job.name, metadata=metadata)


def _rows(profile: Profile, clocks: frozenset[int]) -> Iterator[tuple[int, str, int, float, float]]:
    for stage in range(profile.num_stages):
        for instruction in (*profile.instructions, BLOCKING):
            table = profile.table(stage, instruction)
            options = zip(
                table.frequency_mhz.tolist(),
                table.time_ns.tolist(),
                table.energy_fj.tolist(),
                strict=True,
            )
            for clock, time_ns, energy_fj in sorted(options, reverse=True):
                if clock in clocks:
                    yield (
                        stage,
                        instruction,
                        clock,
                        s_from_ns(time_ns),
                        round(j_from_fj(energy_fj), 6),
                    )
