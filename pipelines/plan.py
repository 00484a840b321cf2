"""Before anyone rents it: `python pipelines/plan.py --config RECIPE.yaml --hardware.gpu KIND --hardware.nodes N`.

    python pipelines/plan.py --config deploy/recipes/qwen2.5-7b.yaml
    python pipelines/plan.py --model FOLDER_OR_HUB_ID --hardware.gpu h100-80gb --hardware.nodes 2 --train.micro_rows 4
    python pipelines/plan.py --config deploy/recipes/qwen2.5-7b.yaml --hardware.gpu rtx4090-24gb    # exit code 1

Takes adapt's own command line: put `plan` in the place of `adapt` and say what hardware it is. Reads config.json, no
weights, starts nothing. Shows parameters, memory of a GPU by kind, the largest micro-batch, traffic and time of a step,
hours and GPU-hours; where the run does not fit, what would make it fit, and the exit code is 1 (it was asked for
something sensible that cannot be done). With --output it leaves plan.json and report.md. How the forecast is made and
what it was checked against: docs/planning.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar, Literal

from pydantic import Field

from model.errors import JobError, UserError
from pipelines.adapt import AdaptConfig, check_length
from pipelines.jobkit import NOT_IDENTITY, OutputFolder, PackConfig, Section, main
from pipelines.jobkit.identity import hash_file
from pipelines.planning.forecast import Assumed, Forecast, forecast, largest_micro_rows, remedies
from pipelines.planning.hardware import Cluster, HardwareSection, cluster_of
from pipelines.planning.published import EFFICIENCY, OVERLAP
from pipelines.planning.report import as_dict, markdown, print_plan
from pipelines.planning.shape import config_folder, shape_of
from pipelines.planning.told import setup_of, streams_of
from pipelines.training.section import TrainSection


class AssumeSection(Section):
    """What nobody can know beforehand."""

    efficiency: float = Field(
        EFFICIENCY,
        gt=0,
        le=1,
        description="share of a GPU's peak that matrix products reach, everything lost elsewhere included; the default "
        "is calibrated on the published hours",
    )
    overlap: float = Field(
        OVERLAP, ge=0, le=1, description="share of the communication that hides behind computing, or the reverse"
    )
    streams: float | None = Field(
        None,
        gt=0,
        description="network tokens for a token of a row; null: 3 for block_diffusion (clean, two noisy views, and one "
        "more with train.ar_loss_weight), 1 for next_token, 1 for the denoiser of two_tower (2 with its complementary "
        "masks): the most that it can be (adapt leaves out what no loss reads: 1.9 on chats with short answers)",
    )
    predicted: float = Field(1.0, gt=0, le=1, description="share of a row's tokens that carry loss; 1 is the most")
    documents: float = Field(1.0, ge=1, description="documents in a row, on average: attention stays inside them")


class PlanConfig(AdaptConfig):
    """Forecast memory, time and cost of an adapt run, before anyone rents it. Takes adapt's own command line and a
    description of the cluster; what it is not told is the published recipe's (6,000 steps of 256 rows of 2,048 tokens
    on 64 GPUs). Reads config.json only and starts nothing. Exit code 1 means that the run does not fit, and the report
    says what would make it fit."""

    writes_by_default: ClassVar[bool] = False

    output: str | None = Field(
        None,
        description="folder for plan.json and report.md, a path or an fsspec URI; null: print only",
        json_schema_extra=NOT_IDENTITY,
    )
    pack: PackConfig = PackConfig()
    train: TrainSection = TrainSection(
        steps=6000, rows_per_step=256, micro_rows=1, workers=64, device="gpu", activation_checkpointing=True
    )
    hardware: HardwareSection = HardwareSection()
    assume: AssumeSection = AssumeSection()
    show: Literal["table", "json"] = Field(
        "table", description="what is printed: tables, or JSON for scripts", json_schema_extra=NOT_IDENTITY
    )


def run(config: PlanConfig) -> dict[str, Any]:
    """Forecast, print, write; returns the figures. Raises JobError at the end where the run does not fit."""
    made, cluster = _forecast(config)
    content = as_dict(made, _largest(made), remedies(made.shape, made.setup, cluster), config.hardware.price)
    _print(config, content)
    if config.output is not None:
        _write(config, content)
    if not made.fits:
        raise JobError(_does_not_fit(made, content))
    return content


def plan(config: PlanConfig) -> dict[str, Any]:
    """What --dry-run prints."""
    workers = None if config.train.workers == "auto" else config.train.workers
    cluster = cluster_of(config.hardware, workers)
    return {"cluster": cluster.text, "workers": cluster.workers}


def _forecast(config: PlanConfig) -> tuple[Forecast, Cluster]:
    if config.model is None:
        raise UserError("--model is required: a model folder, a Hub id or an fsspec URI (its config.json is enough).")
    if config.train.device == "cpu":
        raise UserError("plan knows the rates of GPUs only: leave --train.device cpu out.")
    workers = None if config.train.workers == "auto" else config.train.workers
    cluster = cluster_of(config.hardware, workers)
    if workers is not None and workers != cluster.workers:
        print(f"plan: for {cluster.workers} workers ({cluster.text}), not train.workers {workers}.", file=sys.stderr)
    shape = shape_of(config.model)
    if shape.context_length:
        check_length(config.pack.context_length, shape.context_length, config.model)
    setup = setup_of(
        config, shape, cluster, streams=config.assume.streams or streams_of(config), predicted=config.assume.predicted
    )
    assumed = Assumed(config.assume.efficiency, config.assume.overlap, config.assume.documents)
    return forecast(shape, setup, cluster, assumed, config.train.steps), cluster


def _largest(made: Forecast) -> int:
    return largest_micro_rows(made.shape, made.setup, made.cluster)


def _print(config: PlanConfig, content: dict[str, Any]) -> None:
    if config.show == "json":
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        print_plan(content)


def _write(config: PlanConfig, content: dict[str, Any]) -> None:
    read = {"config.json": hash_file(str(config_folder(str(config.model)) / "config.json"))}
    with OutputFolder(str(config.output), job="plan", config=config, inputs=read) as output:
        if output.finished is None:
            with output.stage("plan.json") as path:
                path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            with output.stage("report.md") as path:
                path.write_text(markdown(content), encoding="utf-8")
            output.finish({name: content[name] for name in ("fits", "run")})
    print(f"plan: {config.output}", file=sys.stderr, flush=True)


def _does_not_fit(made: Forecast, content: dict[str, Any]) -> str:
    help_ = "; ".join(one["change"] for one in content["would_fit"]) or "a smaller model or larger GPUs"
    if not made.fits_host:
        host = content["memory"]["host_gb_per_node"]
        return (
            f"A node would hold {host:.0f} GB in its own memory and has {made.cluster.gpu.host_memory_gb:g} GB. "
            f"What would fit: {help_}."
        )
    peak, have = content["memory"]["peak_gb"], made.cluster.gpu.memory_gb
    return f"It does not fit: {peak:.1f} GB of a GPU's {have:g} GB. What would fit: {help_}."


if __name__ == "__main__":
    sys.exit(main("plan", PlanConfig, run, plan))
