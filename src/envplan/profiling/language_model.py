"""Language models whose layers differ: of attention, linear attention, state spaces and experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from envplan.errors import InputError
from envplan.profiling.blocks import Share, product_kernels, residual_kernels
from envplan.profiling.mixers import Block
from envplan.profiling.work import ModuleKernels, ModuleWork, Unit, kernels_work

__all__ = ["LanguageModel", "Layer"]

# Bytes per token and hidden unit for the look-up of an embedding, and per logit for the loss; as in
# `transformer`.
_EMBEDDING_BYTES: Final = 12.0
_LOGIT_BYTES: Final = 8.0


class Layer(NamedTuple):
    """A layer: its blocks, in order, and parameters of the norms between them."""

    blocks: tuple[Block, ...]
    norm_parameters: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(block.parameters for block in self.blocks) + self.norm_parameters


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A stack of layers between an embedding and a head.

    Attributes:
        name: for people.
        hidden_size: width of a token.
        vocabulary_size: rows of the embedding and of the head; 0: both are left out.
        sequence_length: tokens of a sample.
        layers: in order.
        tied: embedding and head are one matrix, which counts once.
        final_parameters: of the last norm, and of whatever else stands outside the layers.
        prediction: layers that predict further tokens (multi-token prediction, DeepSeek-V3, section
            2.2), on the last stage, each with a product that joins two states, and the head once
            more. They are not among the parameters.
    """

    name: str
    hidden_size: int
    vocabulary_size: int
    sequence_length: int
    layers: tuple[Layer, ...]
    tied: bool = False
    final_parameters: int
    prediction: tuple[Layer, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self.layers)

    @property
    def parameters(self) -> int:
        """All of them, norms and biases included."""
        embeddings = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size
        return embeddings + sum(layer.parameters for layer in self.layers) + self.final_parameters

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.sequence_length

    @property
    def sample(self) -> str:
        """Size of a sample, for people."""
        return f"{self.sequence_length} tokens"

    def with_sizes(
        self, *, num_layers: int, vocabulary_size: int, sequence_length: int
    ) -> LanguageModel:
        """The model with other sizes; further layers repeat the pattern from the start."""
        layers = [self.layers[layer % self.num_layers] for layer in range(num_layers)]
        return replace(
            self,
            layers=tuple(layers),
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
        )

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            counts.update({block.name.replace("_", " ") for block in layer.blocks})
        blocks = ", ".join(f"{count} with {name}" for name, count in counts.items())
        words = f"{self.vocabulary_size} words" if self.vocabulary_size else "no embedding and head"
        further = ""
        if self.prediction:
            further = f", {len(self.prediction)} more for further tokens on the last stage"
        return (
            f"{self.num_layers} layers of {self.hidden_size} units ({blocks}){further}, "
            f"{self.sample}, {words}"
        )

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[Unit]:
        """The layers, with the embedding on the first and the head on the last.

        Raises:
            InputError: tokens cannot be shared out evenly.
        """
        microbatch_tokens = microbatch_size * self.sequence_length
        if microbatch_tokens % context_parallel:
            raise InputError(f"--cp {context_parallel} does not divide {microbatch_tokens} tokens")
        share = Share(microbatch_tokens // context_parallel, self.sequence_length, tensor_parallel)
        unit_of_layer = {layer: self._unit(share, layer) for layer in dict.fromkeys(self.layers)}
        units = [unit_of_layer[layer] for layer in self.layers]
        if self.vocabulary_size:
            units[0] = (self._embedding_work(share), *units[0])
            units[-1] = (*units[-1], self._head_work(share))
        for layer in self.prediction:
            units[-1] = (*units[-1], *self._prediction_unit(share, layer))
        return units

    def _unit(self, share: Share, layer: Layer) -> Unit:
        return tuple(
            kernels_work(
                block.name,
                residual_kernels(share, self.hidden_size) + block.kernels(share),
                block.parameters / share.tensor_parallel,
            )
            for block in layer.blocks
        )

    def _prediction_unit(self, share: Share, layer: Layer) -> Unit:
        joined = product_kernels(share, self.hidden_size, 2 * self.hidden_size)
        modules = [
            kernels_work("joined_states", joined, 2 * self.hidden_size**2),
            *self._unit(share, layer),
        ]
        return (*modules, self._head_work(share)) if self.vocabulary_size else tuple(modules)

    def _embedding_work(self, share: Share) -> ModuleWork:
        look_up = _EMBEDDING_BYTES * share.num_tokens * self.hidden_size
        num_weights = share.part_of(self.vocabulary_size) * self.hidden_size
        return kernels_work("embedding", ModuleKernels.of_element_wise(look_up), num_weights)

    def _head_work(self, share: Share) -> ModuleWork:
        num_words = share.part_of(self.vocabulary_size)
        kernels = residual_kernels(share, self.hidden_size)
        kernels += product_kernels(share, num_words, self.hidden_size)
        loss = ModuleKernels.of_element_wise(_LOGIT_BYTES * share.num_tokens * num_words)
        return kernels_work("head", kernels + loss, num_words * self.hidden_size)
