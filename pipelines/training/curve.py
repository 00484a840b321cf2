"""loss.png: the loss of every step and its running mean, with the learning rate beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

SMOOTH = 0.9


def draw_loss(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the records of metrics.jsonl (at least one) as a PNG."""
    steps = [record["step"] for record in records]
    losses = np.array([record["loss"] for record in records])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.add_subplot()
    axis.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axis.plot(steps, running_mean(losses), color="tab:blue", linewidth=2, label="running mean")
    axis.set(xlabel="step", ylabel="loss (nats per supervised token)", title=title)
    axis.grid(alpha=0.3)
    rates = axis.twinx()
    rates.plot(steps, [record["learning_rate"] for record in records], color="tab:gray", linestyle=":", linewidth=1)
    rates.set_ylabel("learning rate (dotted)")
    axis.legend(loc="upper right")
    figure.savefig(path, format="png", dpi=120)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Exponential mean with its start corrected, so that the first value is itself."""
    mean, weight = 0.0, 0.0
    smoothed = []
    for value in values:
        mean = SMOOTH * mean + (1 - SMOOTH) * float(value)
        weight = SMOOTH * weight + (1 - SMOOTH)
        smoothed.append(mean / weight)
    return np.array(smoothed)
