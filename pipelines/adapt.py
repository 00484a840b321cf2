"""Chats or packed rows in, a model that writes blocks out: the training job.

    python pipelines/adapt.py                                    # the demo's model and tasks, then an assessment
    python pipelines/adapt.py --model MODEL --data chats.jsonl --output adapted
    python pipelines/adapt.py --model MODEL --data rows --objective next_token --output control
    python pipelines/adapt.py --model MODEL --data rows --objective two_tower --output towers

Raw chats are packed first (pipelines/prepare.py). Training runs on Ray Train with DeepSpeed ZeRO-3: gloo on CPUs, NCCL
on GPUs. The same command run again goes on from the newest checkpoint, with the losses it would have had. The output
folder:

    rows/                 the packed rows, where --data was chats or absent
    checkpoints/step_N/   the newest checkpoints, each with its COMMIT.json
    metrics.jsonl         a line a step: loss (also by noise level, also held out), gradient norm, tokens/s, time shares
    samples.jsonl         what the model wrote at each evaluation
    tensorboard/          both for TensorBoard
    loss.png              the curves
    model/                the adapted model, an ordinary Hugging Face folder (of two_tower: docs/two_tower.md)
    manifest.json         configuration, input hashes, versions, figures
    assess/               with --assess true: the report of pipelines/assess.py
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from fsspec.core import url_to_fs
from pydantic import Field, model_validator

from actors.training.checkpoints import CheckpointStore, Identity
from actors.training.rows import PackedRows, holds_rows
from actors.training.run_files import METRICS, read_metrics
from actors.training.settings import TrainSettings, deepspeed_settings
from model.backbone import context_length_of, load_tokenizer, read_config, revision_of
from model.demo_base import demo_base_model
from model.errors import UserError
from model.sources import fetch_model
from pipelines import assess, prepare
from pipelines.jobkit import (
    NOT_IDENTITY,
    ClusterConfig,
    JobConfig,
    OutputFolder,
    PackConfig,
    ReadConfig,
    Section,
    connect_ray,
    hash_inputs,
    main,
)
from pipelines.jobkit.identity import flat, hash_of, identity_of
from pipelines.prepare import MixtureConfig, PrepareConfig, TasksConfig, check_shares
from pipelines.training.curve import draw_curves
from pipelines.training.evaluating import evaluation_settings
from pipelines.training.launch import train
from pipelines.training.options import TwoTowerSection, two_tower_settings
from pipelines.training.resources import (
    Placement,
    cluster_expected,
    cluster_here,
    device_of,
    number_format,
    place_workers,
    wait_for_workers,
)
from pipelines.training.section import TrainSection, worker_keys

ROWS = "rows"
ASSESS = "assess"
HELD_OUT = ("held_out_loss", "held_out_bound", "held_out_perplexity")  # figures of the last evaluation
LAST_SHARE = 0.1  # of the steps, whose mean loss is the run's last loss


class AssessSection(Section):
    """What --assess true measures."""

    tasks: int = Field(
        62, ge=1, description="held-out tasks to answer, the 31 kinds taking turns", json_schema_extra=NOT_IDENTITY
    )
    max_rows: int = Field(
        1, ge=1, description="requests decoded together: 1 is one person waiting", json_schema_extra=NOT_IDENTITY
    )
    held_out_tasks: int = Field(
        100, ge=0, description="held-out tasks for the held-out loss; 0 leaves it out", json_schema_extra=NOT_IDENTITY
    )
    max_tokens: int = Field(128, ge=1, description="longest answer in tokens", json_schema_extra=NOT_IDENTITY)


class AdaptConfig(JobConfig):
    """Adapt an autoregressive model to write blocks of tokens in parallel (or train the next-token control)."""

    data: tuple[str, ...] = Field(
        (), description="chats, as prepare reads them, or one folder of packed rows; none: the project's own tasks"
    )
    objective: Literal["block_diffusion", "next_token", "two_tower"] = Field(
        "block_diffusion",
        description="what is minimised: block_diffusion in one network, two_tower in a writer beside a frozen reader; "
        "next_token is the control on the same rows",
    )
    held_out: float = Field(
        0.0, ge=0, lt=1, description="share of the chats of --data to keep out of training, to evaluate on"
    )
    assess: bool | None = Field(
        None,
        description="assess base and result afterwards; null: where --data or every argument is absent",
        json_schema_extra=NOT_IDENTITY,
    )
    assessment: AssessSection = AssessSection()
    read: ReadConfig = ReadConfig()
    mixture: MixtureConfig = MixtureConfig()
    pack: PackConfig = PackConfig(block_size=16, context_length=256)
    tasks: TasksConfig = TasksConfig()
    train: TrainSection = TrainSection()
    two_tower: TwoTowerSection | None = None
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _a_weight_a_source(self) -> AdaptConfig:
        check_shares(self.mixture, self.data)
        return self


def run(config: AdaptConfig) -> dict[str, Any]:
    """Prepare, train and, if asked, assess; returns the training's figures."""
    base = config.model or str(demo_base_model())
    config = _resolved(config)
    with OutputFolder(str(config.output), job="adapt", config=config, inputs=_inputs(config, base)) as output:
        if output.finished is None:
            output.finish(_adapt_or_forget(config, base, output))
        else:
            print(f"{output.uri('model')} is finished: nothing to train.")
        assert output.finished is not None
        figures: dict[str, Any] = output.finished["figures"]
    if config.assess or (config.assess is None and not config.data):
        assess.run(_assess_config(config, base))
    return figures


def _resolved(config: AdaptConfig) -> AdaptConfig:
    """With what `--train.dtype auto` comes to here: the manifest and the checkpoints say what was computed in."""
    if config.train.dtype != "auto":
        return config
    if os.environ.get("RAY_ADDRESS") and config.train.device == "auto":
        connect_ray()  # to see whether it has GPUs
    return _computed_in(config, device_of(config.train, cluster_expected()))


def _computed_in(config: AdaptConfig, device: str) -> AdaptConfig:
    train = config.train.model_copy(update={"dtype": number_format(config.train, device)})
    return config.model_copy(update={"train": train})


def run_chain(config: AdaptConfig) -> dict[str, Any]:
    """Started without arguments: the whole chain, with the assessment unless BLOCKCAST_CONFIG says no."""
    return run(config.model_copy(update={"assess": config.assess is not False}))


def plan(config: AdaptConfig) -> dict[str, Any]:
    """What --dry-run shows: the workers and DeepSpeed's settings. Starts nothing."""
    cluster = cluster_expected()
    if not cluster.here and "auto" in (config.train.workers, config.train.device):
        return {"workers": config.train.workers, "device": config.train.device, "decided": "on the cluster"}
    placement = place_workers(config.train, cluster)
    config = _computed_in(config, placement.device)
    settings = _settings(config, config.model or "the demo's base model", ROWS, Identity(""), placement)
    return {
        "workers": placement.text,
        "device": placement.device,
        "threads": placement.threads,
        "rows_per_step": settings.rows_per_step,
        "micro_steps_per_worker": settings.micro_steps,
        "row_tokens_per_step": settings.rows_per_step * config.pack.context_length,
        "deepspeed": deepspeed_settings(settings),
    }


def _inputs(config: AdaptConfig, base: str) -> dict[str, str]:
    """Hashes of what is read. Raises UserError where the base is no model, or rows were packed otherwise than asked."""
    folder = fetch_model(base)
    described, _ = read_config(folder, load_tokenizer(folder))
    inputs = {"the base model": revision_of(folder)}
    if not _is_rows(config.data):
        check_length(config.pack.context_length, context_length_of(described), base)
        return inputs
    packed = PackedRows(config.data[0])
    _check_pack(config, packed)
    check_length(packed.format.context_length, context_length_of(described), base)
    if config.held_out:
        raise UserError(f"{config.data[0]} is packed already: leave --held_out out, or give the chats.")
    if config.mixture.weights:
        raise UserError(f"{config.data[0]} is packed already: leave --mixture.weights out, or give the chats.")
    return inputs | hash_inputs(packed.inputs)


def check_length(context_length: int, positions: int, base: str) -> None:
    """Raises UserError for rows in which a document may be longer than the model can count."""
    if context_length > positions:
        raise UserError(
            f"Rows of {context_length:,} tokens are longer than the {positions:,} positions of {base}: "
            f"give --pack.context_length {positions} or less, or raise max_position_embeddings in the model's "
            "config.json where its positions can be stretched."
        )


def _is_rows(data: Sequence[str]) -> bool:
    """Whether --data is packed rows. Raises UserError where rows stand among other things."""
    folders = [source for source in data if "*" not in source and _is_row_folder(source)]
    if folders and len(data) > 1:
        raise UserError(f"--data {folders[0]} holds packed rows: give it alone, or the chats they were made from.")
    return bool(folders)


def _is_row_folder(source: str) -> bool:
    if "://" not in source and not os.path.isdir(source):
        return False
    return holds_rows(source)


# Training -------------------------------------------------------------------------------------------------------------


def _adapt_or_forget(config: AdaptConfig, base: str, output: OutputFolder) -> dict[str, Any]:
    """Bad input found before the first checkpoint leaves nothing to go on with: any configuration may follow."""
    try:
        return _adapt(config, base, output)
    except UserError:
        if not CheckpointStore(str(config.output), keep=1).committed():
            output.forget()
        raise


def _adapt(config: AdaptConfig, base: str, output: OutputFolder) -> dict[str, Any]:
    """Rows, training, curve; the figures of the manifest."""
    connect_ray()
    rows = config.data[0] if _is_rows(config.data) else _prepared(config, base, output)
    packed = PackedRows(rows)
    if not output.has("model"):
        placement = place_workers(config.train, cluster_here())
        settings = _settings(config, base, rows, _identity(config, output), placement)
        settings = dataclasses.replace(settings, evaluation=evaluation_settings(config.train, rows))
        _check_checkpoint(settings)
        print(f"adapt: {len(packed):,} rows of {packed.format.context_length:,} tokens, {placement.text}", flush=True)
        places = (("--output", str(config.output)), ("--data", rows), ("--model", base))
        wait_for_workers(placement, config.cluster.wait_s, places)
        _mind_the_poll()
        train(settings, placement, output, config.train.max_failures)
    return _figures(config, output, len(packed))


def _prepared(config: AdaptConfig, base: str, output: OutputFolder) -> str:
    """Pack the chats into `<output>/rows`; nothing is done again that is there."""
    rows = output.uri(ROWS)
    prepare.run(
        PrepareConfig(
            model=base,
            data=config.data,
            output=rows,
            seed=config.seed,
            held_out=config.held_out,
            read=config.read,
            mixture=config.mixture,
            pack=config.pack,
            tasks=config.tasks,
            cluster=config.cluster,
        )
    )
    return rows


def _check_pack(config: AdaptConfig, packed: PackedRows) -> None:
    """Raises UserError where rows given as --data were packed otherwise than --pack.* asks for."""
    default = AdaptConfig.model_fields["pack"].default
    for name, asked in config.pack.model_dump().items():
        found = dataclasses.asdict(packed.format)[name]
        if asked not in (found, dict(default)[name]):
            raise UserError(f"The rows in {packed.folder} have {name} {found}, not {asked}: leave --pack.{name} out.")


def _identity(config: AdaptConfig, output: OutputFolder) -> Identity:
    """What the checkpoints are checkpoints of: every key that decides the result, and the inputs' hashes."""
    decides = identity_of(config)
    return Identity(hash_of([decides, output.inputs]), {**dict(flat(decides)), **output.inputs})


def _settings(config: AdaptConfig, base: str, rows: str, identity: Identity, placement: Placement) -> TrainSettings:
    settings = TrainSettings(
        model=base,
        rows=rows,
        output=str(config.output),
        identity=identity,
        objective=config.objective,
        seed=config.seed,
        device=placement.device,
        workers=placement.workers,
        threads=placement.threads,
        two_tower=two_tower_settings(config.objective, config.two_tower),
        **worker_keys(config.train),
    )
    settings.check()
    return settings


def _check_checkpoint(settings: TrainSettings) -> None:
    """Refuse what the workers would refuse, before they are started."""
    CheckpointStore(settings.output, keep=settings.keep_checkpoints).newest(settings.identity)


def _mind_the_poll() -> None:
    """Ray Train looks after its workers every 2 s, and that is how late it sees an end; a local Ray can look often."""
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody reclaims this machine


def _figures(config: AdaptConfig, output: OutputFolder, rows: int) -> dict[str, Any]:
    """Draw the curves and sum the run up."""
    filesystem, root = url_to_fs(str(config.output))
    records = read_metrics(filesystem, f"{root.rstrip('/')}/{METRICS}")
    taken = [record for record in records if record["loss"] is not None]
    with output.stage("loss.png") as path:
        draw_curves(taken, f"{config.objective}, {config.train.steps} steps", path)
    losses = [record["loss"] for record in taken]
    skipped = len(records) - len(taken)
    if skipped:
        print(f"adapt: {skipped:,} of {len(records):,} steps were skipped: their loss or gradient was not finite.")
    held_out = {name: record[name] for record in records for name in HELD_OUT if name in record}
    last = max(1, round(len(losses) * LAST_SHARE))
    return {
        "steps": len(records),
        "rows": rows,
        "epochs": round(len(records) * config.train.rows_per_step / rows, 3),
        "supervised_tokens": sum(record["supervised_tokens"] for record in records),
        "skipped_steps": skipped,
        "first_loss": losses[0] if losses else None,
        "last_loss": float(np.mean(losses[-last:])) if losses else None,
        **held_out,
        "tokens_per_second": float(np.median([record["tokens_per_second"] for record in records])),
    }


# Assessment -----------------------------------------------------------------------------------------------------------


def _assess_config(config: AdaptConfig, base: str) -> assess.AssessConfig:
    model = f"{str(config.output).rstrip('/')}/model"
    return assess.AssessConfig(
        model=model,
        base=base,
        output=f"{str(config.output).rstrip('/')}/{ASSESS}",
        seed=config.seed,
        max_tokens=config.assessment.max_tokens,
        tasks=assess.TasksSection(count=config.assessment.tasks, seed=config.tasks.seed),
        held_out=assess.HeldOutSection(
            tasks=config.assessment.held_out_tasks, context_length=config.pack.context_length
        ),
        decode=assess.DecodeSection(dtype=config.train.dtype),
        engine=assess.RowsSection(max_rows=config.assessment.max_rows),
    )


if __name__ == "__main__":
    sys.exit(main("adapt", AdaptConfig, run if len(sys.argv) > 1 else run_chain, plan))
