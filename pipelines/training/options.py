"""The sections inside `--train.*`: what is offloaded, and training an adapter instead of the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
