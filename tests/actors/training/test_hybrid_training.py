"""A model of Mamba, attention and experts trains under ZeRO-3 as in a plain loop, and is written whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.training.samples import Prompt, write_samples
from model.backbone import load_backbone
from model.recurrence import unclamp_time_steps
from tests.actors.training.test_trainer import plain_steps, told
from tests.hybrid import write_hybrid
from tests.training_runs import TrainingRun, adapt, arguments

pytestmark = pytest.mark.slow
STEPS = 4


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("models") / "hybrid")


@pytest.fixture(scope="module")
def trained(
    local_ray: None, hybrid: Path, training_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingRun:
    output = tmp_path_factory.mktemp("training") / "hybrid"
    argv = arguments(hybrid, training_rows, output, workers=2, steps=STEPS, schedule="constant")
    return adapt([*argv, "--objective", "next_token"], output)


def test_two_workers_take_the_steps_of_a_plain_loop(trained: TrainingRun, hybrid: Path, training_rows: Path) -> None:
    assert trained.code == 0
    expected = plain_steps(hybrid, training_rows, told(steps=STEPS, schedule="constant"), "next_token")
    for line, (loss, norm, name) in zip(trained.metrics, expected, strict=True):
        assert line["batch_hash"] == name
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_the_written_model_has_the_routers_bias(trained: TrainingRun, hybrid: Path) -> None:
    before, after = (dict(load_backbone(path).model.named_buffers()) for path in (hybrid, trained.output / "model"))
    biases = [name for name in before if "e_score_correction_bias" in name]
    assert biases
    assert all(torch.equal(before[name], after[name]) and before[name].any() for name in biases)


def test_its_samples_are_those_of_a_forward_over_the_whole_text_for_every_token(hybrid: Path) -> None:
    backbone = load_backbone(hybrid)
    weights = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    lines = write_samples(backbone, weights, [Prompt((20, 21, 22), (23,)), Prompt((40, 41), (42,))], 5)
    plain = AutoModelForCausalLM.from_pretrained(hybrid, attn_implementation="eager", experts_implementation="eager")
    unclamp_time_steps(plain)
    for line, prompt in zip(lines, ([20, 21, 22], [40, 41]), strict=True):
        ids = list(prompt)
        for _ in line["token_ids"]:
            ids.append(int(plain(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == line["token_ids"]
