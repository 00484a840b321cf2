"""`denoiser: lora`: both towers in one model. The writer is the frozen reader, an adapter and the time conditioning.

Memory is about once the model's instead of twice. What of a forward is noisy runs as the denoiser, what is clean as the
untouched base model, bit for bit, also in one and the same forward (`SharedDenoiser.mixed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.adapters import LoraSettings
from model.attention import AttentionPlan
from model.two_tower.adapter import TokenAdapter
from model.two_tower.config import LORA, TwoTowerConfig
from model.two_tower.modulation import GATE
from model.two_tower.recurrent import StateCache, States
from model.two_tower.towers import (
    ContextTower,
    Denoised,
    Denoiser,
    Scored,
    TwoTower,
    check_config,
    four_tokens,
    run_tower,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SharedDenoiser(Denoiser):
    """A denoiser whose weights are the context tower's. Its parameters are the adapter and the time modules alone.

    It acts during its own forwards. With gradients it stays on behind one, since checkpointing runs layers again in
    the backward pass; `resting` switches it off for as long as the context tower reads.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, settings: LoraSettings, mask_token_id: int, order: str = "norm_first"
    ) -> None:
        """Raises UserError as `Denoiser`, and for targets that do not fit the model."""
        causal_lm.requires_grad_(False)
        super().__init__(causal_lm, order)
        self.mask_token_id = mask_token_id
        self.rows = int(causal_lm.get_input_embeddings().num_embeddings)
        self.adapter = TokenAdapter(causal_lm, settings, mask_token_id)
        ids = torch.arange(4, device=causal_lm.device)[None]
        with self.adapter.seeing_every_token(4), torch.no_grad():
            plan = four_tokens(causal_lm.device)
            causal_lm.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, attention_plan=plan)

    def _hold(self, causal_lm: PreTrainedModel) -> None:
        self.__dict__["causal_lm"] = causal_lm  # no submodule: it is the context tower's

    @property
    def vocab_size(self) -> int:
        return max(self.rows, self.mask_token_id + 1)

    def train(self, mode: bool = True) -> SharedDenoiser:
        self.causal_lm.train(mode)  # where gradient checkpointing looks
        super().train(mode)
        return self

    @contextmanager
    def resting(self) -> Iterator[None]:
        """The model is the base model, in eval mode; afterwards everything is as it was."""
        adapter, modulation, training = self.adapter, self.modulation, self.causal_lm.training
        before = (adapter.active, adapter.where, adapter.masks), (modulation.vectors, modulation.index)
        self.off()
        if training:
            self.causal_lm.eval()
        try:
            yield
        finally:
            adapter.active, adapter.where, adapter.masks = before[0]
            modulation.set(*before[1])
            if training:
                self.causal_lm.train()

    def off(self) -> None:
        """Adapter and time conditioning act no more."""
        self.adapter.off()
        self.modulation.set(None, None)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        times: Tensor,
        time_index: Tensor,
        plan: AttentionPlan,
        seeds: States,
        keep: Tensor,
        balance: bool = False,
    ) -> Denoised:
        """As `Denoiser.forward`: every token is noisy. A mask outside the vocabulary has the logit -inf."""
        ids = ids.to(self.device)
        masks = ids == self.mask_token_id
        self.adapter.on(masks)
        try:
            out = super().forward(self._known(ids, masks), positions, times, time_index, plan, seeds, keep, balance)
        finally:
            if not torch.is_grad_enabled():
                self.off()
        return Denoised(self._with_mask(out.logits), out.balance)

    def score(
        self,
        ids: Tensor,
        positions: Tensor,
        times: Tensor,
        time_index: Tensor,
        plan: AttentionPlan,
        seeds: States,
        keep: Tensor,
        targets: Tensor,
    ) -> Scored:
        """As `Denoiser.score`: every token is noisy."""
        ids = ids.to(self.device)
        masks = ids == self.mask_token_id
        self.adapter.on(masks)
        try:
            return super().score(self._known(ids, masks), positions, times, time_index, plan, seeds, keep, targets)
        finally:
            if not torch.is_grad_enabled():
                self.off()

    def mixed(
        self,
        ids: Tensor,
        positions: Tensor,
        noisy: Tensor,
        times: Tensor,
        time_index: Tensor,
        plan: AttentionPlan,
        cache: StateCache | None,
        keep: Tensor,
    ) -> Tensor:
        """Both towers in one forward without gradients: logits [M, V] where `keep`, bool [R, n].

        noisy: bool [R, n], the tokens that the denoiser runs on; the others are the context tower's. times [T] in
        [0, 1]; time_index int64 [R, n]: which of them a noisy token has. ids and positions int64 [R, n]; plan: for
        [1, R * n]. cache: the recurrent states that each row starts from, see `ContextTower.cache`; a row of a
        recurrent model is clean or noisy as a whole.
        """
        device = self.device
        ids, noisy = ids.to(device), noisy.to(device)
        masks = noisy & (ids == self.mask_token_id)
        with torch.no_grad():
            vectors = self.time(times)
            still = torch.zeros_like(vectors[:, :1])
            still[:, :, GATE] = 1.0
            index = torch.where(noisy, time_index.to(device), len(times))
            self.modulation.set(torch.cat((vectors, still), dim=1), index)
            self.adapter.on(masks, noisy)
            try:
                reach = self._reach(positions)
                logits: Tensor = run_tower(self.causal_lm, self._known(ids, masks), reach, plan, cache, keep).logits
            finally:
                self.off()
        return self._with_mask(logits)

    def _known(self, ids: Tensor, masks: Tensor) -> Tensor:
        """Masks that the base model has no embedding for get one of its ids; the embedding is replaced anyway."""
        return ids.masked_fill(masks, 0) if self.mask_token_id >= self.rows else ids

    def _with_mask(self, logits: Tensor) -> Tensor:
        if self.mask_token_id < self.rows:
            return logits
        return nn.functional.pad(logits, (0, 1), value=-torch.inf)


def build_shared_towers(causal_lm: PreTrainedModel, config: TwoTowerConfig, settings: LoraSettings) -> TwoTower:
    """Both towers from one pretrained model, which neither copies nor changes.

    The denoiser equals the model bit for bit at every time, until it is trained. Raises UserError as
    `build_two_tower`, and for targets that do not fit the model.
    """
    assert config.denoiser == LORA
    check_config(causal_lm, config)
    denoiser = SharedDenoiser(causal_lm, settings, config.mask_token_id, config.order)
    return TwoTower(ContextTower(causal_lm, denoiser.resting), denoiser, config)
