"""Small real training runs that tests look at: Ray Train, DeepSpeed, gloo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.training.rows import RowFormat
from pipelines.adapt import AdaptConfig, plan, run
from pipelines.jobkit import main
from tests.packed import counting_rows, write_rows
from tests.tiny import VOCAB_SIZE

MASK = VOCAB_SIZE  # tiny_model knows no spare token: its embedding grows by one row
FORM = RowFormat(block_size=8, context_length=48, mask_token_id=MASK)
ROWS = 12
STEPS = 60
ROWS_PER_STEP = 5  # epochs end in the middle of steps, two workers get unequal shares
MICRO_ROWS = 2
LEARNING_RATE = 5e-3
TIMED = ("tokens_per_second", "seconds", "time", "time_shares")


@dataclass(frozen=True)
class TrainingRun:
    """A finished run: its arguments, exit code and output."""

    argv: list[str]
    code: int
    output: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.output)


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none where there is no file yet."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without the figures that differ from run to run."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in metrics]


def arguments(model: Path, rows: Path, output: Path, **train: Any) -> list[str]:
    """The command line of a small float32 run on one worker; train: overrides of --train.*."""
    keys = {
        "steps": STEPS,
        "rows_per_step": ROWS_PER_STEP,
        "micro_rows": MICRO_ROWS,
        "workers": 1,
        "dtype": "float32",
        "learning_rate": LEARNING_RATE,
        "warmup_steps": 5,
        "weight_decay": 0.1,
        "checkpoint_every": 10,
        **train,
    }
    words = ["--model", str(model), "--data", str(rows), "--output", str(output)]
    return words + [word for name, value in keys.items() for word in (f"--train.{name}", str(value))]


def adapt(argv: list[str], output: Path) -> TrainingRun:
    """Run the job in this process, on the Ray it is connected to."""
    return TrainingRun(argv, main("adapt", AdaptConfig, run, plan, argv), output)


def write_training_rows(folder: Path) -> Path:
    """A folder of packed rows: documents that count upwards."""
    return write_rows(folder, counting_rows(ROWS, mask_token_id=MASK), FORM)
