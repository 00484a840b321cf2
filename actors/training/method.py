"""What a run trains, as the worker's loop sees it: one network (`one_network`), or two towers (`two_tower`).

The loop knows steps, ranks, DeepSpeed, checkpoints and curves; a method knows how its model is made, what a batch's
loss is, and what is written at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from actors.training.flops import Flops
from actors.training.ranks import Ranks
from actors.training.samples import Prompt
from model.layout import RowBatch, TrainingBatch
from model.two_tower.layout import TwoTowerBatch

Batch = TrainingBatch | TwoTowerBatch
Observer = Callable[[Any, Tensor], None]


class BatchMaker(Protocol):
    """Packed rows to a batch for one forward. Depends on (seed, sample id, epoch), not on topology."""

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> Batch: ...

    def lengths(self, rows: RowBatch) -> Tensor:
        """Tokens that the network runs on for each row, int64 [B]: what a micro-batch of these rows costs."""
        ...


class Method(Protocol):
    """Every rank constructs it and calls the same methods at the same steps.

    module: what DeepSpeed wraps; its attribute `observe`, an Observer, is shown every forward's losses, [N].
    context_length: the longest sequence that the base model was made for, in tokens.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def context_length(self) -> int: ...

    @property
    def held_out(self) -> BatchMaker:
        """What evaluations measure: nothing else than the objective, whatever is added to it in training."""
        ...

    def objective_at(self, step: int) -> BatchMaker:
        """Of a 0-based step."""
        ...

    def flops(self) -> Flops | None:
        """What a step's batches cost, while all parameters are whole; None where that is not known."""
        ...

    def settle(self, device: torch.device) -> None:
        """DeepSpeed has started on this device: what it does not hold goes there too."""
        ...

    def moved(self, batch: Any, device: torch.device) -> Batch:
        """The batch with its tensors on a device."""
        ...

    def loss(self, engine: Any, batch: Any) -> Tensor:
        """One forward: the sum of losses over the batch. engine: DeepSpeed's."""
        ...

    def measure(self, engine: Any, batch: Any) -> tuple[Tensor, float]:
        """`loss` of a batch of `held_out`, and what the bound of its likelihood has beside the observed losses."""
        ...

    def write_samples(self, ranks: Ranks, prompts: Sequence[Prompt], max_tokens: int) -> list[dict[str, Any]]:
        """Continue the prompts with the weights of the moment: lines on rank 0, nothing on the others, which help to
        gather the weights."""
        ...

    def describe(self, folder: Path) -> None:
        """Write what a checkpoint's shards are the weights of."""
        ...

    def publish(self, ranks: Ranks, output: str, guard: Callable[[], None]) -> None:
        """Write the result. guard: called before a name is given; raises when the run has lost its output."""
        ...
