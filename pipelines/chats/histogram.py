"""lengths.png: how long the documents of each file are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

BINS = 48
SHOWN = 6  # files with a curve of their own; all the others share one


def draw_lengths(lengths: Mapping[str, np.ndarray], context_length: int, path: Path) -> None:
    """Draw a PNG. lengths: tokens of the documents of each file, int [N], each at most context_length."""
    from matplotlib.figure import Figure  # a second, which a job that draws nothing saves

    edges = np.unique(np.linspace(0, context_length, BINS + 1).astype(int))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.add_subplot()
    for name, counts in _curves(lengths, edges).items():
        axis.stairs(counts, edges, label=f"{name}, {counts.sum():,}", linewidth=1.6)
    axis.set(xlabel="tokens in a document", ylabel="documents", title="Lengths of documents", xlim=(0, context_length))
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize="small")
    figure.savefig(path, format="png", dpi=110)


def _curves(lengths: Mapping[str, np.ndarray], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Documents by length for the largest files and for the rest."""
    counts = {uri: np.histogram(values, edges)[0] for uri, values in lengths.items()}
    largest = sorted(counts, key=lambda uri: -int(counts[uri].sum()))
    curves = {_short(uri): counts[uri] for uri in largest[:SHOWN]}
    rest = [counts[uri] for uri in largest[SHOWN:]]
    return {**curves, f"{len(rest)} other files": np.sum(rest, axis=0)} if rest else curves


def _short(uri: str) -> str:
    """The end of a name, which is what tells names apart."""
    return uri if len(uri) <= 40 else f"…{uri[-39:]}"
