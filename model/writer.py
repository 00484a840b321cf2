"""A second network that writes blocks over the pages which a model has filled: what the decoder asks of it.

`Backbone.model` reads clean tokens causally and owns what the pages keep. A `BlockWriter` runs canvases behind them,
its own keys and values in the same pages, never committed (TwoTower's denoiser, `model.two_tower.writer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from model.decoding.packing import Packed


class BlockWriter(Protocol):
    """vocab_size: tokens that its logits know; the model's own, or one more."""

    @property
    def vocab_size(self) -> int: ...

    def prepare(self, *, weights: str, kernels: bool) -> None:
        """Make ready to decode, as the decoder was told to (see `model.decoding.decoder`)."""
        ...

    def __call__(self, packed: Packed, times: Tensor) -> Tensor:
        """Logits [N, V] of the packed slots. packed: R canvases of equal length; times [R]: their masked shares."""
        ...
