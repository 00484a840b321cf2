"""The keys of `--train.*` and the settings that workers get from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from actors.training.offload import Offload
from model.adapters import LoraSettings
from pipelines.jobkit import NOT_IDENTITY, Section
from pipelines.training.options import LoraSection, OffloadSection

EVALUATION_KEYS = ("held_out_every", "held_out_rows", "samples", "sample_tokens")  # see pipelines.training.evaluating


class TrainSection(Section):
    """How the model is trained. The defaults are the demo's: a small model on a machine without GPU."""

    steps: int = Field(60, ge=1, description="optimizer steps")
    rows_per_step: int = Field(6, ge=1, description="packed rows in a step, over all workers and all accumulation")
    micro_rows: int = Field(6, ge=1, description="packed rows in one forward of one worker; bounds memory")
    micro_tokens: int | None = Field(
        None,
        ge=1,
        description="instead of micro_rows: tokens that the network runs on in one forward of one worker (about three "
        "times a fully supervised row, twice with two_tower); rows that need fewer share a forward, one that needs "
        "more runs alone",
    )
    workers: int | Literal["auto"] = Field(
        "auto",
        description="training workers; auto, for a Ray on this machine only: one a GPU, or one with all CPUs",
        json_schema_extra=NOT_IDENTITY,
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="what a worker computes on; auto: a GPU where there is one", json_schema_extra=NOT_IDENTITY
    )
    cpus_per_worker: float | None = Field(
        None,
        gt=0,
        description="CPUs a worker reserves; null: an equal share of this machine, or 1 on a cluster",
        json_schema_extra=NOT_IDENTITY,
    )
    learning_rate: float = Field(5e-4, gt=0, description="highest learning rate of AdamW")
    warmup_steps: int = Field(10, ge=0, description="steps over which the learning rate rises linearly")
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        "cosine", description="the learning rate after the warm-up; wsd: stable, then a linear decay"
    )
    final_share: float = Field(0.05, ge=0, le=1, description="share of learning_rate that cosine and wsd end at")
    decay_share: float = Field(0.2, ge=0, le=1, description="share of the steps, the last ones, over which wsd decays")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of matrices, per unit of learning rate")
    beta2: float = Field(0.95, gt=0, lt=1, description="AdamW's decay of the second moment, per step")
    clip: float = Field(1.0, ge=0, description="largest norm of a step's gradient; 0 does not clip")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="number format of forward and backward; the optimizer's copy is float32. auto: bfloat16 on a GPU "
        "and on a CPU that multiplies it, else float32",
    )
    zero_stage: int = Field(
        3,
        ge=0,
        le=3,
        description="what workers share out (DeepSpeed ZeRO): 0 nothing (in bfloat16 gradients add up in bfloat16), 1 "
        "the optimizer's state, 2 gradients too, 3 parameters too",
    )
    document_mask: bool = Field(True, description="whether a document sees only itself; false: the whole row before it")
    ar_loss_weight: float = Field(
        0.0,
        ge=0,
        description="weight of the next-token loss that block_diffusion adds on a causal stream of its own; 0: none",
    )
    complementary_masks: bool = Field(
        True, description="whether a second view masks what the first does not; false: the paper's ablation, one view"
    )
    document_padding: bool = Field(
        True,
        description="whether documents are filled up to whole blocks; false: the paper's ablation, documents share "
        "blocks (with document_mask false)",
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="a step whose loss or gradient is not finite: stop names its samples and ends the run; skip leaves "
        "the step out on all workers, and counts it",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, a third more time"
    )
    checkpoint_every: int = Field(
        40, ge=1, description="steps between checkpoints; the last step has one too", json_schema_extra=NOT_IDENTITY
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints to keep", json_schema_extra=NOT_IDENTITY)
    held_out_every: int | None = Field(
        None,
        ge=0,
        description="steps between evaluations on held-out rows, the last step has one too; 0: none; "
        "null: as often as checkpoints, where the rows have a held_out folder",
        json_schema_extra=NOT_IDENTITY,
    )
    held_out_rows: int = Field(
        16, ge=1, description="held-out rows, the first ones, that the loss is taken on", json_schema_extra=NOT_IDENTITY
    )
    samples: int = Field(
        2,
        ge=0,
        description="held-out prompts that the model continues at each evaluation, into samples.jsonl",
        json_schema_extra=NOT_IDENTITY,
    )
    sample_tokens: int = Field(
        48, ge=1, description="longest continuation of a sample in tokens", json_schema_extra=NOT_IDENTITY
    )
    max_failures: int = Field(
        3,
        ge=0,
        description="restarts after lost workers without a new checkpoint in between, before giving up",
        json_schema_extra=NOT_IDENTITY,
    )
    step_timeout_s: float = Field(
        1200.0,
        gt=0,
        description="seconds that a worker may stay at one place of a step (reading its rows, one micro-batch) before "
        "it counts as hung and is replaced",
        json_schema_extra=NOT_IDENTITY,
    )
    stop_grace_s: float = Field(
        120.0,
        gt=0,
        description="seconds that a run told to stop waits for its workers' checkpoint (`ray job stop` itself allows "
        "RAY_JOB_STOP_WAIT_TIME_S, 3 s)",
        json_schema_extra=NOT_IDENTITY,
    )
    offload: OffloadSection = OffloadSection()
    lora: LoraSection | None = None

    @field_validator("workers")
    @classmethod
    def _somebody_works(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and workers < 1:
            raise ValueError("it must be at least 1, or auto")
        return workers


def worker_keys(section: TrainSection) -> dict[str, Any]:
    """What workers are told of the section: the fields of TrainSettings that have the keys' names."""
    apart = {"workers", "device", "cpus_per_worker", "max_failures", "offload", "lora", *EVALUATION_KEYS}
    return {
        **section.model_dump(exclude=apart),
        "offload": Offload(**section.offload.model_dump()),
        "lora": LoraSettings(**section.lora.model_dump()) if section.lora else None,
    }
