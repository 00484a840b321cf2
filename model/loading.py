"""Any model that this project decodes, by its folder: a Hugging Face folder, adapted or not, or a TwoTower folder.

What a job or a server calls, which need not care which of them it was given. `model.backbone` knows the first kind,
`model.two_tower.folder` the second; either way a `Backbone` comes out, with a `writer` if it is two towers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from model.backbone import Backbone, load_backbone, load_tokenizer, read_config, revision_of
from model.config import TWO_TOWER, BlockDiffusionConfig
from model.errors import UserError
from model.recurrence import is_recurrent
from model.sources import fetch_model
from model.two_tower.config import LORA, TwoTowerConfig
from model.two_tower.folder import (
    DENOISER,
    TwoTowerModel,
    context_folder,
    is_two_tower,
    load_two_tower,
    read_two_tower_config,
)
from model.two_tower.published import BLOCK_SIZE, MASK_TOKEN_ID, is_published
from model.two_tower.stateful import StatefulReader
from model.two_tower.towers import ContextTower
from model.two_tower.writer import DenoiserWriter


@dataclass(frozen=True)
class Description:
    """What is known of a model without its weights. block_diffusion None: it writes token by token only.

    lacks: what to say of a TwoTower folder whose denoiser is not there, when blocks are asked of it; else None.
    """

    tokenizer: PreTrainedTokenizerBase
    block_diffusion: BlockDiffusionConfig | None
    lacks: str | None = None

    @property
    def adapted(self) -> bool:
        return self.block_diffusion is not None

    @property
    def two_tower(self) -> bool:
        return self.block_diffusion is not None and self.block_diffusion.two_tower

    def check_mode(self, mode: str | None) -> None:
        """Raises UserError where the denoiser is not there and something else than AR mode is wanted (None: the
        model's own mode)."""
        if self.lacks is not None and mode != "ar":
            raise UserError(self.lacks)


def describe_model(folder: Path) -> Description:
    """Read a model folder's configuration and tokenizer. Raises UserError, one sentence, where something is wrong."""
    if not is_two_tower(folder):
        tokenizer = load_tokenizer(folder)
        return Description(tokenizer, read_config(folder, tokenizer)[1])
    if is_published(folder):
        return Description(load_tokenizer(folder), _blocks(TwoTowerConfig(BLOCK_SIZE, MASK_TOKEN_ID)))
    config = read_two_tower_config(folder)
    if not (folder / DENOISER).is_dir():
        return Description(load_tokenizer(context_folder(folder, config)), None, _lacks_denoiser(folder))
    return Description(load_tokenizer(folder / DENOISER), _blocks(config))


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    adapter: str | Path | None = None,
    mode: str | None = None,
) -> Backbone:
    """Load any model folder, URI or Hub id to decode with it. adapter: see `load_backbone`.

    mode: the decoding mode that whoever loads it has settled on, None for the model's own. A TwoTower folder may lack
    its denoiser where that is "ar".

    Raises UserError, one sentence, for what cannot be loaded or cannot be decoded by the engine.
    """
    folder = fetch_model(source)
    if not is_two_tower(folder):
        return _with_states(load_backbone(source, dtype=dtype, device=device, adapter=adapter))
    if adapter is not None:
        raise UserError(f"{source} holds two towers, and an adapter belongs to one network: leave the adapter out.")
    description = describe_model(folder)
    description.check_mode(mode)
    loaded = load_two_tower(source, dtype=dtype, device=device, denoiser=description.lacks is None)
    context = replace(loaded.context, name=str(source), revision=model_revision(folder))
    return towers_backbone(TwoTowerModel(loaded.towers, context))


def towers_backbone(model: TwoTowerModel) -> Backbone:
    """Two towers in memory, or the context tower alone, as the engine takes a model."""
    towers, context = model.towers, model.context
    if towers.denoiser is None:
        return _with_states(context)
    writer = DenoiserWriter(towers)
    reader = StatefulReader(towers.context, writer.storage) if towers.context.recurrent else None
    return replace(context, block_diffusion=_blocks(towers.config), writer=writer, reader=reader)


def _with_states(backbone: Backbone) -> Backbone:
    """One network, read causally; with states where its layers carry them."""
    if not is_recurrent(backbone.model):
        return backbone
    if backbone.block_diffusion is not None:
        raise UserError(
            f"{backbone.name} was adapted to write blocks, but has recurrent layers, which cannot read one in both "
            "directions: adapt its base with --objective two_tower."
        )
    return replace(backbone, reader=StatefulReader(ContextTower(backbone.model), {}))


def model_revision(folder: Path) -> str:
    """Short hash of all that a model folder's answers depend on, as `revision_of`; of both towers, where it is two."""
    if not is_two_tower(folder) or is_published(folder):
        return revision_of(folder)
    config = read_two_tower_config(folder)
    digest = hashlib.blake2b(repr(config).encode(), digest_size=8)
    digest.update(revision_of(context_folder(folder, config)).encode())
    if config.denoiser == LORA:
        for path in sorted((folder / DENOISER).glob("adapter_*")):  # its configuration and its weights
            digest.update(path.read_bytes())
    elif (folder / DENOISER).is_dir():
        digest.update(revision_of(folder / DENOISER).encode())
    for path in sorted(folder.glob("*.safetensors")):  # the time conditioning, and an adapter's mask
        digest.update(path.read_bytes())
    return digest.hexdigest()


def weight_folders(folder: Path) -> list[Path]:
    """Where a model's safetensors lie: the folder itself, or those of both towers and of the time conditioning."""
    if not is_two_tower(folder) or is_published(folder):
        return [folder]
    config = read_two_tower_config(folder)
    return [context_folder(folder, config), *(p for p in (folder / DENOISER, folder) if p.is_dir())]


def _blocks(config: TwoTowerConfig) -> BlockDiffusionConfig:
    """How the denoiser writes, in the words that requests and cards know. A canvas is one piece: no sub-blocks."""
    return BlockDiffusionConfig(
        config.block_size,
        config.mask_token_id,
        method=TWO_TOWER,
        sub_block_size=config.block_size,
        token_shift=False,
        trained_context_length=config.trained_context_length,
    )


def _lacks_denoiser(folder: Path) -> str:
    return (
        f"{folder} lacks the folder {DENOISER}: copy the model again, or set decode.mode ar, which needs the context "
        "tower alone."
    )
