"""A LoRA adapter as peft saves it, with random weights that change what the model says."""

from __future__ import annotations

from pathlib import Path

import torch


def build_adapter(model: Path, folder: Path, *, seed: int, strength: float = 1.0) -> Path:
    """Write an adapter of the Llama model in `model` and return its folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(
            LlamaForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        )
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=strength)
    adapted.save_pretrained(folder)
    return folder
