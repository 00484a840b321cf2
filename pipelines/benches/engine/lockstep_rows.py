"""Lock-step batches through the engine's own decoder: only the waiting is left of `lockstep_decoder`.

The same order of forwards over the same blocks, but with our cache, packing, kernels and head. A row that has nothing
to do while others need steps, or has finished, runs its block again for nothing, as it does in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from model.decoding import Decoder, GenerationRequest, Phase, Reveal, Row, Turn
from model.decoding.row import Query
from pipelines.benches.engine.contestants import Answers


@dataclass(frozen=True)
class WaitingRow:
    """Stands for a row in a forward that brings it nothing: it runs [start, end) and learns nothing."""

    row: Row
    start: int
    end: int
    causal: bool = False

    @property
    def pages(self) -> list[int]:
        return self.row.pages

    @property
    def request(self) -> GenerationRequest:
        return self.row.request

    @property
    def block_size(self) -> int:
        return self.row.block_size

    @property
    def span(self) -> int:
        return self.row.span

    @property
    def committed(self) -> int:
        return self.row.committed

    @property
    def block_end(self) -> int:
        return self.end

    def next_query(self, tokens: int = 0) -> Query:
        ids = np.zeros(self.end - self.start, dtype=np.int64)
        return Query(Phase.DENOISE, self.start, self.start, self.end, ids)

    def apply(
        self, query: Query, head: Reveal | None, reveals: Sequence[Reveal], guess: int | None = None
    ) -> tuple[Reveal, ...]:
        return ()


class LockstepRows:
    """Decodes batches of requests, all rows in the same block. The decoder's pages must be free between batches."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def answer(self, requests: Sequence[GenerationRequest]) -> Answers:
        rows = [self.decoder.make_row(request) for request in requests]
        size = rows[0].block_size
        try:
            start = min(row.encode_until for row in rows)
            if start:
                self._forward([Turn(row, start) for row in rows])
            while any(row.phase is not Phase.DONE for row in rows):
                self._block(rows, start, start + size)
                start += size
            return [row.result().token_ids for row in rows]
        finally:
            for row in rows:
                self.decoder.release(row)

    def _block(self, rows: Sequence[Row], start: int, end: int) -> None:
        """Sub-block by sub-block until no row has a mask in it, then the commit, which for a long prompt is prefill."""
        for edge in range(start + rows[0].sub_block_size, end + 1, rows[0].sub_block_size):
            while any(_needs_step(row, edge) for row in rows):
                self._forward([_turn(row, _needs_step(row, edge), start, end) for row in rows])
        if any(row.phase is not Phase.DONE for row in rows):
            self._forward([_turn(row, row.phase is not Phase.DONE, start, end) for row in rows])

    def _forward(self, turns: Sequence[Turn]) -> None:
        self.decoder.step(turns, publish=False)


def _needs_step(row: Row, edge: int) -> bool:
    """Whether the row has a mask before position `edge`."""
    return row.phase is Phase.DENOISE and row.frontier < edge


def _turn(row: Row, works: bool, start: int, end: int) -> Turn:
    return Turn(row, end - start) if works else Turn(cast(Row, WaitingRow(row, start, end)))
