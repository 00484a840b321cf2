"""What each kind of denoiser costs in memory: the figures of docs/two_tower.md, counted on SmolLM2-135M's shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from model.attention import register_attention
from model.two_tower.adapter import default_settings
from model.two_tower.config import TwoTowerConfig
from model.two_tower.shared import build_shared_towers
from model.two_tower.towers import TwoTower, build_two_tower

MASK = 4  # <reponame>, a token that SmolLM2 has and nobody uses
DOCS = Path(__file__).parents[3] / "docs" / "two_tower.md"


def smollm2() -> PreTrainedModel:
    """Its shapes, in bfloat16; what the weights are does not matter here."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config._attn_implementation = register_attention()
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model.eval()


def counted(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """(numbers, bytes) of different storages."""
    found = {p.untyped_storage().data_ptr(): p for p in parameters}
    return sum(p.numel() for p in found.values()), sum(p.untyped_storage().nbytes() for p in found.values())


def held(towers: TwoTower) -> list[Tensor]:
    return [*towers.context.causal_lm.parameters(), *towers.writer().parameters()]


def test_the_table_of_the_docs() -> None:
    base = smollm2()
    rows = [("the base model", *counted(base.parameters()), 0)]
    for name, towers in (
        ("clone", build_two_tower(base, TwoTowerConfig(16, MASK))),
        ("lora, rank 16", build_shared_towers(base, TwoTowerConfig(16, MASK, denoiser="lora"), default_settings(16))),
    ):
        trained = sum(p.numel() for p in towers.writer().parameters() if p.requires_grad)
        rows.append((name, *counted(held(towers)), trained))
    numbers = rows[0][1]
    for name, parameters, size, trained in rows:
        line = f"| {name} | {parameters:,} | {size / 1e6:.1f} MB | {parameters / numbers:.3f} | {trained:,} |"
        assert line in DOCS.read_text(encoding="utf-8"), line
