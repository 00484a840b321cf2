"""Every ZeRO stage, token budgets, adapters and broken steps: on two gloo ranks they take the steps of a plain loop.

All runs share two processes (tests/gloo.py), so the file costs one start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.training.consolidate import open_checkpoint
from actors.training.rows import PackedRows, RowFormat, RowOrder
from actors.training.settings import TrainSettings
from actors.training.shards import SLACK_BYTES, checkpoint_bytes
from model.adapters import LoraSettings
from model.backbone import load_backbone, make_block_diffusion
from model.corruption import IGNORED
from model.layout import RowBatch
from model.objective import TrainingModel, make_objective
from tests.actors.training.test_train_settings import settings
from tests.gloo import train_all
from tests.packed import counting_rows, write_rows
from tests.tiny import build_tiny_model
from tests.training_runs import read_metrics, timeless

pytestmark = pytest.mark.slow
MASK, STEPS, BROKEN_ROW, BROKEN_TOKEN = 3, 4, 7, 200
FORM = RowFormat(block_size=8, context_length=48, mask_token_id=MASK)
ENTRY = {"block_size": 8, "mask_token_id": MASK, "sub_block_size": 4}
LORA = LoraSettings(rank=4, alpha=8.0, targets=("all-linear",))
STAGES = [*((stage, "float32") for stage in range(4)), (0, "bfloat16"), (1, "bfloat16")]  # all kinds of optimizer


class Runs:
    """The settings of all runs, and what became of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = build_tiny_model(root / "adapted", block_diffusion=ENTRY)
        self.broken = _with_nan(build_tiny_model(root / "broken", block_diffusion=ENTRY, tie_word_embeddings=False))
        rows = counting_rows(12, mask_token_id=MASK)
        rows.input_ids[BROKEN_ROW, 2] = BROKEN_TOKEN  # a prompt's token, no label
        self.rows = write_rows(root / "rows", rows, FORM)
        self.silent = write_rows(root / "silent", _without_labels(rows, 4), FORM)
        self.settings = self._settings()
        self.said = train_all(self.settings)

    def _settings(self) -> dict[str, TrainSettings]:
        broken = {"model": str(self.broken), "on_nan": "skip", "steps": 6}
        lora = {"lora": LORA, "activation_checkpointing": True}
        runs: dict[str, dict[str, Any]] = {
            **{f"stage {stage} {dtype}": {**broken, "zero_stage": stage, "dtype": dtype} for stage, dtype in STAGES},
            "tokens": {"micro_tokens": 150, "zero_stage": 2},
            "ar": {"ar_loss_weight": 0.5, "micro_tokens": 200, "zero_stage": 1},
            "one view": {
                "complementary_masks": False, "document_padding": False, "document_mask": False, "zero_stage": 0,
            },
            "silent": {"rows": str(self.silent)},
            "lora": lora,
            "lora half": {**lora, "steps": 2},
            "lora rest": {**lora, "output": str(self.root / "lora half")},
            "stop": {"model": str(self.broken)},
        }  # fmt: skip
        return {name: self._told(name, **changes) for name, changes in runs.items()}

    def _told(self, name: str, **changes: Any) -> TrainSettings:
        values = {
            "model": str(self.model), "rows": str(self.rows), "output": str(self.root / name), "workers": 2,
            "steps": STEPS, "rows_per_step": 5, "micro_rows": 2, "learning_rate": 5e-3, "warmup_steps": 2,
            "schedule": "constant", "dtype": "float32", "weight_decay": 0.1, "checkpoint_every": 2,
        }  # fmt: skip
        return settings(**{**values, **changes})

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.output(name))

    def output(self, name: str) -> Path:
        return Path(self.settings[name].output)


def _with_nan(folder: Path) -> Path:
    """A model that a certain token breaks."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN_TOKEN] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _without_labels(rows: RowBatch, keep: int) -> RowBatch:
    """Only the first `keep` rows are supervised."""
    labels = rows.labels.clone()
    labels[keep:] = IGNORED
    return replace(rows, labels=labels)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("options"))


def plain(told: TrainSettings) -> Iterator[dict[str, Any]]:
    """What each step of a loop without DeepSpeed, accumulation or sharing gives, in float32; broken steps are None."""
    backbone, packed = load_backbone(told.model), PackedRows(told.rows)
    backbone = make_block_diffusion(backbone, block_size=8, trained_context_length=48)
    kind = make_objective(
        told.objective, block_size=8, mask_token_id=MASK, seed=0, layers=backbone.layers, **told.objective_options
    )
    causal = make_objective("next_token", block_size=8, mask_token_id=MASK, seed=0, layers=backbone.layers)
    module = TrainingModel(backbone.model).train()
    named = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": told.weight_decay},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, told.beta2))
    order = RowOrder(len(packed), told.rows_per_step, seed=0)
    for step in range(told.steps):
        samples = order.samples(step)
        ids = [s.row for s in samples]
        batch = kind.batch(packed.rows(ids), ids, [s.epoch for s in samples])
        loss = module(batch) / max(batch.supervised_tokens, 1)
        with torch.no_grad():
            beside = module(causal.batch(packed.rows(ids), ids, 0)) / max(batch.supervised_tokens, 1)
        if not torch.isfinite(loss):
            yield {"loss": None, "grad_norm": None, "batch_hash": batch.batch_hash}
            continue
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), told.clip).item()
        for group in optimizer.param_groups:
            group["lr"] = told.learning_rate_at(step)
        optimizer.step()
        yield {
            "loss": loss.item(), "grad_norm": norm, "batch_hash": batch.batch_hash, "ar_loss": beside.item(),
        }  # fmt: skip


def assert_steps(runs: Runs, name: str, *, rel: float = 1e-4) -> None:
    lines, expected = runs.metrics(name), list(plain(runs.settings[name]))
    assert len(lines) == len(expected) == runs.settings[name].steps
    for line, step in zip(lines, expected, strict=True):
        assert line["batch_hash"] == step["batch_hash"]
        for figure, tolerance in (("loss", rel), ("grad_norm", 10 * rel)):
            assert line[figure] == (None if step[figure] is None else pytest.approx(step[figure], rel=tolerance))


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_every_stage_takes_the_steps_of_a_plain_loop_and_leaves_broken_ones_out(
    runs: Runs, stage: int, dtype: str
) -> None:
    """A skipped step changes no weight on any rank: the steps after it are those of a loop that never took it."""
    name = f"stage {stage} {dtype}"
    assert name not in runs.said
    assert_steps(runs, name, rel=1e-4 if dtype == "float32" else 3e-3)
    skipped = [line.get("skipped") for line in runs.metrics(name)]
    assert skipped == [[BROKEN_ROW] if BROKEN_ROW in samples_of(step) else None for step in range(6)]
    assert 0 < skipped.count(None) < 6 and skipped[-1] is None
    assert "NaN" not in (runs.output(name) / "metrics.jsonl").read_text(), "every line is JSON for every reader"
    if dtype == "float32":
        losses, of_stage_3 = ([line["loss"] for line in runs.metrics(x)] for x in (name, "stage 3 float32"))
        assert losses == [loss if loss is None else pytest.approx(loss, rel=1e-5) for loss in of_stage_3]


@pytest.mark.parametrize("name", ["tokens", "ar", "one view", "silent"])
def test_token_budgets_and_objectives_take_the_steps_of_a_plain_loop(runs: Runs, name: str) -> None:
    """`silent`: most rows have nothing supervised, so that whole micro-batches and once a whole rank have not."""
    assert name not in runs.said
    assert_steps(runs, name)
    assert load_backbone(runs.output(name) / "model").block_diffusion is not None


def test_the_next_token_part_of_the_loss_is_told_apart_over_all_ranks_and_forwards(runs: Runs) -> None:
    lines = runs.metrics("ar")
    expected = [step["ar_loss"] for step in plain(runs.settings["ar"])]
    assert [line["ar_loss"] for line in lines] == pytest.approx(expected, rel=1e-4)
    assert all("ar_loss" not in line for line in runs.metrics("tokens"))


def test_a_broken_step_names_its_sample_and_stops_the_run(runs: Runs) -> None:
    assert f"is nan (samples {BROKEN_ROW}): look at these rows of" in runs.said["stop"]
    assert len(runs.metrics("stop")) == first_broken_step(runs)
    assert not (runs.output("stop") / "model").exists()


def first_broken_step(runs: Runs) -> int:
    steps = [samples_of(step) for step in range(6)]
    return next(step for step, ids in enumerate(steps) if BROKEN_ROW in ids)


def samples_of(step: int) -> list[int]:
    return [sample.row for sample in RowOrder(12, 5, seed=0).samples(step)]


def test_an_adapter_is_what_a_server_merges_and_the_model_is_that_merge(runs: Runs) -> None:
    assert "lora" not in runs.said
    output, base = runs.output("lora"), load_backbone(runs.model)
    merged = load_backbone(output / "model")
    served = load_backbone(runs.model, adapter=output / "adapter")
    assert merged.block_diffusion == served.block_diffusion != base.block_diffusion
    for (name, one), (_, other), (_, before) in zip(
        *(x.model.named_parameters() for x in (merged, served, base)), strict=True
    ):
        assert torch.equal(one, other), name
        assert torch.equal(one, before) == ("proj" not in name), name
    losses = [line["loss"] for line in runs.metrics("lora")]
    assert losses[0] == pytest.approx(next(plain(runs.settings["tokens"]))["loss"], rel=1e-5), "it starts as the base"
    assert losses[-1] < losses[0]


def test_an_adapter_goes_on_from_its_checkpoint_as_if_nothing_had_been(runs: Runs) -> None:
    assert not {"lora half", "lora rest"} & set(runs.said)
    assert timeless(runs.metrics("lora rest")) == timeless(runs.metrics("lora"))
    files = [runs.output(name) / "adapter" / "adapter_model.safetensors" for name in ("lora", "lora rest")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", [*(f"stage {stage} {dtype}" for stage, dtype in STAGES), "lora"])
def test_the_last_checkpoint_holds_the_weights_of_the_model_that_the_run_wrote(runs: Runs, name: str) -> None:
    """Two ranks' shards put together, an adapter merged: what the export job reads."""
    expected = load_file(runs.output(name) / "model" / "model.safetensors")
    last = max((runs.output(name) / "checkpoints").iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2]))
    with open_checkpoint(str(last)) as checkpoint:
        weights = checkpoint.weights(next(iter(expected.values())).dtype)
    near = {"rtol": 1e-5, "atol": 1e-6} if name == "lora" else {"rtol": 0.0, "atol": 0.0}
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, equal_nan=True, **near)


@pytest.mark.parametrize("name", [*(f"stage {stage} {dtype}" for stage, dtype in STAGES), "lora"])
def test_a_checkpoint_takes_the_space_that_was_looked_for(runs: Runs, name: str) -> None:
    """Frozen weights have no optimizer state; what shares out less keeps weights beside the master copy."""
    told, output = runs.settings[name], runs.output(name)
    last = max((output / "checkpoints").iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2]))
    taken = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    counts = [sum(p.numel() for p in load_backbone(told.model).model.parameters()), 0]
    if told.lora:
        adapter = load_file(output / "adapter" / "adapter_model.safetensors")
        counts = [sum(tensor.numel() for tensor in adapter.values()), counts[0]]
    width = 2 if told.dtype == "bfloat16" else 4
    state = checkpoint_bytes(*counts, zero_stage=told.zero_stage, width=width) - SLACK_BYTES
    fixed = 260_000  # of two ranks: names, shapes, the tokenizer, two scripts of DeepSpeed
    assert state < taken < state + fixed, (state, taken)
