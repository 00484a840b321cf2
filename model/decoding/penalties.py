"""Penalties and biases of a round: which logits of which slots change, from the text that each row has decided.

What counts as text, for every slot of a row in a round, is every position of it that is decided before the round:

    repetition_penalty            the prompt and all decided tokens, as transformers' `generate` counts them in AR mode
    presence_, frequency_penalty  decided tokens behind the prompt (OpenAI)

A token that was decided further right in the working block counts like one to the left. Slots that open in the same
step do not see one another. A slot of lossless mode counts what AR mode would: all that stands before it, the draft
too. The text is counted anew each round, over the tokens that occur in it only: nothing is kept
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
    parts = [part for i in editing for part in _turn_edits(turns[i], np.flatnonzero(slots.turn == i), slots)]
    if not any(len(slot) for slot, *_ in parts):
        return None
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Edits(*(torch.from_numpy(column).to(device) for column in columns))


def _spread(slot: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """A row's changes [U] for each of its slots [S]: arrays [S * U], the slot first."""
    return np.repeat(slot, len(columns[0])), *(np.tile(column, len(slot)) for column in columns)


def _turn_edits(turn: Turn, mine: np.ndarray, slots: Slots) -> list[tuple[np.ndarray, ...]]:
    """(slot, token, repetition, shift) of a turn's slots `mine`, in one part where all count the same text."""
    row, query = turn.row, turn.query
    decided = np.flatnonzero(row.state != MASKED)
    if not (row.request.sampling.penalises and (query.drafted or query.drafts)):
        return [_spread(mine, *_row_edits(row, decided, row.tokens[decided]))]
    text = np.concatenate([row.tokens[: query.start], query.ids[: query.keep - query.start]])
    ends = np.minimum(slots.position[mine], query.keep)
    return [
        _spread(slot[None], *_row_edits(row, np.arange(end), text[:end])) for slot, end in zip(mine, ends, strict=True)
    ]


def _row_edits(row: Row, position: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token int64, repetition float64, shift float64), arrays [U]: each token whose logit changes, once.

    text: the tokens that count, int64 [n], at these positions.
    """
    asked = row.request.sampling
    if not asked.penalises:
        position, text = position[:0], text[:0]
    biased = np.array([token for token, _ in asked.logit_bias], dtype=np.int64)
    bias = np.array([value for _, value in asked.logit_bias], dtype=np.float64)
    token, place = np.unique(np.concatenate([biased, text]), return_inverse=True)
    in_text, in_answer = place[len(biased) :], place[len(biased) :][position >= row.prompt_length]
    count = np.bincount(in_answer, minlength=len(token))
    shift = -asked.presence_penalty * (count > 0) - asked.frequency_penalty * count
    shift[place[: len(biased)]] += bias
    repetition = np.ones(len(token))
    repetition[in_text] = asked.repetition_penalty
    return token, repetition, shift
