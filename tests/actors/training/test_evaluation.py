"""Evaluations during training: the right loss, the right weights, and a run that is none the wiser.

The runs are those of two gloo ranks (tests/gloo.py); all share one start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from actors.training.rows import PackedRows
from actors.training.samples import prompts_of
from actors.training.settings import EvaluationSettings
from model.adapters import LoraSettings
from model.backbone import Backbone, load_backbone
from model.config import DecodeConfig
from model.corruption import IGNORED
from model.decoding import GenerationRequest
from model.errors import UserError
from model.layout import RowBatch
from model.objective import held_out_loss, make_objective
from pipelines.assessment.held_out import each_row
from pipelines.training.evaluating import evaluation_settings
from pipelines.training.section import TrainSection
from tests.actors.training.test_train_settings import settings
from tests.gloo import train_all
from tests.packed import counting_rows, write_rows
from tests.tiny import VOCAB_SIZE, build_tiny_model
from tests.training_runs import FORM, MASK, read_metrics, timeless, write_training_rows

EVERY, STEPS, ROWS, SAMPLES, TOKENS = 4, 6, 3, 2, 10
LORA = LoraSettings(rank=4, alpha=8.0, targets=("all-linear",))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training rows with four rows held out."""
    folder = write_training_rows(tmp_path_factory.mktemp("evaluation") / "rows")
    write_rows(folder / "held_out", counting_rows(4, mask_token_id=MASK), FORM)
    return folder


@pytest.fixture(scope="module")
def runs(tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs by name: a run that is not evaluated, the same one evaluated, and others with what evaluations must see
    through: a next-token loss beside the masked one, the control, an adapter."""
    root = tmp_path_factory.mktemp("evaluation")
    evaluation = EvaluationSettings(EVERY, str(rows / "held_out"), ROWS, SAMPLES, TOKENS)
    changes: dict[str, dict[str, Any]] = {
        "plain": {"evaluation": EvaluationSettings()},
        "evaluated": {},
        "whole": {"zero_stage": 1, "dtype": "bfloat16"},
        "causal": {"ar_loss_weight": 0.5},
        "control": {"objective": "next_token"},
        "adapter": {"model": str(spared(root / "spared")), "lora": LORA},
    }
    common = {
        "model": str(tiny_model), "rows": str(rows), "workers": 2, "steps": STEPS, "rows_per_step": 5, "micro_rows": 2,
        "learning_rate": 5e-3, "warmup_steps": 2, "schedule": "constant", "dtype": "float32", "checkpoint_every": 3,
        "evaluation": evaluation,
    }  # fmt: skip
    told = {name: settings(**{**common, "output": str(root / name), **more}) for name, more in changes.items()}
    said = train_all(told)
    assert said == {}
    return root


def spared(folder: Path) -> Path:
    """A model that knows the rows' mask token: an adapter cannot add one."""
    entry = {"block_size": FORM.block_size, "mask_token_id": MASK, "sub_block_size": 4}
    return build_tiny_model(folder, vocab_size=VOCAB_SIZE + 1, block_diffusion=entry)


def trained(runs: Path, name: str) -> Backbone:
    dtype = torch.bfloat16 if name == "whole" else torch.float32
    return load_backbone(runs / name / "model", dtype=dtype)


def held_out(rows: Path) -> RowBatch:
    return PackedRows(str(rows / "held_out")).rows(range(ROWS))


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_evaluations_change_no_bit_of_a_run(runs: Path) -> None:
    lines = timeless(read_metrics(runs / "evaluated"))
    without = [{name: value for name, value in line.items() if name != "held_out_loss"} for line in lines]
    assert len(lines) == STEPS
    assert without == timeless(read_metrics(runs / "plain"))
    ours, theirs = (load_file(runs / name / "model" / "model.safetensors") for name in ("evaluated", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluated", "whole", "causal", "control", "adapter"])
def test_the_held_out_loss_is_that_of_the_written_model(runs: Path, rows: Path, name: str) -> None:
    losses = {line["step"]: line.get("held_out_loss") for line in read_metrics(runs / name)}
    assert [step for step, loss in losses.items() if loss is not None] == [EVERY, STEPS]  # on schedule, and at the end
    model = trained(runs, name)
    objective = "next_token" if name == "control" else "block_diffusion"
    kind = make_objective(objective, block_size=8, mask_token_id=MASK, seed=0, layers=model.layers)
    expected = held_out_loss(model.model, kind, each_row(held_out(rows)))
    assert losses[STEPS] == pytest.approx(expected, rel=1e-3 if name == "whole" else 1e-5)
    assert losses[EVERY] != pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluated", "causal", "control", "adapter"])
def test_the_last_samples_are_what_the_written_model_answers(runs: Path, rows: Path, name: str) -> None:
    lines, model = samples(runs / name), trained(runs, name)
    steps = [(step, number) for step in (EVERY, STEPS) for number in range(SAMPLES)]
    assert [(line["step"], line["sample"]) for line in lines] == steps
    prompts = prompts_of(held_out(rows), SAMPLES, longest=100)
    decode = DecodeConfig(mode="ar" if name == "control" else "diffusion")
    requests = [
        GenerationRequest(str(i), one.prompt, TOKENS, decode=decode, stop_token_ids=model.stop_token_ids)
        for i, one in enumerate(prompts)
    ]
    answers = generate_all(Engine(model, EngineConfig(max_rows=SAMPLES, kernels=False)), requests)
    assert [line["token_ids"] for line in lines[SAMPLES:]] == [list(answer.token_ids) for answer in answers]
    assert [line["text"] for line in lines[SAMPLES:]] == [answer.text for answer in answers]
    assert [line["reference"] for line in lines[:SAMPLES]] == [model.tokenizer.decode(one.reference) for one in prompts]


@pytest.mark.slow
def test_two_workers_spend_time_in_every_phase(runs: Path) -> None:
    for line in read_metrics(runs / "plain"):
        assert sum(line["time_shares"].values()) == pytest.approx(1.0)
        assert all(share > 0 for share in line["time_shares"].values())


def test_prompts_are_the_beginnings_of_the_first_documents_with_an_answer() -> None:
    rows = counting_rows(3, mask_token_id=MASK)
    rows.labels[0, :16] = IGNORED  # its first document has no answer any more
    first, second = prompts_of(rows, 2, longest=4)
    assert first.prompt == tuple(rows.input_ids[0, 16:20].tolist())
    assert first.reference == tuple(rows.input_ids[0, 20:22].tolist())
    assert second.prompt == tuple(rows.input_ids[0, 24:28].tolist())
    assert prompts_of(rows, 2, longest=3) == []


def test_the_schedule_has_its_multiples_and_the_end() -> None:
    told = EvaluationSettings(every=4, rows="r")
    assert [done for done in range(1, 11) if told.due(done, 10)] == [4, 8, 10]
    assert not any(EvaluationSettings().due(done, 10) for done in range(1, 11))


def test_without_being_told_a_run_is_evaluated_as_often_as_saved_where_rows_were_held_out(
    rows: Path, training_rows: Path
) -> None:
    assert evaluation_settings(TrainSection(checkpoint_every=7), str(rows)).every == 7
    assert evaluation_settings(TrainSection(held_out_every=5), str(rows)).every == 5
    assert not evaluation_settings(TrainSection(held_out_every=0), str(rows)).on
    assert not evaluation_settings(TrainSection(), str(training_rows)).on
    with pytest.raises(UserError, match="has no held-out rows"):
        evaluation_settings(TrainSection(held_out_every=5), str(training_rows))
