"""From adapt's configuration to the facts that a forecast needs: the same DeepSpeed settings that the run would get."""

from __future__ import annotations

from actors.training.checkpoints import Identity
from actors.training.settings import CPU_BUCKET, TrainSettings
from model.cross_entropy import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES
from model.errors import UserError
from pipelines.adapt import AdaptConfig
from pipelines.planning.hardware import Cluster
from pipelines.planning.setup import LIVE_PARAMETERS, REDUCE_BUCKET, STREAMS, WIDTH, Setup
from pipelines.planning.shape import Shape
from pipelines.training.options import two_tower_settings
from pipelines.training.resources import number_format
from pipelines.training.section import TrainSection, worker_keys


def streams_of(config: AdaptConfig) -> float:
    """Network tokens for a token of a row, at most: clean, one or two noisy views, one causal where asked for."""
    views = 0.0 if config.train.complementary_masks else -1.0
    if config.two_tower is not None and config.two_tower.complementary_masks:
        views += 1.0
    return STREAMS[config.objective] + views + (1.0 if config.train.ar_loss_weight else 0.0)


def setup_of(config: AdaptConfig, shape: Shape, cluster: Cluster, *, streams: float, predicted: float) -> Setup:
    """The layout of an adapt run on a cluster of GPUs. Raises UserError for what adapt would refuse."""
    train = config.train
    _check(config, cluster)
    towers = two_tower_settings(config.objective, config.two_tower)
    if towers is not None and towers.denoiser == "lora":
        raise UserError(
            "plan knows no --two_tower.denoiser lora: its run needs less than with clone, which plan knows."
        )
    frozen = 0.0 if towers is None else 1.0
    return Setup(
        workers=cluster.workers,
        cuda=True,
        zero_stage=train.zero_stage,
        width=WIDTH[number_format(train, "cuda")],
        micro_rows=_micro_rows(train, config.pack.context_length * (streams + frozen)),
        rows_per_step=train.rows_per_step,
        row_tokens=config.pack.context_length,
        streams=streams,
        predicted=predicted,
        checkpointing=train.activation_checkpointing,
        reduce_bucket=REDUCE_BUCKET,
        live_parameters=LIVE_PARAMETERS,
        loss_chunk=GPU_CHUNK_BYTES,
        trainable=_trainable(train, shape),
        frozen_streams=frozen,
        frozen_shared=towers is not None and towers.context_weights == "sharded",
        offload_optimizer=train.offload.optimizer,
        offload_parameters=train.offload.parameters,
    )


def _check(config: AdaptConfig, cluster: Cluster) -> None:
    """The same check that a run's driver makes before it starts workers."""
    TrainSettings(
        model="",
        rows="",
        output="",
        identity=Identity(""),
        objective=config.objective,
        seed=config.seed,
        device="cuda",
        workers=cluster.workers,
        threads=1,
        two_tower=two_tower_settings(config.objective, config.two_tower),
        **worker_keys(config.train) | {"dtype": number_format(config.train, "cuda")},
    ).check()


def _micro_rows(train: TrainSection, row_cost: float) -> int:
    """Rows in a forward; of a token budget as many whole rows as it holds, and one at least."""
    return train.micro_rows if train.micro_tokens is None else max(1, int(train.micro_tokens // row_cost))


def _trainable(train: TrainSection, shape: Shape) -> float:
    """Share of the parameters that learn: all, or what a low-rank adapter adds."""
    if train.lora is None:
        return 1.0
    ends = shape.linear_ends
    chosen = list(ends) if train.lora.targets == ("all-linear",) else list(train.lora.targets)
    for name in chosen:
        if name not in ends:
            raise UserError(
                f"--train.lora.targets {name}: plan knows the linear modules {', '.join(ends)}, or all-linear."
            )
    return train.lora.rank * shape.layers * sum(ends[name] for name in chosen) / shape.parameters


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
    train = TrainSection(
        dtype=dtype, micro_rows=micro_rows, rows_per_step=rows_per_step, activation_checkpointing=checkpointing
    )
    return TrainSettings(
        model="",
        rows="",
        output="",
        identity=Identity(""),
        objective="block_diffusion",
        seed=0,
        device="cpu",
        workers=workers,
        threads=1,
        **worker_keys(train),
    )
