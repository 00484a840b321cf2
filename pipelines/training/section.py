"""The keys of `--train.*` and the settings that workers get from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.jobkit import NOT_IDENTITY, Section


class TrainSection(Section):
    """How the model is trained. The defaults are the demo's: a small model on a machine without GPU."""

    steps: int = Field(60, ge=1, description="optimizer steps")
    rows_per_step: int = Field(6, ge=1, description="packed rows in a step, over all workers and all accumulation")
    micro_rows: int = Field(6, ge=1, description="packed rows in one forward of one worker; bounds memory")
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
    schedule: Literal["cosine", "constant"] = Field("cosine", description="the learning rate after the warm-up")
    final_share: float = Field(0.05, ge=0, le=1, description="share of learning_rate that the cosine schedule ends at")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of matrices, per unit of learning rate")
    beta2: float = Field(0.95, gt=0, lt=1, description="AdamW's decay of the second moment, per step")
    clip: float = Field(1.0, ge=0, description="largest norm of a step's gradient; 0 does not clip")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="number format of forward and backward; the optimizer's copy is float32"
    )
    document_mask: bool = Field(True, description="whether a document sees only itself; false: the whole row before it")
    activation_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, a third more time"
    )
    checkpoint_every: int = Field(
        40, ge=1, description="steps between checkpoints; the last step has one too", json_schema_extra=NOT_IDENTITY
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints to keep", json_schema_extra=NOT_IDENTITY)
    max_failures: int = Field(
        3,
        ge=0,
        description="restarts after lost workers without a new checkpoint in between, before giving up",
        json_schema_extra=NOT_IDENTITY,
    )
