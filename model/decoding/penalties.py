"""Penalties and biases of a round: which logits of which slots change, from the text that each row has decided.

What counts as text, for every slot of a row in a round, is every position of it that is decided before the round:

    repetition_penalty            the prompt and all decided tokens, as transformers' `generate` counts them in AR mode
    presence_, frequency_penalty  decided tokens behind the prompt (OpenAI)

A token that was decided further right in the working block counts like one to the left. Slots that open in the same
step do not see one another. The text is counted anew each round, over the tokens that occur in it only: nothing is kept
beside the row that a preemption could lose, and a row that asks for nothing of this costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model.decoding.packing import Slots, Turn
from model.decoding.row import MASKED, Row
from model.decoding.sampling import Edits


def edits_of(turns: Sequence[Turn], slots: Slots, device: torch.device) -> Edits | None:
    """The changes of all slots whose row asks for any; None where no row does."""
    editing = [i for i, turn in enumerate(turns) if turn.row.request.sampling.edits]
    parts = [_spread(np.flatnonzero(slots.turn == i), *_row_edits(turns[i].row)) for i in editing]
    if not any(len(slot) for slot, *_ in parts):
        return None
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Edits(*(torch.from_numpy(column).to(device) for column in columns))


def _spread(slot: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """A row's changes [U] for each of its slots [S]: arrays [S * U], the slot first."""
    return np.repeat(slot, len(columns[0])), *(np.tile(column, len(slot)) for column in columns)


def _row_edits(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token int64, repetition float64, shift float64), arrays [U]: each token whose logit changes, once."""
    asked = row.request.sampling
    biased = np.array([token for token, _ in asked.logit_bias], dtype=np.int64)
    bias = np.array([value for _, value in asked.logit_bias], dtype=np.float64)
    decided = np.flatnonzero(row.state != MASKED) if asked.penalises else np.zeros(0, dtype=np.int64)
    token, place = np.unique(np.concatenate([biased, row.tokens[decided]]), return_inverse=True)
    in_text, in_answer = place[len(biased) :], place[len(biased) :][decided >= row.prompt_length]
    count = np.bincount(in_answer, minlength=len(token))
    shift = -asked.presence_penalty * (count > 0) - asked.frequency_penalty * count
    shift[place[: len(biased)]] += bias
    repetition = np.ones(len(token))
    repetition[in_text] = asked.repetition_penalty
    return token, repetition, shift
