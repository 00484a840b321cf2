"""A second network that writes blocks over the pages which a model has filled: what the decoder asks of it.

`Backbone.model` reads clean tokens causally and owns what the pages keep. A `BlockWriter` runs canvases behind them,
its own keys and values in the same pages, never committed (TwoTower's denoiser, `model.two_tower.writer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.cache import BlockCache
    from model.decoding.packing import Packed, Turn


class StatefulForward(Protocol):
    """How clean tokens run where layers carry states from token to token: the pages hold none, the rows do
    (`Row.states`)."""

    def allocate(self, cache: BlockCache) -> None:
        """Make storage for every layer that attends."""
        ...

    def __call__(self, turns: Sequence[Turn], packed: Packed) -> Tensor:
        """Logits [N, V] of the packed slots."""
        ...

    def settle(self, turns: Sequence[Turn], cache: BlockCache) -> None:
        """The rows have moved on: keep the states behind what each has committed."""
        ...


class BlockWriter(Protocol):
    """vocab_size: tokens that its logits know; the model's own, or one more.

    token_shift: a canvas's logits are of the slots behind them, and the model's own logit decides its first slot.
    together: it is the model's own network (`denoiser: lora`), so that clean tokens and canvases share a forward.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def together(self) -> bool: ...

    @property
    def token_shift(self) -> bool: ...

    def prepare(self, *, weights: str, kernels: bool) -> None:
        """Make ready to decode, as the decoder was told to (see `model.decoding.decoder`)."""
        ...

    def __call__(self, packed: Packed, times: Tensor, time_of: Tensor, states: Sequence[Any]) -> Tensor:
        """Logits [N, V] of the packed slots. packed: R canvases, of equal length where rows hold states; times [R]:
        their masked shares; time_of: int64 [tokens], which of them a token has; states: `Row.states` of each."""
        ...

    def mixed(self, packed: Packed, times: Tensor, time_of: Tensor) -> Tensor:
        """The same of a forward with clean tokens among them, whose time_of is -1. Only where `together`."""
        ...
