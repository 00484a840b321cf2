"""A TwoTower folder, taken apart: where its towers lie, and what goes with them into an exported folder.

context/                        the context tower, the base model: an ordinary folder, also where the source named it
denoiser/                       the denoiser, an ordinary folder too; of `denoiser: lora` the adapter, as it was
time_conditioning.safetensors   and mask_embedding.safetensors, with an adapter: as they were
two_tower.json                  what makes the three one model again
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from model.backbone import revision_of
from model.errors import UserError
from model.two_tower.config import CLONE, FILE, LORA, OWN_CONTEXT, TwoTowerConfig
from model.two_tower.folder import DENOISER, TIME, checked_context, read_two_tower_config, save_config
from model.two_tower.published import is_published

HINT = "The denoiser writes blocks beside its context tower only: give generate, assess or a server the whole folder."


@dataclass(frozen=True)
class Towers:
    """A TwoTower folder, its two_tower.json and where its context tower lies."""

    folder: Path
    config: TwoTowerConfig
    context: Path

    @property
    def networks(self) -> dict[str, Path]:
        """The folders of whole networks, by their name in the exported folder."""
        own = {DENOISER: self.folder / DENOISER} if self.config.denoiser == CLONE else {}
        return {OWN_CONTEXT: self.context, **own}

    def write_rest(self, written: Path) -> None:
        """Everything but the networks, once they are written."""
        if self.config.denoiser == LORA:
            shutil.copytree(self.folder / DENOISER, written / DENOISER)
        for path in self.folder.glob("*.safetensors"):
            shutil.copyfile(path, written / path.name)
        revision = revision_of(written / OWN_CONTEXT) if self.config.denoiser == LORA else None
        save_config(replace(self.config, context=OWN_CONTEXT, context_revision=revision), written)


def open_towers(folder: Path, layout: str, adapter: str | None) -> Towers:
    """Raises UserError, one sentence, for a folder that lacks something and for what cannot be done with two towers."""
    if is_published(folder):
        raise UserError(f"{folder} holds two towers in the published layout, which export does not take apart.")
    if layout != "transformers" or adapter is not None:
        told = "--adapter" if adapter is not None else f"--format {layout}"
        raise UserError(f"{folder} holds two towers, and {told} is for one network: leave it out.")
    config = read_two_tower_config(folder)
    for name in (DENOISER, TIME):
        if not (folder / name).exists():
            raise UserError(f"{folder} lacks {name}, which {FILE} needs: copy the model again.")
    return Towers(folder, config, checked_context(folder, config))
