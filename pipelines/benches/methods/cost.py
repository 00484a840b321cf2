"""What a model's training took: read from the run of adapt whose output the model folder lies in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.training.run_files import METRICS
from model.loading import context_folder
from model.two_tower.config import FILE
from model.two_tower.folder import read_two_tower_config
from pipelines.assessment.held_out import count_parameters

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TrainingCost:
    """objective: what was minimised. tokens: of the documents trained on, padding inside their last blocks included;
    supervised: those of the answers. seconds: of the steps alone, of the whole run where an older one did not write
    them. parameters: numbers that were trained.
    """

    objective: str
    steps: int
    tokens: int
    supervised: int
    seconds: float
    parameters: int


def training_cost(model: Path) -> TrainingCost | None:
    """The cost of `<output of adapt>/model`; None for a model that lies elsewhere, whose training nobody knows."""
    manifest = _read(model.parent / MANIFEST)
    if manifest is None or manifest.get("job") != "adapt":
        return None
    lines = [json.loads(line) for line in (model.parent / METRICS).read_text(encoding="utf-8").splitlines()]
    timed = all("seconds" in line for line in lines)
    seconds = sum(line["seconds"] for line in lines) if timed else float(manifest["wall_time_s"])
    config = manifest["config"]
    rows_of = config["train"]["rows_per_step"] * config["pack"]["context_length"]
    tokens = sum(line["seconds"] * line["tokens_per_second"] for line in lines) if timed else rows_of * len(lines)
    return TrainingCost(
        objective=config["objective"],
        steps=len(lines),
        tokens=round(tokens),
        supervised=sum(line["supervised_tokens"] for line in lines),
        seconds=seconds,
        parameters=trained_parameters(model),
    )


def trained_parameters(model: Path) -> int:
    """Numbers in a model folder's safetensors, a frozen context tower's aside."""
    if not (model / FILE).is_file():
        return count_parameters(model)
    return count_parameters(model) - count_parameters(context_folder(model, read_two_tower_config(model)))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
