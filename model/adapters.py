"""LoRA adapters as `peft` saves them (adapter_config.json and adapter_model.safetensors), merged into a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from model.errors import UserError
from model.sources import fetch_model, first_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merge_adapter(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """The model with the adapter added to its weights, in place. source: folder, URI or Hub id of a LoRA adapter.

    Raises UserError for a folder that holds none, or one that was not made for this model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError("Adapters need the package peft: pip install 'blockcast[adapters]'.") from error
    folder = fetch_model(source)
    _check(folder)
    try:
        with torch.no_grad():
            merged: PreTrainedModel = PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
    except SafetensorError as error:
        raise UserError(f"{folder}: {WEIGHTS} is damaged: {first_line(error)}") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: the adapter does not fit the model: {first_line(error)}") from error
    return merged


def adapter_revision(source: str | Path) -> str:
    """Short hash of an adapter's weights."""
    return hashlib.blake2b((fetch_model(source) / WEIGHTS).read_bytes(), digest_size=8).hexdigest()


def _check(folder: Path) -> None:
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("peft_type")
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {CONFIG}: give the folder that peft saved.") from error
    except (ValueError, OSError, AttributeError) as error:
        raise UserError(f"{folder / CONFIG} is not readable JSON: {first_line(error)}") from error
    if kind != "LORA":
        raise UserError(f"{folder} is an adapter of kind {kind!r}: only LORA can be merged.")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no {WEIGHTS}: save the adapter with safe_serialization.")
