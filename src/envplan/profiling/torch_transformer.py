"""Stages of transformers in torch: encoder and decoder layers with what comes before and after."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

from envplan.profiling.torch_layers import LayerRange, Loss, Recomputed
from envplan.profiling.training_job import TrainingJob
from envplan.profiling.transformer import TransformerModel

__all__ = ["TransformerStage", "transformer_inputs"]

# T5 tells apart distances up to so many tokens.
_MAX_DISTANCE: Final = 128


def _is_t5(model: TransformerModel) -> bool:
    """Whether a model has an encoder before its decoder; only T5 has, among the known ones.

    T5 has no biases in norms and products, and knows positions by distances alone.
    """
    return model.encoder_layers > 0


def transformer_inputs(
    job: TrainingJob, model: TransformerModel, layers: LayerRange, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """A random microbatch for a stage: tokens or hidden states, for a decoder's also the encoder's.

    A stage in which the decoder begins takes the decoder's tokens besides; stages behind it take
    the encoder's result.
    """
    num_words = model.vocabulary_size // job.tensor_parallel
    shape = (job.microbatch_size, model.sequence_length)

    def hidden_states() -> torch.Tensor:
        return torch.randn(*shape, model.hidden_size, dtype=dtype)

    def tokens() -> torch.Tensor:
        return torch.randint(num_words, shape) if num_words else hidden_states()

    inputs = [tokens() if layers.begin == 0 else hidden_states()]
    decoder_begin = model.encoder_layers
    if 0 < decoder_begin < layers.end:
        inputs.append(tokens() if layers.begin <= decoder_begin else hidden_states())
    return tuple(inputs)


class TransformerStage(nn.Module):
    """Encoder layers, decoder layers, or the end of the one and the beginning of the other.

    GPT and BERT have what is called a decoder here, and no encoder. What a stage takes:

    - in front of the decoder, and always without an encoder: (tokens or hidden states,)
    - where T5's decoder begins: (the encoder's tokens or hidden states, the decoder's tokens)
    - behind that: (the decoder's hidden states, the encoder's result, called memory here)

    Attributes:
        encoder: its encoder layers; None if it has none.
        norm: of the encoder's result, in the stage where T5's decoder begins; else None.
        decoder: its decoder layers; None if it has none.
        head: final norm, vocabulary head and loss of the last stage; else None.
    """

    def __init__(self, job: TrainingJob, model: TransformerModel, layers: LayerRange) -> None:
        super().__init__()
        decoder_begin, width = model.encoder_layers, model.hidden_size
        num_words = model.vocabulary_size // job.tensor_parallel
        decoder_begins_here = layers.begin <= decoder_begin < layers.end
        self.encoder = self.norm = self.decoder = self.head = None
        if layers.begin < decoder_begin:
            count = min(layers.end, decoder_begin) - layers.begin
            self.encoder = _Layers(
                job, model, count, has_embedding=layers.begin == 0, is_decoder=False
            )
        if decoder_begins_here and _is_t5(model):
            self.norm = nn.LayerNorm(width, bias=False)
        if layers.end > decoder_begin:
            count = layers.end - max(layers.begin, decoder_begin)
            self.decoder = _Layers(
                job, model, count, has_embedding=decoder_begins_here, is_decoder=True
            )
        if layers.is_last and num_words:
            product = nn.Linear(width, num_words, bias=False)
            norm = nn.LayerNorm(width, bias=not _is_t5(model))
            self.head = nn.Sequential(norm, product, nn.Flatten(0, 1), Loss())

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, the encoder's result where later stages need it, or the loss."""
        hidden, memory = inputs[0], inputs[-1]
        if self.encoder is not None:
            hidden = self.encoder(hidden)
        if self.decoder is None:
            return hidden
        if self.norm is not None:  # T5's decoder begins, with tokens of its own
            memory = self.norm(hidden)
            hidden = inputs[-1]
        hidden = self.decoder(hidden, memory)
        if self.head is not None:
            return self.head(hidden)
        return hidden if self.decoder.distances is None else (hidden, memory)


class _Layers(nn.Module):
    """Layers of an encoder or decoder, and what they begin with.

    Embeddings are of words, and of positions where no distances tell them. Without words what
    comes in is hidden states.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: TransformerModel,
        count: int,
        *,
        has_embedding: bool,
        is_decoder: bool,
    ) -> None:
        super().__init__()
        num_words, width = model.vocabulary_size // job.tensor_parallel, model.hidden_size
        is_t5 = _is_t5(model)
        self.words = nn.Embedding(num_words, width) if has_embedding and num_words else None
        self.positions = None
        if self.words is not None and not is_t5:
            self.positions = nn.Embedding(model.sequence_length, width)
        self.distances = _Distances(job, model, causal=is_decoder) if is_t5 else None
        self.layers = nn.ModuleList()
        for _ in range(count):
            layer = _Layer(job, model, has_cross_attention=is_t5 and is_decoder)
            self.layers.append(Recomputed(layer) if job.recompute else layer)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of tokens or hidden states."""
        if self.words is not None:
            hidden = self.words(hidden)
        if self.positions is not None:
            hidden = hidden + self.positions.weight
        bias = None if self.distances is None else self.distances(hidden)
        for layer in self.layers:
            hidden = layer(hidden, bias, memory)
        return hidden


class _Distances(nn.Module):
    """A learned addition to attention's scores for each distance between two tokens.

    T5 shares one among far distances that are alike; looking it up costs the same.
    """

    def __init__(self, job: TrainingJob, model: TransformerModel, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        num_heads = model.num_heads // job.tensor_parallel
        self.values = nn.Embedding(2 * _MAX_DISTANCE + 1, num_heads)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores by head, token and token that is attended to."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        distances = positions[None, :] - positions[:, None]
        rows = distances.clamp(-_MAX_DISTANCE, _MAX_DISTANCE) + _MAX_DISTANCE
        bias: torch.Tensor = self.values(rows).permute(2, 0, 1).to(hidden.dtype)
        if not self.causal:
            return bias
        is_later = distances > 0
        return bias.masked_fill(is_later, float("-inf"))


class _Layer(nn.Module):
    """Attention to its own tokens, in T5's decoder to the encoder's, and a feed-forward part.

    Norms stand in front, as in GPT-2 and later. T5's have no biases, like its products; they keep
    the mean here, which T5's do not take off: that moves the same bytes.
    """

    def __init__(
        self, job: TrainingJob, model: TransformerModel, *, has_cross_attention: bool
    ) -> None:
        super().__init__()
        width = model.hidden_size
        inner_width = model.feed_forward_width // job.tensor_parallel
        has_bias = not _is_t5(model)
        self.attention = _Attention(job, model, to_encoder=False)
        self.cross_attention = None
        if has_cross_attention:
            self.cross_attention = _Attention(job, model, to_encoder=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width, bias=has_bias),
            nn.Linear(width, inner_width, has_bias),
            nn.GELU(),
            nn.Linear(inner_width, width, has_bias),
        )

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of hidden states."""
        hidden = hidden + self.attention(hidden, bias)
        if self.cross_attention is not None:
            hidden = hidden + self.cross_attention(hidden, None, memory)
        out: torch.Tensor = hidden + self.feed_forward(hidden)
        return out


class _Attention(nn.Module):
    """Attention to its own tokens, or to the encoder's, and its norm."""

    def __init__(self, job: TrainingJob, model: TransformerModel, *, to_encoder: bool) -> None:
        super().__init__()
        width = model.hidden_size
        has_bias = not _is_t5(model)
        self.causal = model.causal and not _is_t5(model)  # T5's distances hide later tokens
        self.num_heads = model.num_heads // job.tensor_parallel
        heads_width = self.num_heads * model.head_width
        self.norm = nn.LayerNorm(width, bias=has_bias)
        # Queries, keys and values come from one product of its own tokens. In attention to the
        # encoder, queries do alone, and keys and values come from a product of the encoder's.
        results_of_products = (1, 2) if to_encoder else (3,)
        self.into_heads = nn.ModuleList(
            nn.Linear(width, num_results * heads_width, has_bias)
            for num_results in results_of_products
        )
        self.out_of_heads = nn.Linear(heads_width, width, has_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What attention adds to hidden states.

        Args:
            hidden: its own tokens' hidden states.
            bias: what is added to the scores, if anything.
            memory: the encoder's result; only attention to the encoder looks at it.
        """
        product_inputs = (self.norm(hidden), memory)
        heads: list[torch.Tensor] = []
        for product, tokens in zip(self.into_heads, product_inputs, strict=False):
            heads += self._split_heads(product(tokens))
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self.causal
        )
        out: torch.Tensor = self.out_of_heads(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, results: torch.Tensor) -> torch.Tensor:
        """Results of a product as (queries, keys or values; sample, head, token, width)."""
        head_width = self.out_of_heads.in_features // self.num_heads
        by_head = results.unflatten(-1, (-1, self.num_heads, head_width))
        return by_head.permute(2, 0, 3, 1, 4)
