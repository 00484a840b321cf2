"""Adapt from its command line: what it plans, and what it refuses before anything is started or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipelines.adapt import AdaptConfig, plan, run, run_chain
from pipelines.jobkit import main


def adapt(*words: object) -> int:
    return main("adapt", AdaptConfig, run, plan, [str(word) for word in words])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_a_dry_run_prints_the_workers_and_what_deepspeed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--train.workers", 3, "--train.device", "cpu", "--train.rows_per_step", 10, "--train.micro_rows", 2)
    assert adapt("--dry-run", *words) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["plan"]["workers"].startswith("3 workers of")
    assert printed["plan"]["micro_steps_per_worker"] == 2
    assert printed["plan"]["deepspeed"]["zero_optimization"]["stage"] == 3
    assert printed["plan"]["deepspeed"]["gradient_accumulation_steps"] == 2
    assert printed["config"]["train"]["rows_per_step"] == 10


def test_a_dry_run_for_a_cluster_is_decided_there_unless_the_recipe_says_it_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.1:6379")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert adapt("--dry-run") == 0
    assert yaml.safe_load(capsys.readouterr().out)["plan"]["decided"] == "on the cluster"
    assert adapt("--dry-run", "--train.workers", 64, "--train.device", "gpu", "--train.cpus_per_worker", 8) == 0
    assert yaml.safe_load(capsys.readouterr().out)["plan"]["workers"] == "64 workers of 1 GPU and 8 CPUs each"


@pytest.mark.parametrize("multiplies", [False, True])
def test_a_dry_run_says_the_number_format_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, multiplies: bool
) -> None:
    monkeypatch.setattr("pipelines.training.resources.cpu_multiplies_bfloat16", lambda: multiplies)
    assert adapt("--dry-run", "--train.device", "cpu") == 0
    assert yaml.safe_load(capsys.readouterr().out)["plan"]["deepspeed"]["bf16"]["enabled"] is multiplies


def test_a_misspelt_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt("--train.step", 3) == 2
    assert "--train.steps" in last_line(capsys)


def test_an_objective_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt("--objective", "three_tower") == 2
    assert "objective" in last_line(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--two_tower.block_size", 8), "belongs to --objective two_tower: leave it out with block_diffusion"),
        (("--objective", "two_tower", "--train.ar_loss_weight", 0.5), "--train.ar_loss_weight means nothing to"),
        (("--objective", "two_tower", "--train.document_mask", "false"), "--train.document_mask means nothing to"),
        (("--objective", "two_tower", "--train.lora.rank", 4), "--two_tower.denoiser clone the whole"),
        (
            ("--objective", "two_tower", "--two_tower.denoiser", "lora", "--two_tower.context_weights", "sharded"),
            "--two_tower.denoiser lora every worker holds the one copy",
        ),
        (("--objective", "two_tower", "--two_tower.first_steps", 3), "belong together: give both, or neither"),
        (
            ("--objective", "two_tower", "--two_tower.first_block_size", 32, "--two_tower.first_steps", 60),
            "leaves none of 60 steps to train blocks of 16 tokens",
        ),
    ],
)
def test_keys_of_another_objective_are_refused(
    words: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt("--dry-run", "--train.workers", 1, "--train.device", "cpu", *words) == 2
    assert said in last_line(capsys)


def test_packed_rows_among_chats_are_refused(
    tiny_model: Path, training_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"text": "hello"}) + "\n")
    output = tmp_path / "out"
    assert adapt("--model", tiny_model, "--data", training_rows, chats, "--output", output) == 2
    assert "holds packed rows: give it alone" in last_line(capsys)
    assert not output.exists()


def test_rows_of_another_block_size_than_asked_are_refused(
    tiny_model: Path, training_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ("--pack.block_size", 4, "--pack.context_length", 48)
    assert adapt("--model", tiny_model, "--data", training_rows, "--output", output, *words) == 2
    assert last_line(capsys).endswith("have block_size 8, not 4: leave --pack.block_size out.")
    assert not output.exists()


def test_rows_longer_than_the_models_positions_are_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"text": "hello"}) + "\n")
    words = ("--model", tiny_model, "--data", chats, "--output", output, "--pack.context_length", 1024)
    assert adapt(*words) == 2
    assert "Rows of 1,024 tokens are longer than the 512 positions of" in last_line(capsys)
    assert not output.exists()


def test_options_are_typed_and_shown_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--train.workers", 2, "--train.device", "cpu", "--train.zero_stage", 1, "--train.lora.rank", 4)
    assert adapt("--dry-run", *words, "--train.schedule", "wsd", "--train.micro_tokens", 4096) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["plan"]["deepspeed"]["zero_optimization"]["stage"] == 1
    assert printed["config"]["train"]["lora"] == {"rank": 4, "alpha": 32.0, "targets": ["all-linear"]}
    assert adapt("--dry-run", "--train.workers", 1, "--train.device", "cpu", "--train.offload.optimizer", "cpu") == 2
    assert "leave it out" in last_line(capsys)
    assert adapt("--dry-run", "--train.workers", 1, "--train.device", "cpu", "--train.zero_stage", 4) == 2
    assert "zero_stage" in last_line(capsys)


def test_a_folder_that_is_no_model_is_refused(
    training_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert adapt("--model", empty, "--data", training_rows, "--output", tmp_path / "out") == 2
    assert str(empty) in last_line(capsys)
    assert not (tmp_path / "out").exists()


def test_started_without_arguments_it_assesses_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []
    monkeypatch.setattr("pipelines.adapt.run", lambda config: asked.append(config.assess) or {})
    for said in (None, True, False):
        run_chain(AdaptConfig(data=("chats.jsonl",), assess=said))
    assert asked == [True, True, False]


@pytest.mark.parametrize(("key", "value"), [("held_out", 0.1), ("mixture.weights", 1)])
def test_choosing_among_rows_that_are_packed_already_is_refused(
    key: str,
    value: float,
    tiny_model: Path,
    training_rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", tiny_model, "--data", training_rows, "--output", tmp_path / "out", f"--{key}", value)
    assert adapt(*words) == 2
    assert f"is packed already: leave --{key} out, or give the chats." in last_line(capsys)
