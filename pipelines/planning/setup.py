"""How a run is laid out on workers: the few facts that memory, traffic and time depend on."""

from __future__ import annotations

from dataclasses import dataclass

STREAMS = {
    "block_diffusion": 3.0,
    "next_token": 1.0,
    "two_tower": 1.0,
}  # tokens of the trained network for a token of a row, at most
WIDTH = {"bfloat16": 2, "float32": 4}
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's default
LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance
STATE_WIDTH = 4  # bytes of master copy, each moment, and the sums of gradients


@dataclass(frozen=True)
class Setup:
    """One run. streams: tokens of the trained network for a token of a row. predicted: share of a row's tokens that
    carry loss.

    width: bytes of a weight in forward and backward. buckets in elements: what DeepSpeed reduces at once, fetches ahead
    and keeps gathered. trainable: share of the parameters that learn (1 without LoRA). offload_*: none, cpu or nvme.
    frozen_streams: tokens of a second, frozen network of the same shape; 0: there is none. frozen_shared: whether
    workers share it out.
    """

    workers: int
    cuda: bool
    zero_stage: int
    width: int
    micro_rows: int
    rows_per_step: int
    row_tokens: int
    streams: float
    predicted: float
    checkpointing: bool
    reduce_bucket: int
    live_parameters: int
    loss_chunk: int
    trainable: float = 1.0
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    frozen_streams: float = 0.0
    frozen_shared: bool = False

    @property
    def micro_steps(self) -> int:
        """Forwards of the busiest worker in a step."""
        return -(-self.rows_per_step // (self.workers * self.micro_rows))

    @property
    def micro_tokens(self) -> float:
        """Tokens that the network runs on in one forward of one worker."""
        return self.micro_rows * self.row_tokens * self.streams

    @property
    def micro_predictions(self) -> float:
        """Predictions that one forward of one worker makes: each supervised token once."""
        return self.micro_rows * self.row_tokens * self.predicted

    @property
    def shared(self) -> bool:
        """Whether forwards gather parameters: ZeRO-3 with more than one worker, or parameters kept elsewhere."""
        return self.zero_stage == 3 and (self.workers > 1 or self.offload_parameters != "none")
