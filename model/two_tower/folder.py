"""A TwoTower model on disk, and how one is begun from an AR model.

    context/                        the context tower, an ordinary Hugging Face folder; or a reference in two_tower.json
    denoiser/                       the denoiser tower, the same; with "denoiser": "lora" see `adapter_folder`
    time_conditioning.safetensors   its time conditioning
    two_tower.json                  `TwoTowerConfig`

Loading refuses what does not belong together, in one sentence. The published layout loads too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from model.adapters import LoraSettings
from model.backbone import (
    Backbone,
    choose_mask_token,
    context_length_of,
    load_backbone,
    load_tokenizer,
    revision_of,
    save_backbone,
)
from model.errors import UserError
from model.sources import fetch_model, first_line
from model.two_tower.adapter_folder import load_shared, save_shared
from model.two_tower.config import CLONE, FILE, LORA, OWN_CONTEXT, TwoTowerConfig
from model.two_tower.published import is_published, load_published
from model.two_tower.shared import SharedDenoiser, build_shared_towers
from model.two_tower.tensors import read_tensors, write_tensors
from model.two_tower.towers import ContextTower, Denoiser, TwoTower, build_two_tower, check_config

DENOISER, TIME = "denoiser", "time_conditioning.safetensors"
BLOCK_SIZE = 16  # as published


@dataclass
class TwoTowerModel:
    """Towers with what goes with them. context: the context tower as a plain AR backbone, tokenizer included."""

    towers: TwoTower
    context: Backbone

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.context.tokenizer


def make_two_tower(
    backbone: Backbone,
    *,
    block_size: int = BLOCK_SIZE,
    order: str = "norm_first",
    lora: LoraSettings | None = None,
    token_shift: bool = False,
) -> TwoTowerModel:
    """Both towers from an AR model: the backbone becomes the context tower, the denoiser a copy of it.

    lora: the denoiser is not a copy but an adapter over the same weights, see `model.two_tower.shared`.

    Raises UserError for a model that was adapted to write blocks itself, or whose layers TwoTower does not know.
    """
    if backbone.block_diffusion is not None:
        raise UserError(f"{backbone.name} was adapted with another method: start TwoTower from an AR model.")
    rows = backbone.model.get_input_embeddings().num_embeddings
    mask = choose_mask_token(backbone.tokenizer, rows, backbone.stop_token_ids)
    if mask.token not in backbone.tokenizer.get_vocab():
        backbone.tokenizer.add_special_tokens(
            {"extra_special_tokens": [mask.token]}, replace_extra_special_tokens=False
        )
    config = TwoTowerConfig(
        block_size,
        mask.id,
        order,
        context=backbone.name,
        context_revision=backbone.revision,
        denoiser=CLONE if lora is None else LORA,
        token_shift=token_shift,
    )
    if lora is not None:
        return TwoTowerModel(build_shared_towers(backbone.model, config, lora), backbone)
    return TwoTowerModel(build_two_tower(backbone.model, config), backbone)


def save_two_tower(model: TwoTowerModel, folder: Path, *, context: bool) -> None:
    """Write the model folder, which must not exist or be empty.

    context: copy the context tower into it; else two_tower.json names where it is, and its revision.
    """
    writer = model.towers.writer()
    folder.mkdir(parents=True, exist_ok=True)
    config = model.towers.config
    if isinstance(writer, SharedDenoiser):
        save_shared(writer, config.context, model.tokenizer, folder / DENOISER)
    else:
        save_backbone(replace(model.context, model=writer.causal_lm), folder / DENOISER)
    write_tensors(writer.time.state_dict(), folder / TIME)
    if context:
        save_backbone(model.context, folder / OWN_CONTEXT)
        # An adapter means nothing over other weights than its own base's, so it names those of the copy too.
        revision = revision_of(folder / OWN_CONTEXT) if config.denoiser == LORA else None
        config = replace(config, context=OWN_CONTEXT, context_revision=revision)
    elif config.context == OWN_CONTEXT:
        raise UserError(f"{folder}: the context tower has no place of its own to refer to: save it with the model.")
    save_config(config, folder)


def save_config(config: TwoTowerConfig, folder: Path) -> None:
    """two_tower.json alone."""
    (folder / FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")


def is_two_tower(folder: Path) -> bool:
    """Whether a folder holds a TwoTower model, ours or published."""
    return (folder / FILE).is_file() or is_published(folder)


def load_two_tower(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    denoiser_device: str | None = None,
    denoiser: bool = True,
) -> TwoTowerModel:
    """Load a model folder, URI or Hub id for inference.

    denoiser_device: where the denoiser goes, by default beside the context tower. denoiser: False loads the context
    tower alone, for AR mode and likelihoods.

    Raises UserError, one sentence, for a folder that lacks something, whose base model is another one than it was
    trained with, or whose weights do not fit.
    """
    folder = fetch_model(source)
    if is_published(folder):
        return _published(folder, str(source), dtype, device, denoiser_device or device)
    config = read_two_tower_config(folder)
    context = _load_context(folder, config, dtype, device)
    if not denoiser:
        return TwoTowerModel(TwoTower(ContextTower(context.model), None, config), context)
    if not (folder / DENOISER).is_dir():
        raise UserError(f"{folder} lacks the folder {DENOISER}: load it for AR mode only, or copy the model again.")
    if config.denoiser == LORA:
        if denoiser_device not in (None, device):
            raise UserError(
                f"{folder} holds one copy of the weights, which cannot lie on {device} and {denoiser_device}."
            )
        towers, tokenizer = load_shared(context, config, folder / DENOISER), load_tokenizer(folder / DENOISER)
    else:
        writer = load_backbone(folder / DENOISER, dtype=dtype, device=denoiser_device or device)
        check_config(writer.model, config)
        _check_pair(folder, context, writer)
        tower, tokenizer = Denoiser(writer.model, config.order), writer.tokenizer
        towers = TwoTower(ContextTower(context.model), tower, config)
    time = towers.writer().eval().time
    time.load_state_dict(read_tensors(folder / TIME, time.state_dict()))
    # The denoiser's tokenizer knows the mask token, the base model's own may not.
    return TwoTowerModel(towers, replace(context, tokenizer=tokenizer, name=str(source)))


def read_two_tower_config(folder: Path) -> TwoTowerConfig:
    """two_tower.json. Raises UserError where it is absent or wrong."""
    try:
        return TwoTowerConfig.from_dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {FILE}: it is no TwoTower model.") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{folder / FILE} is not readable JSON: {first_line(error)}") from error


def context_folder(folder: Path, config: TwoTowerConfig) -> Path:
    """Where the context tower of a model folder lies. Raises UserError where it is not there."""
    if config.context != OWN_CONTEXT:
        return fetch_model(config.context)
    if not (folder / OWN_CONTEXT).is_dir():
        raise UserError(f"{folder} lacks the folder {OWN_CONTEXT}, which {FILE} says it holds: copy it again.")
    return folder / OWN_CONTEXT


def checked_context(folder: Path, config: TwoTowerConfig) -> Path:
    """As `context_folder`. Raises UserError too where its weights are others than the denoiser was trained on."""
    place = context_folder(folder, config)
    revision = revision_of(place)
    if config.context_revision in (None, revision):
        return place
    if config.context == OWN_CONTEXT:
        raise UserError(f"{place} holds other weights than the denoiser was trained on: copy it again.")
    raise UserError(
        f"{folder} was trained on {config.context} with revision {config.context_revision}, but that is now "
        f"{revision}: bring back the old weights, or train again."
    )


def _load_context(folder: Path, config: TwoTowerConfig, dtype: torch.dtype, device: str) -> Backbone:
    place = checked_context(folder, config)
    return load_backbone(place if config.context == OWN_CONTEXT else config.context, dtype=dtype, device=device)


def _check_pair(folder: Path, context: Backbone, writer: Backbone) -> None:
    """The denoiser reads the context tower layer by layer: same kind, same layers, same shapes."""
    mine, other = (b.model.config.get_text_config() for b in (context, writer))
    for name in ("model_type", "num_hidden_layers", "hidden_size", "num_key_value_heads", "head_dim"):
        ours, theirs = getattr(mine, name, None), getattr(other, name, None)
        if ours != theirs:
            raise UserError(f"{folder}: the context tower has {name} {ours}, the denoiser {theirs}: they do not pair.")


def _published(folder: Path, name: str, dtype: torch.dtype, device: str, denoiser_device: str) -> TwoTowerModel:
    towers = load_published(folder, dtype=dtype, context_device=device, denoiser_device=denoiser_device)
    causal_lm = towers.context.causal_lm
    tokenizer = load_tokenizer(folder)
    eos = causal_lm.config.eos_token_id
    stops = frozenset([eos] if isinstance(eos, int) else eos or [])
    length = context_length_of(causal_lm.config)
    return TwoTowerModel(towers, Backbone(causal_lm, tokenizer, None, name, revision_of(folder), length, stops))
