"""Two towers trained by the job: real workers take the steps of a plain loop, and nothing reaches the context tower.

One run of the job on two workers under ZeRO-3 is shared by most tests; what else there is shares one start of two gloo
ranks (tests/gloo.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.training.checkpoints import Identity
from actors.training.method import BatchMaker
from actors.training.micro_batches import MicroBatches
from actors.training.ranks import Ranks
from actors.training.rows import PackedRows, RowOrder
from actors.training.samples import prompts_of
from actors.training.settings import EvaluationSettings, TrainSettings, TwoTowerSettings
from actors.training.two_tower import TwoTowers
from model.backbone import load_backbone
from model.errors import UserError
from model.layout import RowBatch
from model.two_tower.decoding import TowerRequest, write_blocks
from model.two_tower.folder import TwoTowerModel, load_two_tower, make_two_tower
from model.two_tower.training import TwoTowerObjective, TwoTowerTraining, held_out_bound, read_context
from pipelines.assessment.held_out import each_row
from pipelines.export import ExportConfig
from pipelines.export import run as export
from tests.actors.training.test_train_settings import settings
from tests.gloo import train_all
from tests.packed import counting_rows, write_rows
from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.towers import tiny_decoder
from tests.training_runs import (
    FORM,
    MASK,
    MICRO_ROWS,
    ROWS_PER_STEP,
    TrainingRun,
    adapt,
    arguments,
    read_metrics,
    timeless,
    write_training_rows,
)

pytestmark = pytest.mark.slow
STEPS, SAVED, FIRST_STEPS, RATE = 6, 3, 2, 5e-3
BLOCK, FIRST_BLOCK = 4, 8
HELD_OUT_ROWS, SAMPLES, TOKENS = 3, 2, 10


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_training_rows(tmp_path_factory.mktemp("two_tower") / "rows")
    write_rows(folder / "held_out", counting_rows(4, mask_token_id=MASK), FORM)
    return folder


@pytest.fixture(scope="module")
def trained(local_ray: None, tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The job on two workers with larger blocks first; shares are unequal, one micro-batch is empty."""
    output = tmp_path_factory.mktemp("two_tower") / "trained"
    argv = arguments(
        tiny_model, rows, output, workers=2, steps=STEPS, checkpoint_every=SAVED, schedule="constant",
        held_out_rows=HELD_OUT_ROWS, samples=SAMPLES, sample_tokens=TOKENS,
    )  # fmt: skip
    keys = {"block_size": BLOCK, "first_block_size": FIRST_BLOCK, "first_steps": FIRST_STEPS}
    words = [word for name, value in keys.items() for word in (f"--two_tower.{name}", str(value))]
    return adapt([*argv, "--objective", "two_tower", *words], output)


def told(**changes: Any) -> TrainSettings:
    """The settings of that run."""
    keys: dict[str, Any] = {
        "objective": "two_tower", "two_tower": TwoTowerSettings(BLOCK, FIRST_BLOCK, FIRST_STEPS), "workers": 2,
        "steps": STEPS, "rows_per_step": ROWS_PER_STEP, "micro_rows": MICRO_ROWS, "learning_rate": RATE,
        "warmup_steps": 5, "schedule": "constant", "weight_decay": 0.1, "dtype": "float32", "checkpoint_every": SAVED,
    }  # fmt: skip
    return settings(**{**keys, **changes})


@pytest.fixture(scope="module")
def runs(trained: TrainingRun, tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs by name: the run taken up again at its first checkpoint, the run with activations recomputed, a hybrid of
    Mamba, attention and experts, experts with a balance loss in bfloat16, a token shift with complementary masks."""
    root = tmp_path_factory.mktemp("two_tower")
    (root / "resumed" / "checkpoints").mkdir(parents=True)
    (root / "resumed" / "checkpoints" / f"step_{SAVED}").symlink_to(checkpoint(trained, SAVED))
    commit = json.loads((checkpoint(trained, SAVED) / "COMMIT.json").read_text())
    evaluation = EvaluationSettings(SAVED, str(rows / "held_out"), HELD_OUT_ROWS, SAMPLES, TOKENS)
    sharded = TwoTowerSettings(BLOCK, FIRST_BLOCK, FIRST_STEPS, context_weights="sharded")
    both_views = TwoTowerSettings(BLOCK, token_shift=True, complementary_masks=True)
    small = {"steps": 3, "two_tower": TwoTowerSettings(BLOCK, context="reference"), "evaluation": evaluation}
    changes: dict[str, dict[str, Any]] = {
        "resumed": {"identity": Identity(commit["identity"], commit["values"]), "evaluation": evaluation},
        "recomputed": {"activation_checkpointing": True, "steps": 4},
        "sharded": {"two_tower": sharded, "steps": 4, "evaluation": evaluation, "zero_stage": 1},
        "views": {"two_tower": both_views, "steps": 2, "evaluation": evaluation, "zero_stage": 2},
        "hybrid": {**small, "model": str(saved_decoder("nemotron_h", root / "models" / "hybrid"))},
        "experts": {
            "steps": 2, "dtype": "bfloat16", "zero_stage": 1, "micro_tokens": 120,
            "two_tower": TwoTowerSettings(BLOCK, balance_weight=0.1),
            "model": str(saved_decoder("qwen3_moe", root / "models" / "experts")),
        },
    }  # fmt: skip
    common = {"model": str(tiny_model), "rows": str(rows)}
    said = train_all({name: told(**{**common, "output": str(root / name), **more}) for name, more in changes.items()})
    assert said == {}
    return root


def saved_decoder(kind: str, folder: Path) -> Path:
    """A tiny random model whose vocabulary has the rows' mask token to spare."""
    tiny_decoder(kind, torch.float32, vocab_size=VOCAB_SIZE + 1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def checkpoint(run: TrainingRun, step: int) -> Path:
    return run.output / "checkpoints" / f"step_{step}"


def begun(folder: Path) -> TwoTowerModel:
    """The towers as the workers make them: the time conditioning is drawn under the run's seed."""
    torch.manual_seed(0)
    return make_two_tower(load_backbone(folder), block_size=BLOCK)


def plain_losses(model: TwoTowerModel, rows: Path, settings: TrainSettings) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step without Ray, DeepSpeed, accumulation or sharing."""
    towers, packed = model.towers, PackedRows(str(rows))
    module = TwoTowerTraining(towers.writer()).train()
    groups = [
        {"params": [p for p in module.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    order, found = RowOrder(len(packed), ROWS_PER_STEP, seed=0), []
    assert settings.two_tower is not None
    for step in range(settings.steps):
        samples = order.samples(step)
        size = settings.two_tower.block_size_at(step)
        maker = TwoTowerObjective(
            size,
            towers.config.mask_token_id,
            0,
            towers.context.recurrent,
            settings.two_tower.token_shift,
            settings.two_tower.complementary_masks,
        )
        batch = maker.batch(packed.rows([s.row for s in samples]), [s.row for s in samples], [s.epoch for s in samples])
        loss = module(batch, read_context(towers.context, batch)) / batch.scored_tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def held_out(rows: Path) -> RowBatch:
    return PackedRows(str(rows / "held_out")).rows(range(HELD_OUT_ROWS))


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    model = output / "model"
    return {**load_file(model / "denoiser" / "model.safetensors"), **load_file(model / "time_conditioning.safetensors")}


def test_two_workers_under_zero_3_take_the_steps_of_a_plain_loop(
    trained: TrainingRun, tiny_model: Path, rows: Path
) -> None:
    assert trained.code == 0 and len(trained.metrics) == STEPS
    expected = plain_losses(begun(tiny_model), rows, told())
    for line, (loss, norm) in zip(trained.metrics, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert 0 < line["scored_tokens"] < line["supervised_tokens"]
        assert any(level is not None for level in line["loss_by_noise"])


def test_a_hybrid_takes_the_steps_of_a_plain_loop_on_shared_out_weights(runs: Path, rows: Path) -> None:
    expected = plain_losses(begun(runs / "models" / "hybrid"), rows, told(steps=3, two_tower=TwoTowerSettings(BLOCK)))
    found = [(line["loss"], line["grad_norm"]) for line in read_metrics(runs / "hybrid")]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-3)


def test_with_a_token_shift_and_complementary_masks_too(runs: Path, tiny_model: Path, rows: Path) -> None:
    """And the model that it writes knows of the shift; without one its first tokens would be drafted by chance."""
    run = told(steps=2, two_tower=TwoTowerSettings(BLOCK, token_shift=True, complementary_masks=True))
    model = begun(tiny_model)
    found = [(line["loss"], line["grad_norm"]) for line in read_metrics(runs / "views")]
    expected = plain_losses(model, rows, run)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-3)
    loaded = load_two_tower(runs / "views" / "model")
    assert loaded.towers.config.token_shift
    shifted = TwoTowerObjective(BLOCK, loaded.towers.config.mask_token_id, 0, document_rows=False, token_shift=True)
    bound = held_out_bound(loaded.towers, shifted, each_row(held_out(rows))).bound
    assert read_metrics(runs / "views")[-1]["held_out_bound"] == pytest.approx(bound, rel=1e-4)


def test_a_run_taken_up_again_repeats_every_bit(trained: TrainingRun, runs: Path) -> None:
    again = timeless(read_metrics(runs / "resumed"))
    assert [line["step"] for line in again] == list(range(SAVED + 1, STEPS + 1))
    assert again == timeless(trained.metrics)[SAVED:]
    ours, theirs = weights_of(runs / "resumed"), weights_of(trained.output)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_recomputing_activations_changes_nothing(trained: TrainingRun, runs: Path) -> None:
    for one, other in zip(read_metrics(runs / "recomputed"), trained.metrics, strict=False):
        assert one["batch_hash"] == other["batch_hash"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_a_context_tower_that_workers_share_out_reads_the_same(
    trained: TrainingRun, runs: Path, tiny_model: Path
) -> None:
    lines = read_metrics(runs / "sharded")
    assert len(lines) == 4
    for one, other in zip(lines, trained.metrics, strict=False):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert lines[SAVED - 1]["held_out_bound"] == pytest.approx(trained.metrics[SAVED - 1]["held_out_bound"], rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    context = load_file(runs / "sharded" / "model" / "context" / "model.safetensors")
    assert all(torch.equal(base[name], tensor) for name, tensor in context.items())


def test_recurrent_layers_are_not_shared_out(runs: Path, rows: Path) -> None:
    settings = told(
        model=str(runs / "models" / "hybrid"), rows=str(rows), two_tower=TwoTowerSettings(context_weights="sharded")
    )
    with pytest.raises(UserError, match=r"has recurrent layers, .* leave --two_tower.context_weights sharded out"):
        TwoTowers(settings, FORM, lambda batch, losses: None)


def test_experts_in_bfloat16_with_their_balance_loss_and_a_budget_of_tokens_train(runs: Path) -> None:
    first, last = read_metrics(runs / "experts")
    # A fresh model's loss is about ln(vocabulary); its experts' balance loss, 2 of 4 in use, is at least 2.
    assert first["loss"] > 0.2 and last["loss"] != first["loss"]
    assert load_two_tower(runs / "experts" / "model", dtype=torch.bfloat16).towers.denoiser is not None


def test_the_written_model_is_the_base_beside_a_denoiser_that_moved(trained: TrainingRun, tiny_model: Path) -> None:
    model = load_two_tower(trained.output / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    context = model.towers.context.causal_lm.state_dict()
    assert base.keys() == context.keys()
    assert all(torch.equal(base[name], context[name]) for name in base)  # no gradient reached it
    writer = model.towers.writer()
    assert any(not torch.equal(base[n], p) for n, p in writer.causal_lm.named_parameters() if p.shape == base[n].shape)
    assert writer.time.projection.weight.any()
    assert model.towers.config.block_size == BLOCK and model.towers.config.trained_context_length == 48
    assert {path.name for path in (trained.output / "model").iterdir()} == {
        "context", "denoiser", "time_conditioning.safetensors", "two_tower.json"
    }  # fmt: skip


def test_a_reference_names_the_base_model_and_copies_nothing(runs: Path) -> None:
    folder = runs / "hybrid" / "model"
    entry = json.loads((folder / "two_tower.json").read_text())
    assert entry["context"] == str(runs / "models" / "hybrid") and entry["context_revision"]
    assert not (folder / "context").exists()


def test_checkpoints_hold_the_denoiser_and_its_time_conditioning_only(trained: TrainingRun, tiny_model: Path) -> None:
    shards = sorted((checkpoint(trained, STEPS) / "zero").glob("zero_pp_rank_*_model_states.pt"))
    shapes = torch.load(shards[0], weights_only=False)["param_shapes"]
    names = {name for group in shapes for name in group}
    assert {name.split(".")[1] for name in names} == {"causal_lm", "time"}
    assert len(names) == len(list(begun(tiny_model).towers.writer().parameters()))


@pytest.mark.parametrize("name", ["trained", "hybrid"])
def test_evaluations_give_the_bound_of_the_written_model(
    trained: TrainingRun, runs: Path, rows: Path, name: str
) -> None:
    output = trained.output if name == "trained" else runs / name
    by_step = {line["step"]: line for line in read_metrics(output) if "held_out_bound" in line}
    assert sorted(by_step) == ([SAVED, STEPS] if name == "trained" else [3])
    towers = load_two_tower(output / "model").towers
    maker = TwoTowerObjective(BLOCK, MASK, 0, towers.context.recurrent)
    expected = held_out_bound(towers, maker, each_row(held_out(rows)))
    last = by_step[max(by_step)]
    assert last["held_out_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert last["held_out_bound"] == pytest.approx(expected.bound, rel=1e-5)
    assert last["held_out_perplexity"] == pytest.approx(float(torch.tensor(expected.bound).double().exp()), rel=1e-3)


def test_samples_are_what_the_written_model_answers(trained: TrainingRun, rows: Path) -> None:
    lines = [json.loads(line) for line in (trained.output / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["sample"]) for line in lines] == [
        (s, n) for s in (SAVED, STEPS) for n in range(SAMPLES)
    ]
    model = load_two_tower(trained.output / "model")
    prompts = prompts_of(held_out(rows), SAMPLES, longest=100)
    requests = [TowerRequest(p.prompt, TOKENS, stop_token_ids=model.context.stop_token_ids) for p in prompts]
    with torch.no_grad():
        answers = write_blocks(model.towers, requests)
    assert [line["token_ids"] for line in lines[-SAMPLES:]] == [list(answer.token_ids) for answer in answers]


def test_a_checkpoint_of_two_towers_is_not_exported_as_a_model(trained: TrainingRun, tmp_path: Path) -> None:
    config = ExportConfig(model=str(checkpoint(trained, STEPS)), output=str(tmp_path / "out"))
    with pytest.raises(UserError, match="holds the denoiser of two towers"):
        export(config)


def test_no_division_of_a_step_changes_its_batch(rows: Path) -> None:
    """Times and masks follow from sample and epoch: any micro-batch size gives the same loss terms."""

    class Alone:
        def objective_at(self, step: int) -> BatchMaker:
            return TwoTowerObjective(BLOCK, MASK, 0, document_rows=False)

    found = set()
    for micro_rows, micro_tokens in ((1, None), (2, None), (5, None), (1, 150)):
        parts = replace(told(workers=1), micro_rows=micro_rows, micro_tokens=micro_tokens)
        batches = MicroBatches(parts, PackedRows(str(rows)), Alone(), Ranks(0, 1, 0, None))  # type: ignore[arg-type]
        micro = batches.of(1)
        times = torch.cat([one.batch.noise for one in micro if one.batch.scored_tokens]).sort().values  # type: ignore[union-attr]
        found.add((sum(one.batch.scored_tokens for one in micro), tuple(times.tolist())))
    assert len(found) == 1
