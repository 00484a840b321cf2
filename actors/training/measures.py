"""What a step is measured by beside its loss; nothing here touches the tensors that the step computes with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from actors.training.clock import OTHER, PHASES, StepClock, watch_collectives
from actors.training.flops import Flops, device_peak
from actors.training.method import Batch
from actors.training.noise import LEVELS, NoiseTally, mean_by_level
from actors.training.ranks import Ranks
from actors.training.settings import TrainSettings


class Measures:
    """One worker's clock, noise tally and operations count; every rank calls the same methods at the same steps."""

    def __init__(self, settings: TrainSettings) -> None:
        self.noise = NoiseTally()
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

    def begin(self) -> None:
        """A step begins."""
        self.noise.clear()
        self._clock.begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step; name: one of PHASES."""
        return self._clock.phase(name)

    def communicating(self) -> AbstractContextManager[None]:
        """Around every exchange between the ranks."""
        return self._clock.phase("communication")

    def end(self, ranks: Ranks, batches: Sequence[Batch], seconds: float) -> dict[str, Any]:
        """The step's figures for a StepRecord, the same on every rank. seconds: that the step took here."""
        spent = self._clock.end()
        operations = self._flops.step(batches) if self._flops is not None else 0.0
        names = (*PHASES, OTHER)
        mine = [*self.noise.values, *(spent[name] for name in names), operations]
        values = ranks.total_floats(mine)
        times = dict(zip(names, values[2 * LEVELS : -1], strict=True))
        return {
            "loss_by_noise": mean_by_level(values[: 2 * LEVELS]),
            "time_shares": {name: value / max(sum(times.values()), 1e-9) for name, value in times.items()},
            "mfu": self._utilisation(values[-1] / ranks.world, seconds),
        }

    def _utilisation(self, operations: float, seconds: float) -> float | None:
        return operations / seconds / self._peak if self._peak is not None and operations else None
