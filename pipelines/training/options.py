"""Sections of a training run: what is offloaded, an adapter instead of the weights, the two towers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from actors.training.settings import TwoTowerSettings
from pipelines.jobkit import Section

Place = Literal["none", "cpu", "nvme"]


class OffloadSection(Section):
    """What GPUs do not hold all the time (DeepSpeed's ZeRO-Offload and ZeRO-Infinity)."""

    optimizer: Place = Field(
        "none",
        description="where the optimizer's state lies and is updated: none, on the GPU; cpu, in the node's memory "
        "(zero_stage 1 to 3); nvme, on its disk (zero_stage 3)",
    )
    parameters: Place = Field(
        "none", description="where a worker's share of the parameters lies; cpu and nvme need zero_stage 3"
    )
    path: str | None = Field(None, description="of nvme: a folder on each node's NVMe disk")


class LoraSection(Section):
    """Train a low-rank adapter (LoRA) beside frozen weights: written to adapter/, and merged into model/."""

    rank: int = Field(16, ge=1, description="rank of the adapter's factors")
    alpha: float = Field(32.0, gt=0, description="the adapter's product counts alpha / rank times")
    targets: tuple[str, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="names of the modules that get an adapter, such as q_proj v_proj; all-linear: every linear one "
        "between embedding and head",
    )


class TwoTowerSection(Section):
    """What --objective two_tower is told beyond --train.*: a frozen context tower reads, a trained denoiser writes
    blocks of tokens. Its rows may be packed with any block size; blocks begin right behind each prompt."""

    block_size: int = Field(16, ge=1, description="tokens of a block, and the most that decoding may use later")
    first_block_size: int | None = Field(
        None, ge=1, description="tokens of a block in the first first_steps steps (published: 32, then 16)"
    )
    first_steps: int = Field(0, ge=0, description="steps that train with first_block_size")
    token_shift: bool = Field(
        False,
        description="true: a slot's logits are of the slot behind it, as the base model learned them, and the context "
        "tower decides each block's first token; false, as published: of the slot itself",
    )
    complementary_masks: bool = Field(
        False,
        description="true: each block in two views, the second masked where the first is not, so that all tokens of an "
        "answer are learned in each step, for about twice the computing; false, as published: one view",
    )
    balance_weight: float = Field(
        0.0,
        ge=0,
        description="weight of the experts' load-balancing loss, per masked token, added to loss; 0: none. It is taken "
        "on each forward's tokens, so with it the loss depends a little on micro_rows and workers",
    )
    denoiser: Literal["clone", "lora"] = Field(
        "clone",
        description="what is trained: clone, a whole copy of the base model; lora, an adapter over the context tower's "
        "own weights, one copy in all (--train.lora.* says rank, alpha and targets)",
    )
    context: Literal["copy", "reference"] = Field(
        "copy",
        description="the context tower in model/: copy, the base model's weights in model/context; reference, the "
        "name of --model, whose weights must then stay as they are",
    )
    context_weights: Literal["replicated", "sharded"] = Field(
        "replicated",
        description="while training: replicated, every worker holds the whole context tower; sharded, workers share it "
        "out and gather it layer by layer (not with recurrent layers)",
    )


def two_tower_settings(objective: str, section: TwoTowerSection | None) -> TwoTowerSettings | None:
    """What workers are told of the section: its defaults where the objective needs them and nobody gave any."""
    if section is not None:
        return TwoTowerSettings(**section.model_dump())
    return TwoTowerSettings() if objective == "two_tower" else None
