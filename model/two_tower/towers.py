"""The two towers: a frozen reader and a trained writer, both made of one pretrained AR model.

    context tower   causal, clean tokens, no gradients; owns the only prefix cache
    denoiser tower  a clone with time conditioning; reads one noisy block, both directions, over the context's layers

Any Hugging Face decoder that takes the project's attention will do: dense, experts, hybrids with recurrent layers.
Source: TwoTower (arXiv 2606.26493).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from model.attention import NAME, AttentionPlan
from model.cross_entropy import LossHead
from model.errors import UserError
from model.masks import Tokens
from model.objective import logit_cap, logit_factor
from model.recurrence import Folded, unclamp_time_steps
from model.two_tower.boundaries import recurrent_mixers
from model.two_tower.config import LORA, TwoTowerConfig
from model.two_tower.modulation import Modulation, TimeConditioning, check_hooks
from model.two_tower.prefix import recording
from model.two_tower.recurrent import StateCache, States
from model.two_tower.sublayers import decoder_layers, sublayers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ContextTower:
    """The frozen reader. Not a module: no optimiser, no gradient partition and no checkpoint ever holds it."""

    def __init__(
        self, causal_lm: PreTrainedModel, alone: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """alone: keeps a denoiser that shares these weights still while this tower reads."""
        require_plan_attention(causal_lm)
        unclamp_time_steps(causal_lm)
        self.alone = alone
        self.causal_lm = causal_lm.eval().requires_grad_(False)
        self.layers = len(decoder_layers(causal_lm))
        self.recurrent = bool(recurrent_mixers(causal_lm))

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    def cache(self, seeds: States, tokens: int) -> StateCache | None:
        """The state cache of a forward of so many tokens a row, None without recurrent layers."""
        return StateCache(self.layers, seeds, one_token=tokens == 1) if self.recurrent else None

    def read(
        self, ids: Tensor, positions: Tensor, plan: AttentionPlan, cache: StateCache | None, keep: Tensor
    ) -> Tensor:
        """Logits [M, V] where `keep`, bool [R, n]; ids and positions int64 [R, n]; plan: for [1, R * n]."""
        with torch.no_grad(), self.alone():
            logits: Tensor = run_tower(self.causal_lm, ids, positions, plan, cache, keep).logits
        return logits


class Denoised(NamedTuple):
    """logits [M, V]; balance: the experts' load-balancing loss of this forward, None unless asked for."""

    logits: Tensor
    balance: Tensor | None


class Scored(NamedTuple):
    """loss: the sum of cross-entropies (nats), to be differentiated once; losses [M]: each of them, detached."""

    loss: Tensor
    losses: Tensor


class Denoiser(nn.Module):
    """The writer: a causal LM, its time conditioning, and the hooks between them.

    `causal_lm` keeps its parameter names, so it saves as an ordinary checkpoint; `time` is a small file beside it.
    """

    causal_lm: PreTrainedModel

    def __init__(self, causal_lm: PreTrainedModel, order: str = "norm_first") -> None:
        """Raises UserError for a model whose layers are arranged in a way that is not known."""
        super().__init__()
        require_plan_attention(causal_lm)
        unclamp_time_steps(causal_lm)
        sublayers = sublayers_of(causal_lm)
        self._hold(causal_lm)
        self.layers = len(decoder_layers(causal_lm))
        self.recurrent = bool(recurrent_mixers(causal_lm))
        learned = getattr(causal_lm.get_decoder(), "wpe", None)
        self.positions = None if learned is None else int(learned.num_embeddings)
        self.time = TimeConditioning(
            int(causal_lm.config.get_text_config().hidden_size), [sublayer.slot for sublayer in sublayers]
        ).to(causal_lm.device, causal_lm.dtype)
        self.modulation = Modulation(sublayers, order)
        check_hooks(causal_lm, self.modulation, len(sublayers), four_tokens(causal_lm.device))
        for layer in decoder_layers(causal_lm):
            layer.__dict__["_can_checkpoint_with_cache"] = True  # its cache is only read

    def _hold(self, causal_lm: PreTrainedModel) -> None:
        self.causal_lm = causal_lm

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    @property
    def vocab_size(self) -> int:
        """Tokens that the logits know."""
        return int(self.causal_lm.get_input_embeddings().num_embeddings)

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
        """Logits [M, V] where `keep`, bool [N, S], of N noisy blocks; ids and positions int64 [N, S].

        times [T] in [0, 1], time_index int64 [N]: which of them a block has. plan: for [1, N * S]. seeds: the context
        tower's states before each block, moved here if they lie elsewhere. balance: compute the experts' balance too;
        raises UserError for a model whose modeling code has no such loss.
        """
        self.modulation.set(self.time(times), time_index.to(self.device))
        positions, cache = self._reach(positions), self._cache(seeds, ids.shape[1])
        options = {"output_router_logits": True} if balance else {}
        out = run_tower(self.causal_lm, ids, positions, plan, cache, keep, **options)
        loss = getattr(out, "aux_loss", None)
        if balance and not isinstance(loss, Tensor):
            raise UserError(f"{type(self.causal_lm).__name__} has no load-balancing loss: set its weight to 0.")
        return Denoised(out.logits, loss if balance else None)

    @property
    def scores(self) -> bool:
        """Whether `score` can do without logits: where the head is linear."""
        return isinstance(self.causal_lm.get_output_embeddings(), nn.Linear)

    def prepare_to_score(self) -> None:
        """Give the model a head that can be asked for the loss; it owns the same weights."""
        self.causal_lm.set_output_embeddings(LossHead.in_place_of(self.causal_lm.get_output_embeddings()))

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
        """Cross-entropy of targets int64 [M] at the kept places, without their logits (see `model.cross_entropy`); the
        rest as in `forward`. Only where `scores`, after `prepare_to_score`."""
        self.modulation.set(self.time(times), time_index.to(self.device))
        out = self.causal_lm.get_decoder()(
            input_ids=ids.to(self.device),
            position_ids=self._reach(positions).to(self.device),
            cache=self._cache(seeds, ids.shape[1]),
            use_cache=False,
            attention_plan=Folded(plan),
        )
        states = out.last_hidden_state[keep.to(self.device)]
        factor = logit_factor(self.causal_lm)
        states = states if factor == 1 else states * factor
        head, softcap = self.causal_lm.get_output_embeddings(), logit_cap(self.causal_lm)
        return Scored(*head(states, targets.to(self.device), None, softcap))

    def _cache(self, seeds: States, tokens: int) -> StateCache | None:
        if not self.recurrent:
            return None
        moved = {layer: state.to(self.device) for layer, state in seeds.items()}
        return StateCache(self.layers, moved, one_token=tokens == 1)

    def _reach(self, positions: Tensor) -> Tensor:
        """A canvas may reach past the last position that was learned."""
        return positions if self.positions is None else positions.clamp(max=self.positions - 1)


@dataclass
class TwoTower:
    """A model: both towers, or the context tower alone (AR mode and likelihoods need no more)."""

    context: ContextTower
    denoiser: Denoiser | None
    config: TwoTowerConfig

    def writer(self) -> Denoiser:
        """The denoiser. Raises UserError where the model was loaded without one."""
        if self.denoiser is None:
            raise UserError("This TwoTower model was loaded without its denoiser: only AR mode and likelihoods work.")
        return self.denoiser


def build_two_tower(causal_lm: PreTrainedModel, config: TwoTowerConfig) -> TwoTower:
    """Both towers from one pretrained model, which becomes the context tower; the denoiser is a copy of it.

    The copy equals the model bit for bit at every time. Move it with `.to(device)` to keep the towers on two devices.
    Raises UserError for a mask token that the model does not know, or a block larger than its attention's reach.
    """
    clone = copy.deepcopy(causal_lm)  # its own weights and its own config, which a forward may write to
    if config.mask_token_id == causal_lm.get_input_embeddings().num_embeddings:
        add_token(clone)
    check_config(clone, config)
    denoiser = Denoiser(clone.requires_grad_(True), config.order)
    return TwoTower(ContextTower(causal_lm), denoiser, config)


def add_token(causal_lm: PreTrainedModel) -> None:
    """One token more, with the mean of all as its embedding and its row of the head: the mask of a full vocabulary.

    Only the denoiser gets it; the context tower never meets a mask.
    """
    rows = causal_lm.get_input_embeddings().num_embeddings
    causal_lm.resize_token_embeddings(rows + 1, mean_resizing=False)
    with torch.no_grad():
        for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()):
            module.weight[rows] = module.weight[:rows].mean(0)


def check_config(denoiser: PreTrainedModel, config: TwoTowerConfig) -> None:
    """Raises UserError where config and denoiser do not fit."""
    rows = denoiser.get_input_embeddings().num_embeddings
    more = config.denoiser == LORA  # an adapter brings its mask's embedding along
    if config.mask_token_id >= rows + more:
        raise UserError(f"mask_token_id {config.mask_token_id} is outside the model's vocabulary of {rows}.")
    window = getattr(denoiser.config.get_text_config(), "sliding_window", None)
    if window is not None and window < config.block_size:
        raise UserError(f"block_size {config.block_size} is larger than the model's sliding window of {window}.")


def require_plan_attention(causal_lm: PreTrainedModel) -> None:
    """Raises UserError for a model that was loaded with another attention than the project's."""
    if causal_lm.config._attn_implementation != NAME:
        raise UserError(
            f"A tower needs attn_implementation={NAME!r}, not {causal_lm.config._attn_implementation!r}: "
            "load it with model.backbone.load_backbone."
        )


def run_tower(
    causal_lm: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    plan: AttentionPlan,
    cache: StateCache | None,
    keep: Tensor,
    **options: Any,
) -> Any:
    """One forward of rows [R, n] under a plan for [1, R * n]: the model's output, its own head at the kept places."""
    device = causal_lm.device
    return causal_lm(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        cache=cache,
        use_cache=False,
        attention_plan=Folded(plan),
        logits_to_keep=keep.to(device),
        **options,
    )


def four_tokens(device: torch.device) -> Any:
    """A causal plan of one row of four tokens."""
    positions = torch.arange(4, device=device)
    plan = recording(torch.zeros_like(positions), positions)
    assert isinstance(plan.tokens, Tokens)
    return Folded(plan)
