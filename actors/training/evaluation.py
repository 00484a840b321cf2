"""How well the model of the moment does on rows it never trains on: held-out loss and a few written samples.

Every rank takes part, because under ZeRO-3 every forward and every gathered weight is a collective. Rows go one at a
time to the ranks in turn; their losses are put in order before they are added, so the sum does not depend on the number
of workers. Masks are fixed (the run's seed, the row's number), both views count, nothing random is drawn: the steps
after an evaluation are those of a run without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from actors.training.lora import Adapter
from actors.training.ranks import Ranks
from actors.training.rows import PackedRows, RowFormat
from actors.training.samples import prompts_of, write_samples
from actors.training.settings import TrainSettings
from actors.training.zero import gather_weights
from model.backbone import Backbone
from model.errors import UserError
from model.layout import RowBatch
from model.objective import HELD_OUT_EPOCH, evaluating, make_objective, to_device

ALWAYS = {"complementary_masks": True, "ar_loss_weight": 0.0}  # both views and nothing else, whatever is trained


class Evaluation:
    """The held-out rows of a run. Every rank constructs it and calls its methods at the same steps.

    form: of the training rows. Raises UserError where the held-out rows were packed otherwise, or hold no supervised
    token.
    """

    def __init__(
        self, training: TrainSettings, form: RowFormat, backbone: Backbone, adapter: Adapter | None, ranks: Ranks
    ) -> None:
        self.settings = settings = training.evaluation
        self._backbone, self._adapter, self._ranks = backbone, adapter, ranks
        if not settings.on:
            return
        self._objective = make_objective(
            training.objective,
            block_size=form.block_size,
            mask_token_id=form.mask_token_id,
            seed=training.seed,
            layers=backbone.layers,
            **{**training.objective_options, **ALWAYS},
        )
        packed = PackedRows(settings.rows)
        if packed.format != form:
            raise UserError(f"{settings.rows} and the training rows were packed differently: prepare them in one run.")
        self._rows = packed.rows(range(min(len(packed), settings.most_rows)))
        if not self._rows.supervised_tokens:
            raise UserError(f"The rows in {settings.rows} hold no supervised token: check that the data has answers.")
        self._prompts = prompts_of(self._rows, settings.samples, backbone.context_length - settings.sample_tokens)

    def loss(self, engine: Any) -> float:
        """Mean nats per supervised token of the held-out rows, on every rank. engine: DeepSpeed's."""
        count, world = len(self._rows.input_ids), self._ranks.world
        losses = [0.0] * count
        with evaluating(engine.module):
            for first in range(0, count, world):
                mine = first + self._ranks.rank
                loss = self._row_loss(engine, min(mine, count - 1))  # a rank without a row must run a forward too
                if mine < count:
                    losses[mine] = loss
        return sum(self._ranks.total_floats(losses)) / self._rows.supervised_tokens

    def _row_loss(self, engine: Any, row: int) -> float:
        part = slice(row, row + 1)
        rows = self._rows
        one = RowBatch(rows.input_ids[part], rows.labels[part], rows.document_ids[part], rows.position_ids[part])
        return float(engine(to_device(self._objective.batch(one, [row], HELD_OUT_EPOCH), engine.device)))

    def samples(self, step: int) -> Sequence[dict[str, Any]]:
        """Lines of samples.jsonl on rank 0, nothing on the others, which help to gather the weights and wait."""
        if not self._prompts:
            return ()
        weights = gather_weights(self._backbone.model, self._ranks)
        lines: list[dict[str, Any]] = []
        if self._ranks.first:
            weights = self._adapter.merged(weights) if self._adapter is not None else weights
            with torch.no_grad():
                lines = write_samples(self._backbone, weights, self._prompts, self.settings.sample_tokens)
        self._ranks.barrier()
        return [{"step": step, "time": time.time(), **line} for line in lines]
