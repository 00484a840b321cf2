"""From adapt's configuration to the facts that a forecast needs: the same DeepSpeed settings that the run would get."""

from __future__ import annotations

from actors.training.settings import CPU_BUCKET, TrainSettings
from model.cross_entropy import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES
from pipelines.adapt import AdaptConfig
from pipelines.planning.hardware import Cluster
from pipelines.planning.setup import LIVE_PARAMETERS, REDUCE_BUCKET, STREAMS, WIDTH, Setup
from pipelines.training.section import TrainSection, worker_keys


def setup_of(config: AdaptConfig, cluster: Cluster, *, streams: float, predicted: float) -> Setup:
    """The layout of an adapt run on a cluster of GPUs."""
    train = config.train
    return Setup(
        workers=cluster.workers,
        cuda=True,
        zero_stage=train.zero_stage,
        width=WIDTH[train.dtype],
        micro_rows=train.micro_rows,
        rows_per_step=train.rows_per_step,
        row_tokens=config.pack.context_length,
        streams=streams,
        predicted=predicted,
        checkpointing=train.activation_checkpointing,
        reduce_bucket=REDUCE_BUCKET,
        live_parameters=LIVE_PARAMETERS,
        loss_chunk=GPU_CHUNK_BYTES,
        offload_optimizer=train.offload.optimizer,
        offload_parameters=train.offload.parameters,
    )


def cpu_setup(
    *, workers: int, width: int, micro_rows: int, rows_per_step: int, row_tokens: int, checkpointing: bool
) -> Setup:
    """ZeRO-3 workers on CPUs, block diffusion with every token supervised."""
    return Setup(
        workers=workers,
        cuda=False,
        zero_stage=3,
        width=width,
        micro_rows=micro_rows,
        rows_per_step=rows_per_step,
        row_tokens=row_tokens,
        streams=STREAMS["block_diffusion"],
        predicted=1.0,
        checkpointing=checkpointing,
        reduce_bucket=CPU_BUCKET,
        live_parameters=LIVE_PARAMETERS,
        loss_chunk=CPU_CHUNK_BYTES,
    )


def worker_settings(
    *, workers: int, dtype: str, micro_rows: int, rows_per_step: int, checkpointing: bool
) -> TrainSettings:
    """What a worker of such a run is told; places are not used."""
    return TrainSettings(
        model="",
        rows="",
        output="",
        identity="",
        objective="block_diffusion",
        seed=0,
        device="cpu",
        workers=workers,
        threads=1,
        **{
            **worker_keys(TrainSection()),
            "dtype": dtype,
            "micro_rows": micro_rows,
            "rows_per_step": rows_per_step,
            "activation_checkpointing": checkpointing,
        },
    )
