"""Sizes that a workload may be given. Light to import: the command line takes them as options."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a workload; None leaves what the workload has by itself.

    Attributes:
        layers: transformer layers, for t5 of the encoder and of the decoder each; for wide-resnet
            50, 101 or 152.
        hidden_size: width of a transformer.
        heads: attention heads; a new width without it keeps the width of a head.
        vocabulary_size: words; 0 leaves out embedding and head.
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
