"""From the turns of a round to the tensors of one forward: ids, positions, attention pieces, slots that need a logit.

Token and slot counts are padded to multiples of 4: on CPU a float32 matrix product rounds a row of its result
differently with 1, 2 or 3 rows in all (and, with two threads, with some other counts up to 11), and equally with every
multiple of 4. So a row's numbers do not depend on how much else is in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece, row_pieces
from model.decoding.row import Phase, Row

ROUND_TO = 4
NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Turn:
    """What a row does in a round: its next phase, over `count` tokens (a prefill chunk's length; else its query)."""

    row: Row
    count: int


@dataclass(frozen=True)
class Slots:
    """N slots of all rows of a round that are decided from a logit, as parallel int64 arrays [N], in turn order.

    turn: index of the row's turn. read: packed index whose logit predicts the slot. column: place in the working block;
    HEAD for a block's first slot, which is decided outright.
    """

    turn: np.ndarray
    read: np.ndarray
    position: np.ndarray
    column: np.ndarray

    HEAD = -1

    @property
    def head(self) -> np.ndarray:
        return self.column == self.HEAD


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions int64 [1, T], `read` int64 [N], all padded; plan, slots, and each turn's phase."""

    ids: Tensor
    positions: Tensor
    read: Tensor
    plan: DecodePlan
    slots: Slots
    phases: list[Phase]


@dataclass
class _Part:
    """One turn's share of the forward, positions [start, end) of its row from packed index `offset` on."""

    row: Row
    phase: Phase
    offset: int
    start: int
    end: int

    def pieces(self, cache: BlockCache) -> list[Piece]:
        row, count, begin = self.row, self.end - self.start, cache.index(self.row.slot, 0)
        visible = self.end if self.phase is Phase.PREFILL else row.block_end
        return row_pieces(Piece(self.offset, count, begin, self.start, visible, row.causal), row.block_size)

    def slots(self, index: int) -> tuple[np.ndarray, ...]:
        """(turn, read, position, column) of the slots that this turn decides from."""
        count = self.end - self.start
        if self.phase is Phase.DENOISE:
            position = self.row.candidates()
            assert position[0] > self.start, "a slot is predicted by the one before it, which must be in the forward"
            read, column = self.offset + position - 1 - self.start, position - self.row.committed
        elif self.row.decides_head(self.phase, count):
            position, read, column = np.array([self.end]), np.array([self.offset + count - 1]), np.array([Slots.HEAD])
        else:
            position = read = column = NONE
        return np.full(len(position), index), read, position, column


def padded(count: int) -> int:
    """`count` rounded up to a multiple of ROUND_TO."""
    return -(-count // ROUND_TO) * ROUND_TO


def pack(turns: Sequence[Turn], cache: BlockCache, mask_token_id: int | None) -> Packed:
    """One forward over all turns; no turns give a forward of padding only."""
    parts: list[_Part] = []
    offset = 0
    for turn in turns:
        row, phase = turn.row, turn.row.phase
        start, end = (row.committed, row.committed + turn.count) if phase is Phase.PREFILL else row.query
        parts.append(_Part(row, phase, offset, start, end))
        offset += end - start
    spans = [np.arange(p.start, p.end) for p in parts]
    storage = [cache.index(p.row.slot, 0) + span for p, span in zip(parts, spans, strict=True)]
    slots = [p.slots(i) for i, p in enumerate(parts)] or [(NONE, NONE, NONE, NONE)]
    joined = Slots(*(np.concatenate(column) for column in zip(*slots, strict=True)))
    pieces = [piece for p in parts for piece in p.pieces(cache)]
    where = torch.from_numpy(np.concatenate([NONE, *storage])).to(cache.device)
    canvases = [p.row.canvas(p.start, p.end, mask_token_id) for p in parts]
    return Packed(
        ids=_padded_tensor(canvases, cache.device, at_least=1)[None],
        positions=_padded_tensor(spans, cache.device, at_least=1)[None],
        read=_padded_tensor([joined.read], cache.device),
        plan=DecodePlan(cache, pieces, where),
        slots=joined,
        phases=[p.phase for p in parts],
    )


def _padded_tensor(parts: Sequence[np.ndarray], device: torch.device, *, at_least: int = 0) -> Tensor:
    """The parts in one int64 tensor, zeros behind them."""
    count = sum(map(len, parts))
    padding = np.zeros(padded(max(count, at_least)) - count, dtype=np.int64)
    return torch.from_numpy(np.concatenate([*parts, padding])).to(device)
