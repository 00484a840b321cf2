"""A training step on real workers is the step written down in plain torch, for any number of workers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from actors.training.rows import PackedRows, RowOrder
from actors.training.settings import TrainSettings
from actors.training.trained_model import publish_model
from model.backbone import Backbone, load_backbone, make_block_diffusion
from model.errors import JobError
from model.objective import TrainingModel, make_objective
from tests.actors.training.test_train_settings import settings
from tests.training_runs import (
    LEARNING_RATE,
    ROWS,
    ROWS_PER_STEP,
    STEPS,
    TrainingRun,
    adapt,
    arguments,
    read_metrics,
)

pytestmark = pytest.mark.slow
PLAIN_STEPS = 15


@pytest.fixture(scope="module")
def two_workers(
    local_ray: None, tiny_model: Path, training_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingRun:
    """The same run on two gloo workers, a few steps of it."""
    output = tmp_path_factory.mktemp("training") / "two"
    argv = arguments(tiny_model, training_rows, output, workers=2, checkpoint_every=4, steps=6, schedule="constant")
    return adapt(argv, output)


@pytest.fixture(scope="module")
def control(
    local_ray: None, tiny_model: Path, training_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingRun:
    """The next-token control on the same rows, in bfloat16."""
    output = tmp_path_factory.mktemp("training") / "control"
    argv = arguments(tiny_model, training_rows, output, steps=6, dtype="bfloat16", schedule="constant")
    return adapt([*argv, "--objective", "next_token"], output)


def seeded_start(folder: Path) -> Backbone:
    """The base model as the workers make it: the new mask token's embedding is drawn under the run's seed."""
    torch.manual_seed(0)
    return make_block_diffusion(load_backbone(folder), block_size=8, trained_context_length=48)


def plain_steps(folder: Path, rows: Path, told: TrainSettings, objective: str = "block_diffusion") -> Iterator[Any]:
    """(loss, gradient norm, batch hash) of each step of a loop without Ray, DeepSpeed, accumulation or sharing."""
    backbone, packed = seeded_start(folder), PackedRows(str(rows))
    assert backbone.block_diffusion is not None
    kind = make_objective(
        objective,
        block_size=8,
        mask_token_id=backbone.block_diffusion.mask_token_id,
        seed=0,
        layers=backbone.layers,
    )
    module = TrainingModel(backbone.model).train()
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    order = RowOrder(len(packed), ROWS_PER_STEP, seed=0)
    for step in range(told.steps):
        samples = order.samples(step)
        batch = kind.batch(packed.rows([s.row for s in samples]), [s.row for s in samples], [s.epoch for s in samples])
        loss = module(batch) / batch.supervised_tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = told.learning_rate_at(step)
        optimizer.step()
        yield loss.item(), norm.item(), batch.batch_hash


def told(**changes: Any) -> TrainSettings:
    keys = {"steps": STEPS, "learning_rate": LEARNING_RATE, "warmup_steps": 5, "final_share": 0.05}
    return settings(**{**keys, **changes})


def test_the_job_ends_well_and_its_loss_falls(uninterrupted: TrainingRun) -> None:
    assert uninterrupted.code == 0
    losses = [line["loss"] for line in uninterrupted.metrics]
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_a_worker_under_deepspeed_takes_the_steps_of_a_plain_loop(
    uninterrupted: TrainingRun, tiny_model: Path, training_rows: Path
) -> None:
    for line, (loss, norm, name) in zip(
        uninterrupted.metrics, plain_steps(tiny_model, training_rows, told()), strict=True
    ):
        if line["step"] > PLAIN_STEPS:
            break
        assert line["batch_hash"] == name
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_two_workers_take_the_steps_of_a_plain_loop(
    two_workers: TrainingRun, tiny_model: Path, training_rows: Path
) -> None:
    """Also with unequal shares: of five rows one worker has two and an empty micro-batch."""
    assert two_workers.code == 0
    expected = plain_steps(tiny_model, training_rows, told(steps=6, schedule="constant"))
    for line, (loss, norm, name) in zip(two_workers.metrics, expected, strict=True):
        assert line["batch_hash"] == name
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_one_worker_and_two_begin_with_the_same_loss_on_the_same_batch(
    uninterrupted: TrainingRun, two_workers: TrainingRun
) -> None:
    one, two = uninterrupted.metrics[0], two_workers.metrics[0]
    assert one["batch_hash"] == two["batch_hash"]
    assert one["supervised_tokens"] == two["supervised_tokens"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)


def test_the_control_trains_on_the_same_rows_and_stays_an_autoregressive_model(
    control: TrainingRun, uninterrupted: TrainingRun, tiny_model: Path, training_rows: Path
) -> None:
    assert control.code == 0
    expected = next(plain_steps(tiny_model, training_rows, told(), "next_token"))
    assert control.metrics[0]["loss"] == pytest.approx(expected[0], rel=2e-2)
    assert control.metrics[-1]["loss"] < control.metrics[0]["loss"]
    counts = [[line["supervised_tokens"] for line in run.metrics[:6]] for run in (control, uninterrupted)]
    assert counts[0] == counts[1]
    config = json.loads((control.output / "model" / "config.json").read_text())
    assert "block_diffusion" not in config
    assert config["dtype"] == "bfloat16"
    assert load_backbone(control.output / "model").block_diffusion is None


def test_metrics_have_one_line_a_step_with_every_figure(uninterrupted: TrainingRun) -> None:
    names = {"step", "loss", "supervised_tokens", "batch_hash", "learning_rate", "grad_norm", "tokens_per_second"}
    names |= {"seconds", "time", "loss_by_noise", "time_shares"}  # and no mfu: a CPU's peak is not stated
    assert [line["step"] for line in uninterrupted.metrics] == list(range(1, STEPS + 1))
    assert all(set(line) == names and all(map(finite, line.values())) for line in uninterrupted.metrics)
    assert len({line["batch_hash"] for line in uninterrupted.metrics}) == STEPS


def finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str) or math.isfinite(value)


def test_the_result_loads_in_transformers_as_its_base_class(uninterrupted: TrainingRun) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(uninterrupted.output / "model", output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.block_diffusion["block_size"] == 8
    assert model.config.block_diffusion["trained_context_length"] == 48


def test_the_result_has_learnt_what_the_last_loss_says(uninterrupted: TrainingRun, training_rows: Path) -> None:
    """The written weights, not others, give the loss that the training ended with."""
    backbone, packed = load_backbone(uninterrupted.output / "model"), PackedRows(str(training_rows))
    assert backbone.block_diffusion is not None
    kind = make_objective(
        "block_diffusion",
        block_size=8,
        mask_token_id=backbone.block_diffusion.mask_token_id,
        seed=0,
        layers=backbone.layers,
    )
    batch = kind.batch(packed.rows(range(ROWS)), range(ROWS), 0)
    with torch.no_grad():
        loss = float(TrainingModel(backbone.model)(batch)) / batch.supervised_tokens
    last = [line["loss"] for line in uninterrupted.metrics[-5:]]
    assert loss == pytest.approx(sum(last) / 5, rel=0.25)


def test_the_output_holds_what_was_promised_and_nothing_half_written(uninterrupted: TrainingRun) -> None:
    names = {path.name for path in uninterrupted.output.iterdir()}
    assert names == {"checkpoints", "loss.png", "manifest.json", "metrics.jsonl", "model", "tensorboard"}
    kept = sorted(path.name for path in (uninterrupted.output / "checkpoints").iterdir())
    assert kept == ["step_50", "step_60"]
    commit = json.loads((uninterrupted.output / "checkpoints" / "step_60" / "COMMIT.json").read_text())
    assert (commit["step"], commit["workers"]) == (60, 1)
    figures = json.loads((uninterrupted.output / "manifest.json").read_text())["figures"]
    assert (figures["steps"], figures["rows"], figures["epochs"]) == (60, 12, 25.0)


def test_the_same_command_again_trains_nothing(uninterrupted: TrainingRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = (uninterrupted.output / "metrics.jsonl").stat().st_mtime_ns
    assert adapt(uninterrupted.argv, uninterrupted.output).code == 0
    assert (uninterrupted.output / "metrics.jsonl").stat().st_mtime_ns == before
    assert "is finished: nothing to train" in capsys.readouterr().out


def test_a_changed_key_on_the_same_output_is_refused_by_name(
    uninterrupted: TrainingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt([*uninterrupted.argv, "--train.learning_rate", "0.1"], uninterrupted.output).code == 2
    assert "was begun with train.learning_rate 0.005, this run has 0.1" in capsys.readouterr().err


def test_what_a_worker_finds_wrong_ends_the_job_with_its_sentence(
    local_ray: None, tmp_path: Path, training_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model lacks a tensor, which only loading it shows."""
    from safetensors.torch import load_file, save_file

    from tests.tiny import build_tiny_model

    model = build_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    output = tmp_path / "out"
    assert adapt(arguments(model, training_rows, output), output).code == 2
    errors = capsys.readouterr().err
    assert "lacks weight model.layers.1.mlp.down_proj.weight" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert read_metrics(output) == []


def test_a_model_that_does_not_load_as_trained_is_not_published(tiny_model: Path, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_model)
    weights = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    missing = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    with pytest.raises(JobError, match="has no weights for"):
        publish_model(backbone, missing, str(tmp_path), lambda: None)
    assert list(tmp_path.iterdir()) == []
    publish_model(backbone, weights, str(tmp_path), lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
