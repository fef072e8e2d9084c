"""Parts that stages of every kind of model have in common, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["LayerRange", "Loss", "Recomputed"]


class LayerRange(NamedTuple):
    """The layers of a stage, in the model's order.

    Attributes:
        begin: the first of them.
        end: behind the last of them.
        is_last: whether the model ends there.
    """

    begin: int
    end: int
    is_last: bool


class Recomputed(nn.Module):
    """A layer that keeps its inputs only, and whose backward does its forward again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = checkpoint(self.layer, *inputs, use_reentrant=False)
        return output


class Loss(nn.Module):
    """Cross entropy of logits (n, words), against made-up words."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """The mean over all n."""
        num_words = logits.shape[1]
        targets = torch.arange(len(logits), device=logits.device) % num_words
        return functional.cross_entropy(logits.float(), targets)
