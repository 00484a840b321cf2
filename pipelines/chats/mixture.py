"""Mixtures: how often each document is taken, so that the sources have the asked shares of the training tokens.

Like the packing plan it is made from lengths alone. A source is taken in whole passes and, for the rest, in documents
drawn by (seed, source), so a larger share of the same source holds the smaller one. The documents of all sources are
interleaved evenly, each source in its own order, so that any stretch of them is the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from actors.training.rows import permutation
from model.errors import UserError


@dataclass(frozen=True)
class Portion:
    """What a mixture takes of a source. available: its training tokens; passes: taken over available."""

    source: str
    weight: float
    available: int
    documents: int
    tokens: int

    def figures(self, total: int) -> dict[str, Any]:
        """For stats.json. total: training tokens of the mixture."""
        return {
            **asdict(self),
            "share": round(self.tokens / total, 4) if total else 0.0,
            "passes": round(self.tokens / self.available, 4) if self.available else 0.0,
        }


@dataclass(frozen=True)
class Recipe:
    """What is asked for. sources: the words of --data, weights: one each. tokens: in all; None: as many as `repeat`
    passes over the sources allow."""

    sources: Sequence[str]
    weights: Sequence[float]
    tokens: int | None
    repeat: float
    seed: int


def mix(recipe: Recipe, lengths: np.ndarray, source_of: np.ndarray) -> tuple[np.ndarray, list[Portion]]:
    """(indices of the documents taken, in order, and what was taken of each source).

    lengths, source_of: int [N], tokens and number of the source. Raises UserError where a source cannot give its share.
    """
    inside = [np.flatnonzero(source_of == number) for number in range(len(recipe.sources))]
    available = [int(lengths[documents].sum()) for documents in inside]
    total = _total(recipe, available)
    whole = sum(map(Fraction, recipe.weights))
    taken: list[np.ndarray] = []
    for number, (documents, weight) in enumerate(zip(inside, recipe.weights, strict=True)):
        target = int(total * Fraction(weight) / whole)  # exact: rounding must not cost a source its last document
        taken.append(_take(documents, lengths[documents], target, recipe.seed, number))
    portions = [
        Portion(source, weight, tokens, len(documents), int(lengths[documents].sum()))
        for source, weight, tokens, documents in zip(recipe.sources, recipe.weights, available, taken, strict=True)
    ]
    return _interleaved(taken), portions


def _total(recipe: Recipe, available: Sequence[int]) -> Fraction:
    """Tokens of the whole mixture."""
    whole = sum(map(Fraction, recipe.weights))
    most: dict[int, Fraction] = {}  # what the mixture can be for each source's sake
    for number, (weight, tokens) in enumerate(zip(recipe.weights, available, strict=True)):
        if weight > 0 and tokens == 0:
            raise UserError(f"--data {recipe.sources[number]} has no training document: give it the weight 0.")
        if weight > 0:
            most[number] = tokens * Fraction(recipe.repeat) * whole / Fraction(weight)
    scarce = min(most, key=lambda number: most[number])
    if recipe.tokens is None:
        return most[scarce]
    if recipe.tokens > most[scarce]:
        raise UserError(
            f"--mixture.tokens {recipe.tokens} is more than the {int(most[scarce])} that the weights allow, since "
            f"--data {recipe.sources[scarce]} holds {available[scarce]}: lower it, or raise --mixture.repeat."
        )
    return Fraction(recipe.tokens)


def _take(documents: np.ndarray, lengths: np.ndarray, target: int, seed: int, number: int) -> np.ndarray:
    """Documents of one source with about `target` tokens: whole passes, then drawn ones, in order."""
    available = int(lengths.sum())
    if target <= 0 or available == 0:
        return documents[:0]
    passes, rest = divmod(target, available)
    order = permutation(len(documents), seed, number)
    drawn = order[: np.searchsorted(np.cumsum(lengths[order]), rest, side="right")]
    return np.concatenate([*[documents] * passes, documents[np.sort(drawn)]])


def _interleaved(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All of them, each spread evenly over the whole."""
    if not parts:
        return np.zeros(0, np.int64)
    places = np.concatenate([(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts])
    merged: np.ndarray = np.concatenate(parts)[np.argsort(places, kind="stable")]
    return merged
