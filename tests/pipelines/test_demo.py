"""The demo end to end on a tiny model: adapt, assess, serve, one question through the openai client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.demo import bought

SMALL = (
    *("--pack.block_size", "8", "--pack.context_length", "512"),
    *("--tasks.count", "40", "--tasks.held_out", "8"),
    *("--train.steps", "2", "--train.rows_per_step", "2", "--train.micro_rows", "2", "--train.dtype", "float32"),
    *("--assessment.tasks", "2", "--assessment.held_out_tasks", "4", "--assessment.max_tokens", "16"),
)


def demo(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "pipelines" / "demo.py"), *words]
    environment = {**os.environ, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_demo_adapts_assesses_serves_and_answers_one_question(
    project: Path, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "demo"
    done = demo(project, "--model", str(tiny_model), "--output", str(output), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("  question  ", "  answer    ", "  checker   ", "tokens per forward; steps per block ["):
        assert part in done.stdout
    figures = json.loads((output / "assess" / "manifest.json").read_text())["figures"]
    for line in bought(figures):
        assert f"demo: {line}" in done.stdout
    assert [row["contender"] for row in figures["contenders"]] == ["base, AR", "adapted, AR", "adapted, blocks 0.9"]
    assert (output / "assess" / "report.md").is_file() and (output / "loss.png").is_file()


@pytest.mark.slow
def test_a_demo_of_a_model_that_is_not_there_ends_with_the_jobs_exit_code(project: Path, tmp_path: Path) -> None:
    done = demo(project, "--model", str(tmp_path / "nothing"), "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_summary_compares_blocks_with_the_same_weights_in_ar_mode() -> None:
    rows = [
        {"contender": "base, AR", "accuracy": 0.1, "tokens_per_second": 50.0, "tokens_per_forward": 1.0},
        {"contender": "adapted, AR", "accuracy": 0.5, "tokens_per_second": 20.0, "tokens_per_forward": 1.0},
        {"contender": "adapted, blocks 0.9", "accuracy": None, "tokens_per_second": 30.0, "tokens_per_forward": 2.0},
    ]
    assert bought({"contenders": rows}) == [
        "base, AR: 10% right, 50.0 tokens/s, 1.00 tokens per forward",
        "adapted, AR: 50% right, 20.0 tokens/s, 1.00 tokens per forward",
        "adapted, blocks 0.9: not judged, 30.0 tokens/s, 2.00 tokens per forward, 1.50x its own AR mode",
    ]
