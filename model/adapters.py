"""LoRA adapters as `peft` makes and saves them (adapter_config.json and adapter_model.safetensors): begun, written, and
merged into a model. One that was trained here has the model's block-diffusion entry beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from model.config import BlockDiffusionConfig
from model.errors import UserError
from model.sources import fetch_model, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BLOCK_DIFFUSION = "block_diffusion.json"  # ours: what the base model becomes with the adapter


ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True)
class LoraSettings:
    """rank of the two factors; alpha: the product counts alpha / rank times; targets: module names, or all-linear."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def begin_adapter(model: PreTrainedModel, name: str, settings: LoraSettings, key: str) -> Any:
    """peft's model around this one, whose linear modules now carry a new adapter; everything else is frozen.

    Draws from torch's generator. name: the model's, key: the setting's, for errors. Raises UserError where a target is
    no linear module inside the model.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError(f"{key} needs the package peft: pip install 'blockcast[adapters]'.") from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules="all-linear" if settings.targets == ALL_LINEAR else list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}.targets do not fit {name}: {first_line(error)}") from error
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if not isinstance(embedding, nn.Linear | nn.Embedding):
            raise UserError(f"{key}.targets: the embedding and the head stay as they are, leave them out.")
    return peft_model


def merge_adapter(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """The model with the adapter added to its weights, in place. source: folder, URI or Hub id of a LoRA adapter.

    Raises UserError for a folder that holds none, or one that was not made for this model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError("Adapters need the package peft: pip install 'blockcast[adapters]'.") from error
    folder = fetch_model(source, "The adapter")
    _check(folder)
    try:
        with torch.no_grad():
            merged: PreTrainedModel = PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
    except SafetensorError as error:
        raise UserError(f"{folder}: {WEIGHTS} is damaged: {first_line(error)}") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: the adapter does not fit the model: {first_line(error)}") from error
    return merged


def save_adapter(
    peft_model: Any,
    weights: Mapping[str, Tensor],
    base: str,
    block_diffusion: BlockDiffusionConfig | None,
    folder: Path,
) -> None:
    """Write an adapter as peft does. weights: whole, by their names in the peft model; base: the model it was made for.

    block_diffusion: kept beside it, so that an autoregressive base with this adapter decodes in blocks.
    """
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True)
    config = replace(peft_model.peft_config["default"], base_model_name_or_path=base, inference_mode=True)
    config.save_pretrained(folder)
    named = get_peft_model_state_dict(peft_model, state_dict=dict(weights), save_embedding_layers=False)
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / WEIGHTS, {"format": "pt"})
    if block_diffusion is not None:
        (folder / BLOCK_DIFFUSION).write_text(json.dumps(block_diffusion.to_dict(), indent=1), encoding="utf-8")


def adapter_block_diffusion(source: str | Path) -> BlockDiffusionConfig | None:
    """The block-diffusion entry of an adapter that was trained here; None for another."""
    path = fetch_model(source, "The adapter") / BLOCK_DIFFUSION
    try:
        return BlockDiffusionConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON: {first_line(error)}") from error


def adapter_revision(source: str | Path) -> str:
    """Short hash of an adapter's weights. Raises UserError for a folder that holds no LoRA adapter."""
    folder = fetch_model(source, "The adapter")
    _check(folder)
    return hashlib.blake2b((folder / WEIGHTS).read_bytes(), digest_size=8).hexdigest()


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
