"""What a step is measured by beside its loss; nothing here touches the tensors that the step computes with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from actors.training.ar_loss import CausalTally
from actors.training.clock import OTHER, PHASES, StepClock, watch_collectives
from actors.training.flops import Flops, device_peak
from actors.training.method import Batch
from actors.training.noise import LEVELS, NoiseTally, mean_by_level
from actors.training.ranks import Ranks
from actors.training.settings import TrainSettings
from model.layout import TrainingBatch


class Measures:
    """One worker's clock, tallies and operations count; every rank calls the same methods at the same steps."""

    def __init__(self, settings: TrainSettings) -> None:
        self._noise = NoiseTally()
        self._causal = CausalTally() if settings.ar_loss_weight else None
        self._clock = StepClock(settings.device)
        self._dtype = settings.dtype
        self._flops: Flops | None = None
        self._peak: float | None = None

    def count(self, flops: Flops | None) -> None:
        """The model is loaded: remember what a token costs."""
        self._flops = flops

    def attach(self, device: torch.device) -> None:
        """DeepSpeed has started: time its collectives from now on."""
        from deepspeed.comm import comm

        self._peak = device_peak(device, self._dtype)
        comm.cdb = watch_collectives(comm.cdb, self._clock)

    def observe(self, batch: Batch, losses: Tensor) -> None:
        """Shown every forward's cross-entropy by prediction, [N]."""
        self._noise.add(batch, losses)
        if self._causal is not None and isinstance(batch, TrainingBatch):
            self._causal.add(batch, losses)

    def begin(self) -> None:
        """A step begins."""
        self._noise.clear()
        if self._causal is not None:
            self._causal.clear()
        self._clock.begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step; name: one of PHASES."""
        return self._clock.phase(name)

    def communicating(self) -> AbstractContextManager[None]:
        """Around every exchange between the ranks."""
        return self._clock.phase("communication")

    def end(self, ranks: Ranks, batches: Sequence[Batch], seconds: float, scored_tokens: int) -> dict[str, Any]:
        """The step's figures for a StepRecord, the same on every rank. seconds: that the step took here;
        scored_tokens: what the loss of the global batch is divided by."""
        spent = self._clock.end()
        operations = self._flops.step(batches) if self._flops is not None else 0.0
        names = (*PHASES, OTHER)
        causal = self._causal.value if self._causal is not None else 0.0
        mine = [*self._noise.values, *(spent[name] for name in names), causal, operations]
        *values, causal, operations = ranks.total_floats(mine)
        times = dict(zip(names, values[2 * LEVELS :], strict=True))
        return {
            "loss_by_noise": mean_by_level(values[: 2 * LEVELS]),
            "ar_loss": None if self._causal is None else causal / max(scored_tokens, 1),
            "time_shares": {name: value / max(sum(times.values()), 1e-9) for name, value in times.items()},
            "mfu": self._utilisation(operations / ranks.world, seconds),
        }

    def _utilisation(self, operations: float, seconds: float) -> float | None:
        return operations / seconds / self._peak if self._peak is not None and operations else None
