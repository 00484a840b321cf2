"""Tiny model folders in the layout of the published checkpoints: tied like the 1.5B, untied like the 7B."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def build_published(golden_model: Path, folder: Path, *, tied: bool) -> Path:
    """The golden model under `config.fast_dllm.json`, without Python files; untied it gets a head of its own."""
    shutil.copytree(golden_model, folder, ignore=shutil.ignore_patterns("*.py", "config*.json", "*.safetensors"))
    values = json.loads((golden_model / "config.fast_dllm.json").read_text())
    weights = load_file(golden_model / "model.safetensors")
    if not tied:
        embedding = weights["model.embed_tokens.weight"]
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
        weights["lm_head.weight"] = embedding + 0.1 * noise
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": tied}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder
