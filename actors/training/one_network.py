"""One network is trained: block diffusion, the next-token control, or a low-rank adapter in either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.training.consolidate import describe_lora
from actors.training.flops import FlopCount
from actors.training.lora import Adapter, publish_adapter
from actors.training.method import Observer
from actors.training.ranks import Ranks
from actors.training.rows import RowFormat
from actors.training.samples import Prompt, write_samples
from actors.training.settings import TrainSettings
from actors.training.trained_model import publish_model
from actors.training.zero import gather_weights
from model.backbone import DTYPES, Backbone, load_backbone, make_block_diffusion, save_description
from model.errors import UserError
from model.layout import TrainingBatch
from model.objective import Objective, TrainingModel, make_objective, to_device
from model.sources import fetch_model

MEASURED = {"complementary_masks": True, "ar_loss_weight": 0.0}  # both views and nothing else, whatever is trained


class OneNetwork:
    """A `Method`."""

    def __init__(self, settings: TrainSettings, form: RowFormat, observe: Observer) -> None:
        """form: of the training rows. Draws from torch's generator: a new mask token's embedding, an adapter.

        Raises UserError where base model, rows and settings do not go together.
        """
        self._settings, self._form = settings, form
        self._backbone = self._base()
        if settings.activation_checkpointing:
            self._backbone.model.activation_checkpointing_enable()
        self._adapter = Adapter.into(self._backbone, settings.lora) if settings.lora else None
        self._objective = self._made(settings.objective_options)
        self.held_out = self._made({**settings.objective_options, **MEASURED})
        self.module = TrainingModel(self._backbone.model, observe).train()

    @property
    def context_length(self) -> int:
        return self._backbone.context_length

    def _base(self) -> Backbone:
        """The base model with a mask token; a model for the control goes without the block-diffusion entry."""
        settings, form = self._settings, self._form
        backbone = load_backbone(fetch_model(settings.model), dtype=DTYPES[settings.dtype])
        embeddings = _embeddings(backbone)
        adapted = make_block_diffusion(backbone, block_size=form.block_size, trained_context_length=form.context_length)
        assert adapted.block_diffusion is not None
        check_mask_token(adapted.name, adapted.block_diffusion.mask_token_id, form, settings.rows)
        if settings.lora and _embeddings(adapted) != embeddings:
            raise UserError(
                f"{settings.model} has no spare token for the mask and an adapter cannot carry a new one: "
                "leave --train.lora out, or start from a model that was adapted already."
            )
        return adapted if settings.objective == "block_diffusion" else replace(adapted, block_diffusion=None)

    def _made(self, options: dict[str, Any]) -> Objective:
        return make_objective(
            self._settings.objective,
            block_size=self._form.block_size,
            mask_token_id=self._form.mask_token_id,
            seed=self._settings.seed,
            layers=self._backbone.layers,
            **options,
        )

    def objective_at(self, step: int) -> Objective:
        return self._objective

    def flops(self) -> FlopCount | None:
        return FlopCount.of(self._backbone.model)

    def settle(self, device: torch.device) -> None:
        """DeepSpeed holds all of it."""

    def moved(self, batch: TrainingBatch, device: torch.device) -> TrainingBatch:
        return to_device(batch, device)

    def loss(self, engine: Any, batch: TrainingBatch) -> Tensor:
        loss: Tensor = engine(batch)
        return loss

    def measure(self, engine: Any, batch: TrainingBatch) -> tuple[Tensor, float]:
        return self.loss(engine, batch), 0.0

    def write_samples(self, ranks: Ranks, prompts: Sequence[Prompt], max_tokens: int) -> list[dict[str, Any]]:
        weights = gather_weights(self._backbone.model, ranks)
        if not ranks.first:
            return []
        weights = self._adapter.merged(weights) if self._adapter is not None else weights
        with torch.no_grad():
            return write_samples(self._backbone, weights, prompts, max_tokens)

    def describe(self, folder: Path) -> None:
        save_description(self._backbone, folder)
        if lora := self._settings.lora:
            describe_lora(folder, rank=lora.rank, alpha=lora.alpha)

    def publish(self, ranks: Ranks, output: str, guard: Callable[[], None]) -> None:
        weights = gather_weights(self._backbone.model, ranks, trained_only=self._adapter is not None)
        if not ranks.first:
            return
        if self._adapter is None:
            publish_model(self._backbone, weights, output, guard)
        else:
            publish_adapter(self._adapter, weights, self._backbone, self._base(), output, guard)


def _embeddings(backbone: Backbone) -> int:
    return int(backbone.model.get_input_embeddings().num_embeddings)


def check_mask_token(name: str, mask_token_id: int, form: RowFormat, rows: str) -> None:
    """Raises UserError where the rows are padded with another token than the model's mask."""
    if mask_token_id != form.mask_token_id:
        raise UserError(
            f"The rows in {rows} are padded with token {form.mask_token_id} and {name} has the mask token "
            f"{mask_token_id}: prepare them with --model {name}."
        )
