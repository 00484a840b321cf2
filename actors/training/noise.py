"""The loss by noise level: what a block's mask ratio does to how well its tokens are predicted.

With complementary views every supervised token is masked in one of two; its level is its block's mask ratio there, t
in view 1 and 1 - t in view 2. With two towers the level is the time t of the token's document. Levels are sorted into
buckets of equal width. The sums of a step are over all its micro-batches and all ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.training.method import Batch

LEVELS = 5


class NoiseTally:
    """Sums of cross-entropy (nats, float64) and counts of predictions by noise level."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def clear(self) -> None:
        """A step begins."""
        self._sums = None

    def add(self, batch: Batch, losses: Tensor) -> None:
        """losses: cross-entropy of each prediction of the batch, [N]. Ignored where the batch tells no noise."""
        if batch.noise is None:
            return
        noise, weights = batch.noise.to(losses.device), batch.weights.to(losses.device)
        level = (noise.nan_to_num(0.0) * LEVELS).long().clamp_(0, LEVELS - 1)
        counted = (weights * ~noise.isnan()).double()
        if self._sums is None:
            self._sums = torch.zeros(2, LEVELS, dtype=torch.float64, device=losses.device)
        self._sums[0].index_add_(0, level, losses.double() * counted)
        self._sums[1].index_add_(0, level, counted)

    @property
    def values(self) -> list[float]:
        """The sums of this rank by level, then the counts by level."""
        return [0.0] * (2 * LEVELS) if self._sums is None else self._sums.flatten().tolist()


def mean_by_level(values: list[float]) -> list[float | None] | None:
    """The mean loss of each level, from `NoiseTally.values` of all ranks together; None where nothing was counted.

    A level's mean is None where it was not met, or is no finite number.
    """
    sums, counts = values[:LEVELS], values[LEVELS:]
    if not any(counts):
        return None
    means = (one / count if count else math.nan for one, count in zip(sums, counts, strict=True))
    return [mean if math.isfinite(mean) else None for mean in means]


def level_name(level: int) -> str:
    """`0.2-0.4`: the mask ratios of a level."""
    return f"{level / LEVELS:g}-{(level + 1) / LEVELS:g}"
