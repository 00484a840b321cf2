"""loss.png: four curves of a run: loss and held-out loss, loss by noise level, gradient norm, where a step's time goes.

Drawn from the lines of metrics.jsonl; a curve whose figures the lines lack (the control has no noise levels, a run may
have no held-out rows) says so in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.training.clock import OTHER, PHASES
from actors.training.noise import LEVELS, level_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH = 0.9

Lines = Sequence[Mapping[str, Any]]


def draw_curves(records: Lines, title: str, path: Path) -> None:
    """Draw the lines of metrics.jsonl (at least one) as a PNG."""
    from matplotlib.figure import Figure  # a second, which a job that draws nothing saves

    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    (loss, noise), (norm, times) = figure.subplots(2, 2)
    _draw_loss(loss, records)
    _draw_noise(noise, records)
    _draw_norm(norm, records)
    _draw_times(times, records)
    for axis in (loss, noise, norm, times):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def _draw_loss(axis: Axes, records: Lines) -> None:
    steps, losses = series(records, "loss")
    axis.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axis.plot(steps, running_mean(losses), color="tab:blue", linewidth=2, label="running mean")
    steps, causal = series(records, "ar_loss")
    if len(causal):
        axis.plot(steps, running_mean(causal), color="tab:purple", linewidth=2, label="next-token part, running mean")
    steps, held_out = series(records, "held_out_loss")
    if len(held_out):
        axis.plot(steps, held_out, color="tab:red", marker="o", markersize=4, label="held-out rows")
    steps, bound = series(records, "held_out_bound")
    if len(bound):
        axis.plot(steps, bound, color="tab:orange", marker="s", markersize=4, label="bound of -ln p, held-out rows")
    axis.set(title="loss", ylabel="nats per token")
    rates = axis.twinx()
    rates.plot(*series(records, "learning_rate"), color="tab:gray", linestyle=":", linewidth=1)
    rates.set_ylabel("learning rate (dotted)")
    axis.legend(loc="upper right")


def _draw_noise(axis: Axes, records: Lines) -> None:
    from matplotlib import colormaps

    axis.set(title="loss by mask ratio, running means", ylabel="nats per supervised token")
    known = [record for record in records if "loss_by_noise" in record]
    if not known:
        _say(axis, "not measured: nothing is masked")
        return
    for level in range(LEVELS):
        met = [record for record in known if record["loss_by_noise"][level] is not None]
        means = running_mean(np.array([record["loss_by_noise"][level] for record in met]))
        color = colormaps["viridis"](level / LEVELS)
        axis.plot([record["step"] for record in met], means, color=color, label=level_name(level))
    axis.legend(loc="upper right")


def _draw_norm(axis: Axes, records: Lines) -> None:
    steps, norms = series(records, "grad_norm")
    axis.plot(steps, norms, color="tab:green", alpha=0.35, linewidth=1, label="each step")
    axis.plot(steps, running_mean(norms), color="tab:green", linewidth=2, label="running mean")
    axis.set(title="gradient norm, before clipping")
    if (norms > 0).all():
        axis.set_yscale("log")
    axis.legend(loc="upper right")


def _draw_times(axis: Axes, records: Lines) -> None:
    axis.set(title="share of a step's time")
    known = [record for record in records if "time_shares" in record]
    if not known:
        _say(axis, "not measured")
        return
    names = (*PHASES, OTHER)
    shares = [[record["time_shares"][name] for record in known] for name in names]
    axis.stackplot([record["step"] for record in known], shares, labels=names, alpha=0.8)
    axis.set_ylim(0, 1)
    axis.legend(loc="lower right")


def _say(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)


def series(records: Lines, name: str) -> tuple[list[int], np.ndarray]:
    """Steps and values of a figure, where the lines have it."""
    known = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in known], np.array([record[name] for record in known], dtype=float)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Exponential mean with its start corrected, so that the first value is itself."""
    mean, weight = 0.0, 0.0
    smoothed = []
    for value in values:
        mean = SMOOTH * mean + (1 - SMOOTH) * float(value)
        weight = SMOOTH * weight + (1 - SMOOTH)
        smoothed.append(mean / weight)
    return np.array(smoothed)
