"""From the turns of a round to the tensors of one forward: ids, positions, attention pieces, slots that need a logit.

Token and slot counts are padded to multiples of 4: on CPU a float32 matrix product rounds a row of its result
differently with 1, 2 or 3 rows in all (and, with two threads, with some other counts up to 11), and equally with every
multiple of 4. So a row's numbers do not depend on how much else is in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece
from model.decoding.row import Query, Row

ROUND_TO = 4
PIECES = 2  # of attention that a row has in a forward, at most
NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Turn:
    """What a row does in a round: its next query, over `count` prompt tokens where it prefills (else ignored)."""

    row: Row
    count: int = 0
    query: Query = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "query", self.row.next_query(self.count))


@dataclass(frozen=True)
class Slots:
    """N slots of all rows of a round that are decided from a logit, as parallel int64 arrays [N], in turn order.

    turn: index of the row's turn. read: packed index whose logit predicts the slot. column: place in the working block;
    HEAD for a block's first slot, which is decided outright, and for every verified one (lossless mode); GUESS for the
    first slot of the block behind, not decided; DRAFT for a token that lossless mode drafts.
    """

    turn: np.ndarray
    read: np.ndarray
    position: np.ndarray
    column: np.ndarray

    HEAD = -1
    GUESS = -2
    DRAFT = -3

    @property
    def head(self) -> np.ndarray:
        return self.column == self.HEAD

    @property
    def drafted(self) -> np.ndarray:
        return self.column == self.DRAFT

    @property
    def denoised(self) -> np.ndarray:
        return self.column >= 0


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions int64 [1, T], `read` int64 [N], all padded; plan and slots."""

    ids: Tensor
    positions: Tensor
    read: Tensor
    plan: DecodePlan
    slots: Slots


def padded(count: int) -> int:
    """`count` rounded up to a multiple of ROUND_TO."""
    return -(-count // ROUND_TO) * ROUND_TO


def pack(turns: Sequence[Turn], cache: BlockCache) -> Packed:
    """One forward over all turns; no turns give a forward of padding only."""
    lengths = [len(turn.query) for turn in turns]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    spans = [np.arange(turn.query.start, turn.query.end) for turn in turns]
    tables = [np.array(turn.row.pages, dtype=np.int64) for turn in turns]
    where = [cache.where(table, span) for table, span in zip(tables, spans, strict=True)]
    slots = [_slots(i, turn.query, int(offsets[i])) for i, turn in enumerate(turns)] or [(NONE, NONE, NONE, NONE)]
    joined = Slots(*(np.concatenate(column) for column in zip(*slots, strict=True)))
    members = zip(turns, offsets[:-1], tables, strict=True)
    pieces = [piece for turn, offset, table in members for piece in _pieces(turn, int(offset), table)]
    return Packed(
        ids=_padded_tensor([turn.query.ids for turn in turns], cache.device, at_least=1)[None],
        positions=_padded_tensor(spans, cache.device, at_least=1)[None],
        read=_padded_tensor([joined.read], cache.device),
        plan=DecodePlan(cache, pieces, torch.from_numpy(np.concatenate([NONE, *where])).to(cache.device)),
        slots=joined,
    )


def _pieces(turn: Turn, offset: int, table: np.ndarray) -> list[Piece]:
    """A row's attention. A sub-block's query sees its whole working block, which lies in the cache behind it; masks
    that draft see each other and all before them, the clean tokens there only what AR mode sees. A second network's
    canvas sees all of itself and of what is before it."""
    row, query = turn.row, turn.query
    if query.noisy_from is not None:
        clean = query.noisy_from - query.start
        canvas = Piece(offset + clean, len(query) - clean, query.noisy_from, query.end, query.end, table)
        return [Piece(offset, clean, query.start, query.noisy_from, row.span, table), canvas] if clean else [canvas]
    if query.drafts:
        clean = query.keep - query.start
        masks = Piece(offset + clean, query.drafts, query.keep, query.end, query.end, table)
        return [Piece(offset, clean, query.start, query.keep, row.span, table), masks]
    visible = max(query.end, row.block_end) if len(query.candidates) else query.end
    return [Piece(offset, len(query), query.start, visible, row.span, table)]


def _slots(index: int, query: Query, offset: int) -> tuple[np.ndarray, ...]:
    """(turn, read, position, column) of a turn's slots: verified ones and head, candidates, guess, drafts."""
    shift = query.shift
    positions = [query.candidates]
    columns = [query.candidates - query.block_start]
    assert not len(query.candidates) or query.candidates[0] >= query.start + shift, "a slot's logit must be there"
    if query.head:
        positions.insert(0, np.arange(query.keep - query.drafted, query.keep + 1))
        columns.insert(0, np.full(query.drafted + 1, Slots.HEAD))
    if query.guess:
        positions.append(np.array([query.end]))
        columns.append(np.array([Slots.GUESS]))
    if query.drafts:
        behind = int(query.noisy_from is None)  # the slot at `keep` itself is the head's
        positions.append(query.keep + behind + np.arange(query.drafts))
        columns.append(np.full(query.drafts, Slots.DRAFT))
    position = np.concatenate(positions)
    return np.full(len(position), index), offset + position - shift - query.start, position, np.concatenate(columns)


def _padded_tensor(parts: Sequence[np.ndarray], device: torch.device, *, at_least: int = 0) -> Tensor:
    """The parts in one int64 tensor, zeros behind them."""
    count = sum(map(len, parts))
    padding = np.zeros(padded(max(count, at_least)) - count, dtype=np.int64)
    return torch.from_numpy(np.concatenate([*parts, padding])).to(device)
