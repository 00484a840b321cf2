"""Tiny random decoders of every architecture that TwoTower is tested on, packed chats, and decoding by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model.adapters import LoraSettings
from model.attention import register_attention
from model.backbone import load_backbone
from model.layout import RowBatch
from model.two_tower.adapter import default_settings
from model.two_tower.config import TwoTowerConfig
from model.two_tower.folder import make_two_tower, save_two_tower
from model.two_tower.layout import Corruption, TwoTowerBatch, draw_corruption, lay_out_two_tower
from model.two_tower.reader import Reader, Stretch
from model.two_tower.shared import build_shared_towers
from model.two_tower.towers import TwoTower, build_two_tower
from tests.tiny import build_tiny_model

VOCAB, MASK, BLOCK = 96, 3, 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
               "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "nemotron_h": {"num_hidden_layers": 4, "hybrid_override_pattern": "M*E-", "mamba_num_heads": 4, "mamba_head_dim": 8,
                   "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_group": 1,
                   "topk_group": 1},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 24, "mamba_expand": 2,
                         "position_embedding_type": "rope"},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "attention_in_multiplier": 0.8, "ssm_out_multiplier": 0.7,
                  "lm_head_multiplier": 0.5},
    "qwen3_next": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                   "shared_expert_intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}  # fmt: skip
HYBRIDS = ("nemotron_h", "granitemoehybrid", "falcon_h1", "qwen3_next", "lfm2")


def tiny_decoder(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of this architecture, in eval mode, with the project's attention."""
    values = {**COMMON, **CONFIGS[kind], **overrides}
    if kind == "gpt2":
        values = {k: v for k, v in values.items() if k not in ("hidden_size", "num_hidden_layers", "head_dim")}
    config = AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=register_attention(), experts_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # what starts at 0 or 1 would hide mistakes
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


def tiny_towers(
    kind: str, dtype: torch.dtype = torch.float64, *, trained: bool = True, order: str = "norm_first", **overrides: Any
) -> TwoTower:
    """Both towers. trained: the denoiser and its time conditioning moved away from the context tower."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        towers = build_two_tower(tiny_decoder(kind, dtype, **overrides), TwoTowerConfig(BLOCK, MASK, order=order))
    if trained:
        scatter(towers)
    towers.writer().eval()
    return towers


@cache
def shared_towers(kind: str) -> TwoTower:
    """The same towers for every test that leaves them as they are."""
    return tiny_towers(kind)


def tiny_lora_towers(
    kind: str, dtype: torch.dtype = torch.float64, *, trained: bool = True, mask: int = MASK
) -> TwoTower:
    """Both towers in one model, with an adapter of rank 4. trained: adapter and time conditioning have been moved."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = TwoTowerConfig(BLOCK, mask, denoiser="lora")
        towers = build_shared_towers(tiny_decoder(kind, dtype), config, default_settings(4))
    if trained:
        scatter(towers)
    towers.writer().eval()
    return towers


@cache
def lora_towers(kind: str) -> TwoTower:
    """The same towers for every test that leaves them as they are."""
    return tiny_lora_towers(kind)


def shifted(towers: TwoTower) -> TwoTower:
    """The same towers, the denoiser's logits read as those of the next slot."""
    return replace(towers, config=replace(towers.config, token_shift=True))


def scatter(towers: TwoTower, seed: int = 7) -> None:
    """Move every parameter of the denoiser and of its time conditioning."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in towers.writer().parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def build_tower_folder(
    folder: Path, block_size: int = 8, lora: LoraSettings | None = None, *, token_shift: bool = False
) -> Path:
    """A TwoTower folder of the tiny Llama with spread confidences, context tower included; the denoiser's time
    conditioning does something, and its mask token is no token of the context tower. lora: one copy of the weights."""
    base = build_tiny_model(folder.parent / f"{folder.name}_base", initializer_range=0.3)
    model = make_two_tower(load_backbone(base), block_size=block_size, lora=lora, token_shift=token_shift)
    scatter(model.towers)
    save_two_tower(model, folder, context=True)
    return folder


def chat_rows(seed: int = 0) -> RowBatch:
    """Two packed rows of 28: a chat of two turns and a short one, with a tail; and one long document."""
    ids = torch.randint(4, VOCAB, (2, 28), generator=torch.Generator().manual_seed(seed))
    documents, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    positions = torch.arange(28).repeat(2, 1)
    documents[0, 17:], documents[0, 26:], documents[1, 25:] = 1, -1, -1
    positions[0, 17:] -= 17
    for row, begin, end in ((0, 5, 11), (0, 13, 17), (0, 18, 26), (1, 2, 25)):
        labels[row, begin:end] = ids[row, begin:end]
    return RowBatch(ids, labels, documents, positions)


def document_of(rows: RowBatch, row: int, document: int) -> Tensor:
    """Its tokens, int64 [n]."""
    return rows.input_ids[row][rows.document_ids[row] == document]


def chat_corruption(rows: RowBatch) -> Corruption:
    return draw_corruption(rows, 0, range(len(rows.input_ids)), [0] * len(rows.input_ids))


def laid_out(
    towers: TwoTower, rows: RowBatch, corruption: Corruption | None = None, *, keep_all: bool = True
) -> TwoTowerBatch:
    """The rows' batch for these towers, under the corruption of seed 0."""
    return lay_out_two_tower(
        rows,
        corruption or chat_corruption(rows),
        block_size=towers.config.block_size,
        mask_token_id=towers.config.mask_token_id,
        document_rows=towers.context.recurrent,
        token_shift=towers.config.token_shift,
        keep_all=keep_all,
    )


def by_decoding(towers: TwoTower, prefix: Tensor, noisy: Tensor, t: Tensor, stride: int | None = None) -> Tensor:
    """Logits [S, V] of a noisy block int64 [S] over a clean prefix, as decoding computes them.

    stride: the context tower reads so many tokens a forward, by default all at once.
    """
    reader, stretch = Reader(towers, tokens=len(prefix) + len(noisy), rows=1), Stretch()
    for start in range(0, len(prefix), stride or max(len(prefix), 1)):
        reader.extend([stretch], prefix[None, start : start + (stride or len(prefix))])
    return reader.denoise([stretch], noisy[None], t[None])[0]


def relative_error(ours: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number expected; both must be finite."""
    assert ours.isfinite().all() and expected.isfinite().all()
    return float((ours - expected).abs().max() / expected.abs().max())
