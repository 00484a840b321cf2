"""When and on what a training run is evaluated: the keys of `--train.*` and the rows that prepare held out."""

from __future__ import annotations

from actors.training.rows import holds_rows
from actors.training.settings import EvaluationSettings
from model.errors import UserError
from pipelines.training.section import TrainSection

HELD_OUT = "held_out"


def evaluation_settings(train: TrainSection, rows: str) -> EvaluationSettings:
    """rows: the folder of packed training rows, whose folder held_out is measured on.

    Raises UserError where evaluations are asked for and nothing was held out.
    """
    folder = f"{rows.rstrip('/')}/{HELD_OUT}"
    if train.held_out_every == 0:
        return EvaluationSettings()
    if not holds_rows(folder):
        if train.held_out_every is None:
            return EvaluationSettings()
        raise UserError(
            f"--train.held_out_every {train.held_out_every}: {rows} has no held-out rows ({HELD_OUT}/part-*.parquet): "
            "prepare the data with some held out, or leave the key out."
        )
    every = train.held_out_every or train.checkpoint_every
    return EvaluationSettings(every, folder, train.held_out_rows, train.samples, train.sample_tokens)
