"""The next-token loss that --train.ar_loss_weight adds, apart from the blocks' loss: how well the model still writes
token by token. The sum of a step is over all its micro-batches and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from model.layout import TrainingBatch
from model.masks import CAUSAL


class CausalTally:
    """The sum of cross-entropy (nats, float64) of the predictions of the causal stream; its weight is not in it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def clear(self) -> None:
        """A step begins."""
        self._sum = None

    def add(self, batch: TrainingBatch, losses: Tensor) -> None:
        """losses: cross-entropy of each prediction of the batch, [N]."""
        slots, weights = batch.slots.to(losses.device), batch.weights.to(losses.device)
        counted = (batch.plan.tokens.stream.to(losses.device)[slots] == CAUSAL) & (weights > 0)
        found = torch.where(counted, losses, 0).sum(dtype=torch.float64)
        self._sum = found if self._sum is None else self._sum + found

    @property
    def value(self) -> float:
        """The sum of this rank."""
        return 0.0 if self._sum is None else self._sum.item()
