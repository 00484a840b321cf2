"""Layers that carry a state from token to token (Mamba-2, linear attention, short convolutions), in training.

Attention keeps the documents of a packed row apart with a mask; a recurrent layer would carry the state of one into
the next. So a model with such layers reads one document a row, filled up at the end, and attends to the rows as to one
sequence. Blocks that are read in both directions are nothing for a recurrent layer: that is what TwoTower is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.attention import AttentionPlan, CappingPlan, StreamPlan
from model.errors import UserError
from model.layout import TrainingBatch
from model.masks import CLEAN, Tokens, causal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARKS = ("conv_kernel_size", "conv1d", "conv_1d")  # what mixers with a state call their convolution in transformers


def is_recurrent(causal_lm: PreTrainedModel) -> bool:
    """Whether any layer carries a state from token to token."""
    return any(hasattr(module, mark) for module in causal_lm.modules() for mark in MARKS)


def unclamp_time_steps(causal_lm: PreTrainedModel) -> None:
    """Nemotron-H in transformers clamps Mamba's time step from below in forwards of many tokens only; the published
    code never does. Without the clamp both forms of a layer agree, and tokens do not depend on how they are grouped."""
    if causal_lm.config.model_type == "nemotron_h":
        for module in causal_lm.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, float("inf"))


@dataclass(frozen=True)
class Folded:
    """A plan of one sequence, for a batch of rows: query [R, Hq, n, D] of R rows of n tokens."""

    plan: AttentionPlan

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        out = self.plan.attend(layer, _joined(query), _joined(key), _joined(value), scale, sliding_window)
        return _rows(out, query.shape[0])

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        if not isinstance(self.plan, CappingPlan):
            raise UserError("This model caps its attention scores, which the plan of this forward cannot do.")
        out = self.plan.attend_capped(layer, _joined(query), _joined(key), _joined(value), scale, window, softcap)
        return _rows(out, query.shape[0])


def _joined(x: Tensor) -> Tensor:
    """[R, H, n, D] as [1, H, R * n, D]."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _rows(x: Tensor, count: int) -> Tensor:
    """The reverse."""
    return x[0].unflatten(1, (count, -1)).transpose(0, 1)


def one_document_a_row(batch: TrainingBatch) -> TrainingBatch:
    """A causal batch of one sequence [1, T] as rows [D, n]: the same predictions, each document beginning its own row.

    n is the longest document's; the ends of the others are filled with padding that nothing looks at. Raises UserError
    for a batch with noisy blocks.
    """
    plan, size = batch.plan, batch.plan.block_size
    if plan.clean != plan.length or plan.predicate is not causal:
        raise UserError(
            "A model with recurrent layers (Mamba, linear attention) cannot read a block in both directions: train it "
            "with --objective next_token, or as TwoTower."
        )
    documents = plan.tokens.document[::size]
    device = documents.device
    _, row, count = torch.unique_consecutive(documents, return_inverse=True, return_counts=True)
    width = int(count.max())
    place = row * width + torch.arange(len(row), device=device) - (count.cumsum(0) - count)[row]

    def moved(x: Tensor, filler: Tensor) -> Tensor:
        """Blocks of x [T], each at its new place among the filler's, [D * n]."""
        return filler.view(-1, size).index_copy(0, place, x.view(-1, size)).flatten()

    total = len(count) * width * size
    zeros = torch.zeros(total, dtype=torch.long, device=device)
    nobody = int(documents.min()) - 1 - torch.arange(total // size, device=device).repeat_interleave(size)
    tokens = Tokens(
        torch.full_like(zeros, CLEAN),
        moved(plan.tokens.document, nobody),
        moved(plan.tokens.block, zeros),
        moved(plan.tokens.position, zeros),
    )
    return replace(
        batch,
        input_ids=moved(batch.input_ids[0], zeros).view(len(count), -1),
        position_ids=moved(batch.position_ids[0], zeros).view(len(count), -1),
        plan=StreamPlan(tokens, total, size, causal, plan.last_layer),
        slots=place[batch.slots // size] * size + batch.slots % size,
    )
