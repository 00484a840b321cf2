"""miniature: a small model with a tokenizer of its own, fit for every job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.backbone import Backbone, choose_mask_token, load_backbone
from model.recurrence import is_recurrent
from pipelines.jobkit import main
from pipelines.miniature import MiniatureConfig, run, task_tokenizer
from pipelines.tasks import generate

SMALL = ["--width", "32", "--layers", "2", "--vocabulary", "300", "--tasks", "40"]


def make(output: Path, *words: str) -> int:
    return main("miniature", MiniatureConfig, run, argv=["--output", str(output), *SMALL, *words])


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("miniature") / request.param
    assert make(folder, "--kind", request.param) == 0
    return request.param, folder


def test_it_loads_as_any_other_model(made: tuple[str, Path]) -> None:
    kind, folder = made
    backbone = load_backbone(folder / "model")
    assert is_recurrent(backbone.model) == (kind == "hybrid")
    assert backbone.stop_token_ids == {2}
    assert _mask(backbone) == ("<|mask|>", "named")


def _mask(backbone: Backbone) -> tuple[str, str]:
    rows = backbone.model.get_input_embeddings().num_embeddings
    mask = choose_mask_token(backbone.tokenizer, rows, backbone.stop_token_ids)
    return mask.token, mask.how


def test_the_seed_decides_the_weights(made: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = made
    assert make(tmp_path / "again", "--kind", kind) == 0
    assert make(tmp_path / "other", "--kind", kind, "--seed", "1") == 0
    first, again, other = (
        load_backbone(path / "model").model.get_input_embeddings().weight
        for path in (folder, tmp_path / "again", tmp_path / "other")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first[:256], other[:256])


def test_the_tokenizer_gives_every_text_back_and_keeps_digits_apart() -> None:
    tokenizer = task_tokenizer(400, 60, 0)
    texts = [task.problem.prompt for task in generate("held_out", 31, 0)] + ["ünïcode 12345\n"]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert all(len([c for c in tokenizer.decode([i]) if c.isdigit()]) <= 1 for i in ids)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer(chat).input_ids[0] == 1


def test_a_width_that_does_not_divide_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("miniature", MiniatureConfig, run, argv=["--output", str(tmp_path / "x"), "--width", "40"]) == 2
    assert "--width 40 is not a multiple of 32" in capsys.readouterr().err
