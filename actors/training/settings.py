"""What a training run is told: one frozen noun, and DeepSpeed's settings.

Everything here is plain data, made by the driver and sent to every worker; nothing imports DeepSpeed or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.training.checkpoints import Identity
from actors.training.offload import NOTHING, Offload
from actors.training.rows import micro_steps
from actors.training.schedule import Schedule
from model.adapters import LoraSettings
from model.errors import UserError
from model.objective import make_objective

CPU_BUCKET = 10_000_000  # elements; above it the copies of a bucket no longer come from warm memory
NOT_FOR_TWO_TOWERS = {  # what these keys say where nobody gave them
    "document_mask": True,
    "complementary_masks": True,
    "document_padding": True,
    "ar_loss_weight": 0.0,
}
NEVER_PARTITIONED = 10**12  # a persistence threshold (elements) that every parameter is below


@dataclass(frozen=True)
class EvaluationSettings:
    """When and on what a run is evaluated. every: steps from one evaluation to the next, 0 for none; the last step has
    one too. rows: folder of held-out rows, of which the first most_rows count. samples: prompts to continue by at most
    sample_tokens tokens each.
    """

    every: int = 0
    rows: str = ""
    most_rows: int = 1
    samples: int = 0
    sample_tokens: int = 1

    @property
    def on(self) -> bool:
        return self.every > 0

    def due(self, done: int, steps: int) -> bool:
        """Whether a run of `steps` steps is evaluated after `done` of them."""
        return self.on and (done % self.every == 0 or done == steps)


@dataclass(frozen=True)
class TwoTowerSettings:
    """block_size: tokens of a block, the most that decoding may use; the first first_steps steps train with
    first_block_size. token_shift: see `model.two_tower.config`; complementary_masks: see
    `model.two_tower.training.TwoTowerObjective`. balance_weight: of the experts' load-balancing loss, 0 for none.
    context: "copy" writes the context tower into the model's folder, "reference" names the base model there.
    context_weights: "replicated", whole on every worker, or "sharded" over them.
    """

    block_size: int = 16
    first_block_size: int | None = None
    first_steps: int = 0
    token_shift: bool = False
    complementary_masks: bool = False
    balance_weight: float = 0.0
    denoiser: str = "clone"
    context: str = "copy"
    context_weights: str = "replicated"

    def block_size_at(self, step: int) -> int:
        """Of a 0-based step."""
        begins = self.first_block_size is not None and step < self.first_steps
        return self.first_block_size or self.block_size if begins else self.block_size

    def check(self, steps: int) -> None:
        """Raises UserError where the keys do not go together, or with a run of so many steps."""
        if (self.first_block_size is None) != (self.first_steps == 0):
            raise UserError(
                "--two_tower.first_block_size and --two_tower.first_steps belong together: give both, or neither."
            )
        if self.denoiser == "lora" and self.context_weights == "sharded":
            raise UserError(
                "--two_tower.context_weights sharded needs a denoiser with weights of its own: with "
                "--two_tower.denoiser lora every worker holds the one copy, leave it out."
            )
        if self.first_steps >= steps:
            raise UserError(
                f"--two_tower.first_steps {self.first_steps} leaves none of {steps} steps to train blocks of "
                f"{self.block_size} tokens, which decoding will use: give fewer, or more --train.steps."
            )


@dataclass(frozen=True)
class TrainSettings:
    """A training run. Places are absolute paths or URIs; sizes count rows, times count steps.

    rows_per_step counts all workers and all accumulation. identity names the configuration and the data: a checkpoint
    with another one is not continued. threads: torch threads of a worker (CPU only).
    """

    model: str
    rows: str
    output: str
    identity: Identity
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
    zero_stage: int = 3
    offload: Offload = NOTHING
    decay_share: float = 0.2
    micro_tokens: int | None = None
    complementary_masks: bool = True
    document_padding: bool = True
    ar_loss_weight: float = 0.0
    lora: LoraSettings | None = None
    two_tower: TwoTowerSettings | None = None
    on_nan: str = "stop"
    evaluation: EvaluationSettings = EvaluationSettings()
    step_timeout_s: float = 1200.0
    stop_grace_s: float = 120.0

    def check(self) -> None:
        """Raises UserError where options do not go together."""
        self.offload.check(device=self.device, zero_stage=self.zero_stage)
        if self.objective == "two_tower":
            self._check_two_tower()
        elif self.two_tower is not None:
            raise UserError(f"--two_tower.* belongs to --objective two_tower: leave it out with {self.objective}.")
        else:
            make_objective(self.objective, block_size=1, mask_token_id=0, seed=0, layers=1, **self.objective_options)

    def _check_two_tower(self) -> None:
        for name, told in self.objective_options.items():
            if told != NOT_FOR_TWO_TOWERS[name]:
                raise UserError(
                    f"--train.{name} means nothing to --objective two_tower, where blocks begin behind each prompt and "
                    "every document stands alone: leave it out."
                )
        assert self.two_tower is not None, "the driver fills in the defaults"
        if self.lora is not None and self.two_tower.denoiser != "lora":
            raise UserError(
                "--train.lora trains an adapter, and --two_tower.denoiser clone the whole denoiser: leave it out, or "
                "set --two_tower.denoiser lora."
            )
        self.two_tower.check(self.steps)

    @property
    def objective_options(self) -> dict[str, Any]:
        """What make_objective is told beside sizes and seed."""
        return {
            "document_mask": self.document_mask,
            "complementary_masks": self.complementary_masks,
            "document_padding": self.document_padding,
            "ar_loss_weight": self.ar_loss_weight,
        }

    @property
    def micro_steps(self) -> int:
        """Forwards a worker runs in a step; with a token budget, the most that it may need."""
        return micro_steps(self.rows_per_step, self.workers, 1 if self.micro_tokens else self.micro_rows)

    def learning_rate_at(self, step: int) -> float:
        """The rate of a 0-based step."""
        return Schedule(
            kind=self.schedule,
            highest=self.learning_rate,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            final_share=self.final_share,
            decay_share=self.decay_share,
        ).rate(step)


def deepspeed_settings(settings: TrainSettings) -> dict[str, Any]:
    """The dictionary that deepspeed.initialize gets: the ZeRO stage, gradients accumulated in float32.

    Stage 0 shares nothing out, and there DeepSpeed can only accumulate in the format of the parameters. A lone worker
    has nobody to share with: its parameters stay whole, so that no forward gathers or releases them. Accumulating in
    float32 is exact where bfloat16 loses small gradients, and cheaper: the optimizer need not convert.
    CPU seconds of one thread for 134 M parameters, 256 tokens a micro-step, on a busy machine (plain torch loop /
    DeepSpeed as it comes / these settings): micro-step 1.7 / 2.2 to 2.5 / 2.2; optimizer 0.2 / 0.8 to 1.5 / 0.6.
    The difference does not grow with the tokens, so few large micro-steps hide it.
    """
    zero: dict[str, Any] = {
        **_zero(settings, settings.zero_stage),
        "contiguous_gradients": True,
        **settings.offload.settings(),
    }
    if settings.device == "cpu":
        zero["reduce_bucket_size"] = CPU_BUCKET
    if settings.workers == 1 and settings.zero_stage == 3 and settings.offload.parameters == "none":
        zero["stage3_param_persistence_threshold"] = NEVER_PARTITIONED
        if settings.lora is None:  # with an adapter DeepSpeed 0.19.8 loses count of what it fetched after a resume
            zero["stage3_prefetch_bucket_size"] = 0
    narrow = settings.zero_stage == 0 and settings.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": settings.micro_rows,
        "gradient_accumulation_steps": settings.micro_steps,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "bf16" if narrow else "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def frozen_settings(settings: TrainSettings) -> dict[str, Any]:
    """The dictionary for a network that workers share out (ZeRO-3) and never train."""
    return {
        "train_micro_batch_size_per_gpu": settings.micro_rows,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": _zero(settings, 3),
        "steps_per_print": 10**9,
    }


def _zero(settings: TrainSettings, stage: int) -> dict[str, Any]:
    return {"stage": stage, "overlap_comm": settings.device == "cuda", "memory_efficient_linear": False}
