"""The context tower in the engine where layers carry states (Mamba-2, linear attention, short convolutions).

The pages hold keys and values only, so a row holds its states, those behind its committed tokens, and they are never
changed in place. Rows cannot be packed into one sequence: those with equally many tokens share a forward, [R, n]. Where
a draft stood in part, the part that stands is read again from the states before it (see `model.two_tower.lossless`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cache import BlockCache
from model.decoding.packing import ROUND_TO, Packed, Turn
from model.decoding.plan import DecodePlan, Piece
from model.decoding.row import Phase, Row
from model.two_tower.canvas import extra_rows
from model.two_tower.reader import Capping
from model.two_tower.recurrent import States, join_states
from model.two_tower.towers import ContextTower


@dataclass(frozen=True)
class _Part:
    """Clean tokens of one row: ids int64 [n] from position `start` on, and which of them need a logit."""

    row: Row
    start: int
    ids: np.ndarray
    read: np.ndarray

    @property
    def kind(self) -> tuple[int, bool]:
        """Parts of one kind share a forward."""
        return len(self.ids), bool(self.row.states)


class StatefulReader:
    """`model.writer.StatefulForward` of a context tower. `storage`: by decoder layer, its place in the pages."""

    def __init__(self, context: ContextTower, storage: dict[int, int]) -> None:
        self._context = context
        self._storage = storage
        self._after: dict[int, States] = {}  # by row, behind all that the last forward read of it

    def allocate(self, cache: BlockCache) -> None:
        """Make storage for every attention layer."""
        plan = Capping(DecodePlan(cache, [], torch.zeros(0, dtype=torch.int64)), self._storage)
        ids = torch.zeros((1, ROUND_TO), dtype=torch.int64)
        state = self._context.cache({}, ROUND_TO)
        self._context.read(ids, torch.arange(ROUND_TO)[None], plan, state, torch.ones_like(ids, dtype=torch.bool))

    def __call__(self, turns: Sequence[Turn], packed: Packed) -> Tensor:
        """Logits [N, V] of the packed slots; the states behind them are kept until `settle`."""
        self._after = {}
        offsets = np.cumsum([0, *(len(turn.query) for turn in turns)])
        read = packed.slots.read
        parts = [
            _Part(turn.row, turn.query.start, turn.query.ids, read[packed.slots.turn == i] - offsets[i])
            for i, turn in enumerate(turns)
        ]
        logits = self._read(parts, packed.plan.cache)
        return torch.cat([logits[id(part.row)] for part in parts])

    def settle(self, turns: Sequence[Turn], cache: BlockCache) -> None:
        """The rows have moved on: keep the states behind what each has committed."""
        again = []
        for turn in turns:
            row, query = turn.row, turn.query
            if row.phase is Phase.DONE:
                continue
            if row.committed == query.end:
                row.states = self._after[id(row)]
            elif row.committed > query.start:
                again.append(_Part(row, query.start, query.ids[: row.committed - query.start], np.zeros(0, np.int64)))
        if again:
            self._read(again, cache)
        for part in again:
            part.row.states = self._after[id(part.row)]
            part.row.forwards[Phase.COMMIT] += 1

    def _read(self, parts: Sequence[_Part], cache: BlockCache) -> dict[int, Tensor]:
        """Logits [its slots, V] of each row."""
        groups: dict[tuple[int, bool], list[_Part]] = defaultdict(list)
        for part in parts:
            groups[part.kind].append(part)
        found: dict[int, Tensor] = {}
        for group in groups.values():
            found |= self._read_together(group, cache)
        return found

    def _read_together(self, group: Sequence[_Part], cache: BlockCache) -> dict[int, Tensor]:
        rows, count = len(group), len(group[0].ids)
        extra = extra_rows(rows, count)
        ids = np.zeros((rows + extra, count), dtype=np.int64)
        ids[:rows] = [part.ids for part in group]
        starts = np.array([part.start for part in group] + [0] * extra)
        pieces, where = [], []
        for index, part in enumerate(group):
            end, table = part.start + count, np.array(part.row.pages, dtype=np.int64)
            pieces.append(Piece(index * count, count, part.start, end, 1, table))
            where.append(cache.where(table, np.arange(part.start, end)))
        plan = DecodePlan(cache, pieces, torch.from_numpy(np.concatenate(where)).to(cache.device))
        seeds = join_states([part.row.states for part in group] + [group[0].row.states] * extra)
        state = self._context.cache(seeds, count)
        keep = _kept(group, rows + extra, count)
        logits = self._context.read(
            torch.from_numpy(ids),
            torch.from_numpy(starts)[:, None] + torch.arange(count),
            Capping(plan, self._storage),
            state,
            keep,
        )
        after = state.after() if state is not None else {}
        place = keep.flatten().cumsum(0).view_as(keep) - 1
        for index, part in enumerate(group):
            self._after[id(part.row)] = {n: s.rows(torch.tensor([index])) for n, s in after.items()}
        return {id(part.row): logits[place[i, torch.from_numpy(part.read)]] for i, part in enumerate(group)}


def _kept(group: Sequence[_Part], rows: int, count: int) -> Tensor:
    """Bool [rows, count]: the tokens with a logit, and some more up to a multiple of ROUND_TO, at least so many."""
    keep = torch.zeros((rows, count), dtype=torch.bool)
    for index, part in enumerate(group):
        keep[index, torch.from_numpy(part.read)] = True
    wanted = max(1, int(keep.sum()))
    short = -(-wanted // ROUND_TO) * ROUND_TO - int(keep.sum())
    free = (~keep.flatten()).nonzero()[:short, 0]
    keep.view(-1)[free] = True
    return keep
