"""Training a low-rank adapter (LoRA, through peft) instead of the weights, and what such a run leaves behind.

    adapter/    as peft saves it, with `block_diffusion.json` beside it: what a server merges into the same base model
    model/      the base model with the adapter merged in: the ordinary result of a run

The base stays frozen: it has no gradient, no optimizer state and no place in the optimizer. The merge is the one a
server does, from the written adapter, so that both give the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from actors.training.trained_model import publish_folder, publish_model
from model.adapters import LoraSettings, begin_adapter, merge_adapter, save_adapter
from model.backbone import Backbone

ADAPTER = "adapter"
PREFIX = "base_model.model."
BASE, LORA_A, LORA_B = ".base_layer.", ".lora_A.default.", ".lora_B.default."  # what peft makes of a linear module


def _own_name(name: str) -> str:
    return name.replace(BASE, ".")


class Adapter:
    """The adapter of a model in training."""

    def __init__(self, peft_model: Any, scale: float) -> None:
        self._peft_model, self._scale = peft_model, scale

    @classmethod
    def into(cls, backbone: Backbone, settings: LoraSettings) -> Adapter:
        """Put a new adapter into the model, in place; everything else is frozen. Draws from torch's generator.

        Raises UserError where a target is no linear module inside the model.
        """
        peft_model = begin_adapter(backbone.model, backbone.name, settings, "--train.lora")
        return cls(peft_model, settings.alpha / settings.rank)

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every weight of the base model by its own name, with the adapter in it. weights: all of the model, whole."""
        return {
            _own_name(name): self._added(name, tensor, weights)
            for name, tensor in weights.items()
            if LORA_A not in name and LORA_B not in name
        }

    def _added(self, name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        down, up = (name.replace(BASE, part) for part in (LORA_A, LORA_B))
        if BASE not in name or down not in weights:
            return tensor
        product = weights[up].float() @ weights[down].float()
        return (tensor.float() + self._scale * product).to(tensor.dtype)

    def save(self, weights: Mapping[str, Tensor], backbone: Backbone, folder: Path) -> None:
        """Write the folder. weights: of the trained parameters, by their names in the model."""
        named = {PREFIX + name: tensor for name, tensor in weights.items()}
        save_adapter(self._peft_model, named, backbone.name, backbone.block_diffusion, folder)


def publish_adapter(
    adapter: Adapter,
    weights: Mapping[str, Tensor],
    trained: Backbone,
    base: Backbone,
    output: str,
    guard: Callable[[], None],
) -> None:
    """Write `<output>/adapter`, then `<output>/model`: `base`, a fresh one, with that adapter merged in.

    weights: the adapter's, whole, by their names in the trained model. guard: called before a name is given.
    """
    publish_folder(output, ADAPTER, lambda folder: adapter.save(weights, trained, folder), guard)
    merged = replace(base, model=merge_adapter(base.model, f"{output.rstrip('/')}/{ADAPTER}"))
    whole = {name: parameter.detach() for name, parameter in merged.model.named_parameters()}
    publish_model(merged, whole, output, guard)
