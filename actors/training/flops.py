"""Model FLOPs utilisation: what share of a GPU's stated peak a step's arithmetic comes to.

Counted are the products with the model's matrices: 2 operations a weight and token forward, 2 backward, and 2 more
where the weight is trained. The head counts for predicted tokens only, the layers for the tokens they really run on.
Left out are attention's own products and what activation checkpointing computes twice, so the figure is a lower bound.
A device whose peak nobody states here, a CPU among them, gets no figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from model.layout import TrainingBatch
from model.two_tower.layout import TwoTowerBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bfloat16 FLOP/s by what the device's name contains, from the makers' data sheets; the longest name decides.
PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H800": 989e12,
    "H20": 148e12,
    "H200": 989e12,
    "B200": 2250e12,
}


class Flops(Protocol):
    """What a method's batches cost."""

    def step(self, batches: Iterable[Any]) -> float:
        """Operations of forward and backward over the batches."""
        ...


@dataclass(frozen=True)
class FlopCount:
    """Weights in matrices: `layers` run on every token, `head` on predicted ones; trained_*: those with gradients."""

    layers: int
    head: int
    trained_layers: int
    trained_head: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> FlopCount | None:
        """The counts of a model whose parameters are whole; None for experts, which a token meets some of only."""
        if any("expert" in name for name, _ in model.named_parameters()):
            return None
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding and p is not head]
        return cls(
            sum(p.numel() for p in matrices),
            head.numel(),
            sum(p.numel() for p in matrices if p.requires_grad),
            head.numel() if head.requires_grad else 0,
        )

    def step(self, batches: Iterable[TrainingBatch]) -> float:
        """Operations of forward and backward over the batches."""
        return float(
            sum(
                (4 * self.layers + 2 * self.trained_layers) * batch.tokens
                + (4 * self.head + 2 * self.trained_head) * len(batch.slots)
                for batch in batches
            )
        )


@dataclass(frozen=True)
class TwoTowerFlops:
    """Both towers have the matrices of `writer`; the context tower runs them forward only, and no head."""

    writer: FlopCount

    def step(self, batches: Iterable[TwoTowerBatch]) -> float:
        """Operations of forward and backward over the batches."""
        one, total = self.writer, 0.0
        for batch in batches:
            total += 2 * one.layers * batch.context_ids.numel()
            total += (4 * one.layers + 2 * one.trained_layers) * batch.noisy_ids.numel()
            total += (4 * one.head + 2 * one.trained_head) * batch.scored_tokens
        return total


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s that the maker states for a device in bfloat16; None for other number formats and unknown devices.

    A name matches as whole words: an `A10` is not an `A100`.
    """
    words = set(device_name.replace("-", " ").split())
    known = [name for name in PEAK_FLOPS if set(name.split()) <= words]
    return PEAK_FLOPS[max(known, key=len)] if known and dtype == "bfloat16" else None


def device_peak(device: torch.device, dtype: str) -> float | None:
    """The stated peak of the device that a worker computes on."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
