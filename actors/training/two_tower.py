"""Two towers: a frozen reader beside a writer that DeepSpeed trains (METHOD: TwoTower).

Each worker holds the whole context tower, or a share of it: no optimizer, no gradient and no checkpoint knows of it.
What DeepSpeed trains is the denoiser with its time conditioning (`TwoTowerTraining`), at any ZeRO stage. A step reads
the clean rows once without gradients, then runs the denoiser over all noisy blocks. With `denoiser: lora` the denoiser
is an adapter over the context tower's weights: DeepSpeed then holds the adapter and the time conditioning alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.training.flops import FlopCount, TwoTowerFlops
from actors.training.method import Observer
from actors.training.one_network import check_mask_token
from actors.training.ranks import Ranks
from actors.training.rows import RowFormat
from actors.training.samples import Prompt, decodable, write_two_tower_samples
from actors.training.settings import TrainSettings, TwoTowerSettings
from actors.training.trained_model import FOLDER, publish_folder, same_weight
from actors.training.zero import gather_weights, share_out
from model.backbone import DTYPES, load_backbone, save_description
from model.errors import JobError, UserError
from model.sources import fetch_model
from model.two_tower.adapter import default_settings
from model.two_tower.config import LORA
from model.two_tower.folder import TwoTowerModel, load_two_tower, make_two_tower, save_config, save_two_tower
from model.two_tower.layout import TwoTowerBatch
from model.two_tower.shared import SharedDenoiser, build_shared_towers
from model.two_tower.towers import ContextTower, Denoiser, TwoTower, check_config
from model.two_tower.training import TwoTowerObjective, TwoTowerTraining, read_context, read_measured

NETWORK, TIME = "causal_lm.", "time."  # the parts of a denoiser, in the names of its weights


class TwoTowers:
    """A `Method`."""

    def __init__(self, settings: TrainSettings, form: RowFormat, observe: Observer) -> None:
        """form: of the training rows. Draws from torch's generator: the time conditioning.

        Raises UserError where base model, rows and settings do not go together.
        """
        assert settings.two_tower is not None
        self._settings, self._told, self._form = settings, settings.two_tower, form
        self._model = make_towers(settings, self._told, form)
        self.module = trained_module(self._model, settings, self._told, observe)
        self.held_out = self._objective(self._told.block_size).measured

    @property
    def context_length(self) -> int:
        return self._model.context.context_length

    def _objective(self, block_size: int) -> TwoTowerObjective:
        towers = self._model.towers
        return TwoTowerObjective(
            block_size,
            towers.config.mask_token_id,
            self._settings.seed,
            document_rows=towers.context.recurrent,
            token_shift=towers.config.token_shift,
            complementary_masks=self._told.complementary_masks,
        )

    def objective_at(self, step: int) -> TwoTowerObjective:
        return self._objective(self._told.block_size_at(step))

    def flops(self) -> TwoTowerFlops | None:
        count = FlopCount.of(self._model.towers.writer().causal_lm)
        return None if count is None else TwoTowerFlops(count)

    def settle(self, device: torch.device) -> None:
        causal_lm = self._model.towers.context.causal_lm
        if self._sharded:
            self._kept = share_out(causal_lm, self._settings)
        else:
            causal_lm.to(device)

    @property
    def _sharded(self) -> bool:
        return self._told.context_weights == "sharded"

    def moved(self, batch: TwoTowerBatch, device: torch.device) -> TwoTowerBatch:
        return batch.to(device)

    def loss(self, engine: Any, batch: TwoTowerBatch) -> Tensor:
        loss: Tensor = engine(batch, read_context(self._model.towers.context, batch))
        return loss

    def measure(self, engine: Any, batch: TwoTowerBatch) -> tuple[Tensor, float]:
        states, more = read_measured(self._model.towers, batch)
        return engine(batch, states), more

    def write_samples(self, ranks: Ranks, prompts: Sequence[Prompt], max_tokens: int) -> list[dict[str, Any]]:
        whole = self._whole(ranks)
        return [] if whole is None else write_two_tower_samples(whole, prompts, max_tokens)

    def describe(self, folder: Path) -> None:
        save_description(replace(self._model.context, model=self._model.towers.writer().causal_lm), folder)
        save_config(self._model.towers.config, folder)

    def publish(self, ranks: Ranks, output: str, guard: Callable[[], None]) -> None:
        whole = self._whole(ranks)
        if whole is not None:
            publish_folder(output, FOLDER, partial(_write, whole, self._told.context == "copy"), guard)

    def _whole(self, ranks: Ranks) -> TwoTowerModel | None:
        """The model with the weights of the moment, on rank 0; nothing on the others, which help to gather them."""
        towers, backbone = self._model.towers, self._model.context
        weights = gather_weights(towers.writer(), ranks)
        context = gather_weights(backbone.model, ranks) if self._sharded else {}
        if not ranks.first:
            return None
        if self._sharded:
            backbone = replace(backbone, model=decodable(backbone.model, context))
        if isinstance(writer := towers.writer(), SharedDenoiser):
            return _rebuilt_shared(writer, weights, TwoTowerModel(towers, backbone))
        return TwoTowerModel(
            TwoTower(ContextTower(backbone.model), _rebuilt(towers.writer(), weights), towers.config), backbone
        )


def make_towers(settings: TrainSettings, told: TwoTowerSettings, form: RowFormat) -> TwoTowerModel:
    """Both towers from the base model, on the CPU."""
    backbone = load_backbone(fetch_model(settings.model), dtype=DTYPES[settings.dtype])
    lora = (settings.lora or default_settings()) if told.denoiser == LORA else None
    model = make_two_tower(
        replace(backbone, name=settings.model), block_size=told.block_size, lora=lora, token_shift=told.token_shift
    )
    config = replace(model.towers.config, trained_context_length=form.context_length)
    if told.context_weights == "sharded" and model.towers.context.recurrent:
        raise UserError(
            f"{settings.model} has recurrent layers, which run again between blocks and cannot be gathered for that: "
            "leave --two_tower.context_weights sharded out."
        )
    check_mask_token(settings.model, config.mask_token_id, form, settings.rows)
    if told.first_block_size is not None:
        check_config(model.towers.writer().causal_lm, replace(config, block_size=told.first_block_size))
    return replace(model, towers=replace(model.towers, config=config))


def trained_module(
    model: TwoTowerModel, settings: TrainSettings, told: TwoTowerSettings, observe: Observer
) -> TwoTowerTraining:
    """What DeepSpeed wraps: the denoiser and its loss, everything in it trained."""
    denoiser = model.towers.writer()
    if settings.activation_checkpointing:
        denoiser.causal_lm.activation_checkpointing_enable()
    return TwoTowerTraining(denoiser, balance=told.balance_weight, observe=observe).train()


def _rebuilt(denoiser: Denoiser, weights: Mapping[str, Tensor]) -> Denoiser:
    """The denoiser again with whole weights by name, free of whatever DeepSpeed hung on it."""
    parts = {part: _part(weights, part) for part in (NETWORK, TIME)}
    fresh = Denoiser(decodable(denoiser.causal_lm, parts[NETWORK]), denoiser.modulation.order)
    fresh.time.load_state_dict(parts[TIME])
    return fresh.eval()


def _rebuilt_shared(denoiser: SharedDenoiser, weights: Mapping[str, Tensor], model: TwoTowerModel) -> TwoTowerModel:
    """The model again with whole weights by name in its adapter and its time conditioning, over the same base."""
    base = {name: parameter.detach() for name, parameter in denoiser.causal_lm.named_parameters()}
    causal_lm = decodable(denoiser.causal_lm, base)
    towers = build_shared_towers(causal_lm, model.towers.config, denoiser.adapter.settings)
    towers.writer().eval().load_state_dict(weights)
    return TwoTowerModel(towers, replace(model.context, model=causal_lm))


def _part(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(part): tensor for name, tensor in weights.items() if name.startswith(part)}


def _write(model: TwoTowerModel, copy_context: bool, folder: Path) -> None:
    """Raises JobError where what was written does not load as what was trained."""
    save_two_tower(model, folder, context=copy_context)
    writer = model.towers.writer()
    loaded = dict(load_two_tower(folder, dtype=writer.causal_lm.dtype).towers.writer().named_parameters())
    for name, parameter in writer.named_parameters():
        if name not in loaded or not same_weight(loaded[name], parameter):
            raise JobError(f"The model written to {folder} does not load as it was trained ({name} differs).")
