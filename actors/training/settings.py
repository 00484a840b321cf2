"""What a training run is told: one frozen noun, the learning rate as a function of the step, DeepSpeed's settings.

Everything here is plain data, made by the driver and sent to every worker; nothing imports DeepSpeed or Ray.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from actors.training.rows import micro_steps

SCHEDULES = ("cosine", "constant")
CPU_BUCKET = 10_000_000  # elements; above it the copies of a bucket no longer come from warm memory
NEVER_PARTITIONED = 10**12  # a persistence threshold (elements) that every parameter is below


@dataclass(frozen=True)
class TrainSettings:
    """A training run. Places are absolute paths or URIs; sizes count rows, times count steps.

    rows_per_step counts all workers and all accumulation. identity names the configuration and the data: a checkpoint
    with another one is not continued. threads: torch threads of a worker (CPU only).
    """

    model: str
    rows: str
    output: str
    identity: str
    objective: str
    seed: int
    device: str
    workers: int
    threads: int
    steps: int
    rows_per_step: int
    micro_rows: int
    learning_rate: float
    warmup_steps: int
    schedule: str
    final_share: float
    weight_decay: float
    beta2: float
    clip: float
    dtype: str
    document_mask: bool
    activation_checkpointing: bool
    checkpoint_every: int
    keep_checkpoints: int

    @property
    def micro_steps(self) -> int:
        """Forwards a worker runs in a step."""
        return micro_steps(self.rows_per_step, self.workers, self.micro_rows)

    def learning_rate_at(self, step: int) -> float:
        """The rate of a 0-based step: linear warm-up from above 0, then constant or a cosine to its final share."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


def deepspeed_settings(settings: TrainSettings) -> dict[str, Any]:
    """The dictionary that deepspeed.initialize gets: ZeRO-3, gradients accumulated in float32.

    A lone worker has nobody to share with: its parameters stay whole, so that no forward gathers or releases them.
    Accumulating in float32 is exact where bfloat16 loses small gradients, and cheaper: the optimizer need not convert.
    CPU seconds of one thread for 134 M parameters, 256 tokens a micro-step, on a busy machine (plain torch loop /
    DeepSpeed as it comes / these settings): micro-step 1.7 / 2.2 to 2.5 / 2.2; optimizer 0.2 / 0.8 to 1.5 / 0.6.
    The difference does not grow with the tokens, so few large micro-steps hide it.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": settings.device == "cuda",
        "memory_efficient_linear": False,
    }
    if settings.device == "cpu":
        zero["reduce_bucket_size"] = CPU_BUCKET
    if settings.workers == 1:
        zero |= {"stage3_param_persistence_threshold": NEVER_PARTITIONED, "stage3_prefetch_bucket_size": 0}
    return {
        "train_micro_batch_size_per_gpu": settings.micro_rows,
        "gradient_accumulation_steps": settings.micro_steps,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
