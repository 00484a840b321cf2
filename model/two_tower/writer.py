"""The denoiser as the engine runs it: canvases of many rows in one forward, over the pages of the shared cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from model.attention import CappingPlan
from model.decoding.packing import ROUND_TO, Packed
from model.kernels.fused import FusedForward, TimeVectors, fused_forward
from model.packed_linear import can_pack, pack_linears
from model.two_tower.canvas import denoise, extra_rows
from model.two_tower.reader import Across, Capping
from model.two_tower.recurrent import States, join_states
from model.two_tower.towers import Denoiser, TwoTower


@runtime_checkable
class Mixing(Protocol):
    """A denoiser that is the context tower's own network: clean and noisy tokens may share a forward."""

    def mixed(
        self,
        ids: Tensor,
        positions: Tensor,
        noisy: Tensor,
        times: Tensor,
        time_index: Tensor,
        plan: CappingPlan,
        cache: None,
        keep: Tensor,
    ) -> Tensor:
        """Logits [M, V] where `keep`, bool [R, n]; noisy bool [R, n], times [T], time_index int64 [R, n]: which of them
        a noisy token has."""
        ...


class DenoiserWriter:
    """`model.writer.BlockWriter` of a TwoTower model. Recurrent layers start from the states that the rows hold."""

    def __init__(self, towers: TwoTower) -> None:
        self.towers = towers
        self._denoiser = towers.writer()
        self.storage: dict[int, int] = {}  # by decoder layer: its place in the pages, see `Capping`
        self._fused: FusedForward | None = None
        self._vectors: TimeVectors | None = None

    @property
    def vocab_size(self) -> int:
        return self._denoiser.vocab_size

    @property
    def together(self) -> bool:
        return isinstance(self._denoiser, Mixing) and not self._denoiser.recurrent

    @property
    def token_shift(self) -> bool:
        return self.towers.config.token_shift

    def prepare(self, *, weights: str, kernels: bool) -> None:
        """The C++ forward where it knows the denoiser, else PyTorch with packed linear layers, as for the model."""
        causal_lm, modulation = self._denoiser.causal_lm, self._denoiser.modulation
        plain = type(self._denoiser) is Denoiser and modulation.order == "norm_first"
        if plain and (kernels or weights == "int8"):
            self._fused = fused_forward(causal_lm, weights, modulation.set_all)
        if self._fused is not None:
            size = self.towers.config.block_size
            with torch.inference_mode():  # of every share of a canvas that can be masked
                self._vectors = TimeVectors.padded(self._denoiser.time(torch.arange(1, size + 1).double() / size))
        elif not self._denoiser.recurrent and can_pack(causal_lm):
            pack_linears(causal_lm)

    def __call__(self, packed: Packed, times: Tensor, time_of: Tensor, states: Sequence[States]) -> Tensor:
        if self._fused is not None:
            return self._run_fused(self._fused, packed, times, time_of)
        plan: CappingPlan = Capping(packed.plan, self.storage)
        home = packed.plan.cache.device
        if self._denoiser.device != home:
            plan = Across(plan, home)
        whole = self._run_rows if self._denoiser.recurrent else self._run_flat
        logits = whole(packed, times, time_of, plan, states)
        return logits[torch.from_numpy(packed.slots.read).to(logits.device)].to(home)

    def _run_rows(
        self, packed: Packed, times: Tensor, time_of: Tensor, plan: CappingPlan, states: Sequence[States]
    ) -> Tensor:
        """Logits [R * S, V]: a row each, from the states that it holds."""
        rows = len(times)
        ids, positions = (x[0, : len(time_of)].view(rows, -1) for x in (packed.ids, packed.positions))
        seeds = join_states([*states, *[states[0]] * extra_rows(*ids.shape)])
        return denoise(self._denoiser, ids, positions, times, plan, seeds).flatten(0, 1)

    def _run_flat(
        self, packed: Packed, times: Tensor, time_of: Tensor, plan: CappingPlan, states: Sequence[States]
    ) -> Tensor:
        """Logits [tokens, V]: canvases of any lengths behind one another."""
        index = torch.zeros_like(packed.ids)
        index[0, : len(time_of)] = time_of
        keep = torch.ones_like(packed.ids, dtype=torch.bool)
        with torch.no_grad():
            return self._denoiser(packed.ids, packed.positions, times, index, plan, {}, keep).logits

    def mixed(self, packed: Packed, times: Tensor, time_of: Tensor) -> Tensor:
        assert isinstance(self._denoiser, Mixing), "two networks have a forward each"
        tokens, home = packed.ids.shape[1], packed.plan.cache.device
        which = torch.full((1, tokens), -1)
        which[0, : len(time_of)] = time_of
        keep = torch.zeros(tokens, dtype=torch.bool)
        keep[packed.read] = True
        short = -int(keep.sum()) % ROUND_TO
        keep[(~keep).nonzero()[:short, 0]] = True  # the head's products round alike for every multiple
        place = keep.cumsum(0) - 1
        plan = Capping(packed.plan, self.storage)
        logits = self._denoiser.mixed(
            packed.ids, packed.positions, which >= 0, times, which.clamp(min=0), plan, None, keep[None]
        )
        return logits[place[torch.from_numpy(packed.slots.read)]].to(home)

    def _run_fused(self, fused: FusedForward, packed: Packed, times: Tensor, time_of: Tensor) -> Tensor:
        assert self._vectors is not None, "made with the fused forward"
        size, cache = self.towers.config.block_size, packed.plan.cache
        pieces, tables = packed.plan.descriptors
        vector_of = ((times * size).round().long() - 1)[time_of]
        return fused(
            packed.ids,
            packed.positions,
            pieces,
            tables,
            cache.page_size,
            packed.plan.where,
            cache.keys,
            cache.values,
            packed.read[: len(packed.slots.read)],
            (self._vectors, vector_of),
        )
