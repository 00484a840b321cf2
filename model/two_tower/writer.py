"""The denoiser as the engine runs it: canvases of many rows in one forward, over the pages of the shared cache."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention import CappingPlan
from model.decoding.packing import Packed
from model.errors import UserError
from model.packed_linear import can_pack, pack_linears
from model.two_tower.canvas import denoise
from model.two_tower.reader import Across, Capping
from model.two_tower.towers import TwoTower


class DenoiserWriter:
    """`model.writer.BlockWriter` of a TwoTower model.

    Raises UserError for towers whose layers carry states from token to token: the engine's pages hold none.
    """

    def __init__(self, towers: TwoTower) -> None:
        self.towers = towers
        self._denoiser = towers.writer()
        self._storage: dict[int, int] = {}  # see `Capping`
        if towers.context.recurrent or self._denoiser.recurrent:
            raise UserError(
                f"{type(towers.context.causal_lm).__name__} has recurrent layers, whose states the engine does not "
                "keep: decode it with model.two_tower.decoding (write_blocks, write_tokens, write_lossless)."
            )

    @property
    def vocab_size(self) -> int:
        return self._denoiser.vocab_size

    def prepare(self, *, weights: str, kernels: bool) -> None:
        """The denoiser runs in PyTorch, its linear layers packed where the model's own would be."""
        if can_pack(self._denoiser.causal_lm):
            pack_linears(self._denoiser.causal_lm)

    def __call__(self, packed: Packed, times: Tensor) -> Tensor:
        rows, size = len(times), self.towers.config.block_size
        ids, positions = (x[0, : rows * size].view(rows, size) for x in (packed.ids, packed.positions))
        plan: CappingPlan = Capping(packed.plan, self._storage)
        home = packed.plan.cache.device
        if self._denoiser.device != home:
            plan = Across(plan, home)
        logits = denoise(self._denoiser, ids, positions, times, plan, {})
        read = torch.from_numpy(packed.slots.read).to(logits.device)
        return logits.flatten(0, 1)[read].to(home)
