"""The two layouts of an exported folder: transformers' own, and the one of the published Fast-dLLM v2 checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from model.backbone import Backbone, save_description
from model.checksums import note_weights
from model.published import check_publishable, published_values

TRANSFORMERS, PUBLISHED = "transformers", "fast_dllm_v2"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "NOTICE")


def check_layout(layout: str, backbone: Backbone) -> None:
    """Raises UserError where the layout cannot hold this model."""
    if layout == PUBLISHED:
        check_publishable(backbone.model.config, backbone.block_diffusion, backbone.tokenizer, backbone.name)


def write_layout(layout: str, backbone: Backbone, described: Path, folder: Path, shard_bytes: int) -> None:
    """Weights, their checksums, config and tokenizer into an empty folder. described: where the tokenizer's files are
    copied from."""
    backbone.model.save_pretrained(folder, max_shard_size=shard_bytes)
    note_weights(folder)
    save_description(backbone, folder)
    for name in (*TOKENIZER_FILES, *LICENSE_FILES):
        if (described / name).is_file():
            shutil.copyfile(described / name, folder / name)
    if layout == PUBLISHED:
        adapted = check_publishable(backbone.model.config, backbone.block_diffusion, backbone.tokenizer, backbone.name)
        dtype = str(backbone.model.dtype).removeprefix("torch.")
        values = published_values(backbone.model.config, adapted.block_size, dtype)
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def loader_of(layout: str, backbone: Backbone) -> str:
    """What a fresh process loads the folder with: the base class where the layout's own class is remote code."""
    return type(backbone.model).__name__ if layout == PUBLISHED else "auto"
