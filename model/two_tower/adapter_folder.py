"""The denoiser's part of a model folder with `"denoiser": "lora"`.

    denoiser/                       the adapter as peft saves it, and the tokenizer that knows the mask token
    mask_embedding.safetensors      the vector of a masked slot

Safetensors only; adapter_config.json is read as JSON and only plain LoRA is taken, so nothing in a folder can run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from model.adapters import CONFIG, WEIGHTS, LoraSettings
from model.backbone import Backbone
from model.errors import UserError
from model.sources import first_line
from model.two_tower.config import TwoTowerConfig
from model.two_tower.shared import SharedDenoiser, build_shared_towers
from model.two_tower.tensors import read_tensors, write_tensors
from model.two_tower.towers import TwoTower

PREFIX = "base_model.model."  # peft's, before a module's name in the model
MASK = "mask_embedding.safetensors"
FREE = {  # what may differ from peft's defaults: ours, and what a loaded adapter does not depend on
    "r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "inference_mode", "task_type",
    "peft_version", "fan_in_fan_out", "auto_mapping", "init_lora_weights", "lora_dropout",
}  # fmt: skip


def save_shared(denoiser: SharedDenoiser, base: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `folder`, the denoiser's, and the mask's embedding beside it. base: the model the adapter belongs to."""
    config = replace(denoiser.adapter.config, base_model_name_or_path=base, inference_mode=True)
    config.save_pretrained(folder)
    factors = denoiser.adapter.factors.state_dict()
    write_tensors({PREFIX + name: tensor for name, tensor in factors.items()}, folder / WEIGHTS)
    write_tensors(denoiser.adapter.mask.state_dict(), folder.parent / MASK)
    tokenizer.save_pretrained(folder)


def load_shared(context: Backbone, config: TwoTowerConfig, folder: Path) -> TwoTower:
    """Both towers over a loaded context tower; the time conditioning is not loaded yet. folder: the denoiser's.

    Raises UserError, one sentence, for an adapter that is none, lacks something or was made for another model.
    """
    settings = _settings(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        found = next((f" (only {path.name})" for path in sorted(folder.glob("*.bin"))), "")
        raise UserError(f"{folder} holds no {WEIGHTS}{found}: copy the model again.")
    try:
        towers = build_shared_towers(context.model, config, settings)
    except UserError as error:
        raise UserError(f"{folder} does not fit {context.name}: {error}") from error
    denoiser = towers.writer()
    assert isinstance(denoiser, SharedDenoiser)
    expected = {PREFIX + name: tensor for name, tensor in denoiser.adapter.factors.state_dict().items()}
    tensors = read_tensors(folder / WEIGHTS, expected)
    denoiser.adapter.factors.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    denoiser.adapter.mask.load_state_dict(read_tensors(folder.parent / MASK, denoiser.adapter.mask.state_dict()))
    return towers


def _settings(path: Path) -> LoraSettings:
    """Of a plain LoRA adapter. Raises UserError for another kind, or for options that change what it computes."""
    from peft import LoraConfig

    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = values.get("peft_type")
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} holds no {path.name}: copy the model again.") from error
    except (ValueError, OSError, AttributeError) as error:
        raise UserError(f"{path} is not readable JSON: {first_line(error)}") from error
    if kind != "LORA":
        raise UserError(f"{path}: peft_type is {kind!r}, but a denoiser can only be LORA.")
    for key, default in LoraConfig().to_dict().items():
        if key not in FREE and key in values and values[key] != default and (values[key] or default):
            raise UserError(f"{path}: {key} {values[key]!r} is not supported, a denoiser is a plain LoRA adapter.")
    rank, alpha, targets = (values.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(f"{path}: r must be a whole number from 1 on, not {rank!r}.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UserError(f"{path}: lora_alpha must be a number, not {alpha!r}.")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise UserError(f"{path}: target_modules must list names of modules, not {targets!r}.")
    return LoraSettings(rank, float(alpha), tuple(sorted(targets)))
