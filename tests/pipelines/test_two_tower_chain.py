"""Two towers from packed rows to the report: adapt with its own assessment, as one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training_runs import adapt, arguments

WORDS = (
    *("--objective", "two_tower", "--two_tower.block_size", "4", "--two_tower.denoiser", "lora", "--assess", "true"),
    *("--assessment.tasks", "3", "--assessment.held_out_tasks", "3", "--assessment.max_tokens", "8"),
)


@pytest.mark.slow
def test_adapt_assesses_the_towers_beside_their_base(
    local_ray: None, tiny_model: Path, training_rows: Path, tmp_path: Path
) -> None:
    """None of three answers is right: the plot must do without."""
    argv = arguments(tiny_model, training_rows, tmp_path / "out", steps=2)
    assert adapt([*argv, *WORDS], tmp_path / "out").code == 0
    assess = tmp_path / "out" / "assess"
    figures = json.loads((assess / "manifest.json").read_text())["figures"]
    labels = ["base, AR", "adapted, AR", "adapted, blocks budgeted"]
    assert [one["contender"] for one in figures["contenders"]] == labels
    next_token = [figures["held_out"][role]["next_token"] for role in ("base", "adapted")]
    assert next_token[0] == pytest.approx(
        next_token[1], rel=1 / 267
    )  # the base's head has a mask's logit beside its 267
    assert 0 < figures["held_out"]["adapted"]["bound"] < 20
    report = (assess / "report.md").read_text()
    assert all(label in report for label in labels) and (assess / "accuracy_speed.png").stat().st_size
    answers: dict[str, list[Any]] = {label: [] for label in labels}
    for line in (assess / "answers.jsonl").read_text().splitlines():
        answer = json.loads(line)
        answers[answer["contender"]].append((answer["id"], answer["token_ids"]))
    assert answers["base, AR"] == answers["adapted, AR"], "the context tower is the base model, untouched"
    assert {len(one) for one in answers.values()} == {3}
