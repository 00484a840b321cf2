"""From adapt's configuration to the facts that a forecast needs: the same DeepSpeed settings that the run would get."""

from __future__ import annotations

from actors.training.settings import CPU_BUCKET, TrainSettings
from pipelines.adapt import AdaptConfig
from pipelines.planning.hardware import Cluster
from pipelines.planning.setup import LIVE_PARAMETERS, LOSS_CHUNK, REDUCE_BUCKET, STREAMS, WIDTH, Setup
from pipelines.training.section import TrainSection


def setup_of(config: AdaptConfig, cluster: Cluster, *, streams: float, predicted: float) -> Setup:
    """The layout of an adapt run on a cluster of GPUs."""
    train = config.train
    return Setup(
        workers=cluster.workers,
        cuda=True,
        zero_stage=3,
        width=WIDTH[train.dtype],
        micro_rows=train.micro_rows,
        rows_per_step=train.rows_per_step,
        row_tokens=config.pack.context_length,
        streams=streams,
        predicted=predicted,
        checkpointing=train.activation_checkpointing,
        reduce_bucket=REDUCE_BUCKET,
        live_parameters=LIVE_PARAMETERS,
        loss_chunk=LOSS_CHUNK,
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
        loss_chunk=LOSS_CHUNK,
    )


def worker_settings(
    *, workers: int, dtype: str, micro_rows: int, rows_per_step: int, checkpointing: bool
) -> TrainSettings:
    """What a worker of such a run is told; places are not used."""
    own = TrainSection().model_dump(exclude={"workers", "device", "cpus_per_worker", "max_failures"})
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
            **own,
            "dtype": dtype,
            "micro_rows": micro_rows,
            "rows_per_step": rows_per_step,
            "activation_checkpointing": checkpointing,
        },
    )
