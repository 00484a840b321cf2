"""A tiny random Nemotron-H as a model folder: Mamba-2, attention, experts and an MLP."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.towers import COMMON, CONFIGS


def write_hybrid(folder: Path) -> Path:
    """A tiny Nemotron-H whose router has a bias, which no optimizer touches."""
    config = AutoConfig.for_model(
        "nemotron_h", **{**COMMON, **CONFIGS["nemotron_h"], "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
