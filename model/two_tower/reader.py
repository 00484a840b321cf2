"""The towers at decoding time: rows with pages, the context tower reads into them, the denoiser writes behind.

A row's context keys and values lie in the pages of the project's `BlockCache`, aligned to position 0; a block may begin
anywhere and straddle two. The denoiser's own keys and values go into the same pages behind the context, where the next
commit overwrites them: nothing is copied. Recurrent states are kept per row and never changed in place, so what a
forward was not to commit is forgotten by keeping the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model.attention import CappingPlan
from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece
from model.errors import UserError
from model.two_tower.canvas import denoise, extra_rows
from model.two_tower.recurrent import States, join_states
from model.two_tower.towers import TwoTower

BOTH_WAYS = 1 << 40  # a span beyond every position: the block's queries see the whole row


@dataclass(eq=False)
class Stretch:
    """What the context tower holds of one row: `length` tokens in `pages`, recurrent states, the last token's logits.

    logits: [V], what the context tower predicts for position `length`; None before it has read anything.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    states: States = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """What one context forward of n tokens a row gave: logits [R, n, V], or of the last token only [R, 1, V], and each
    row's states behind them."""

    logits: Tensor
    states: list[States]


class Reader:
    """Forwards of both towers over rows that share one cache."""

    def __init__(self, towers: TwoTower, *, tokens: int, rows: int) -> None:
        """Room for `rows` rows of `tokens` tokens each."""
        self.towers = towers
        context = towers.context
        page = towers.config.block_size
        self.cache = BlockCache(
            rows * -(-tokens // page),
            page,
            dtype=context.causal_lm.dtype,
            device=context.device,
            prefix_cache=False,
        )
        self.storage: dict[int, int] = {}  # by decoder layer: its place in the cache, which counts attention layers

    def read(self, rows: Sequence[Stretch], ids: Tensor, *, last_only: bool = False) -> Reading:
        """The context tower reads ids int64 [R, n] behind each row; nothing is committed yet, see `commit`."""
        context = self.towers.context
        count = ids.shape[1]
        extra = extra_rows(len(rows), count)
        plan, positions = self._plan(rows, count, extra, span=1)
        seeds = [row.states for row in rows] + [rows[0].states] * extra
        cache = context.cache(self._joined(seeds), count)
        keep = torch.zeros((len(rows) + extra, count), dtype=torch.bool)
        keep[:, -1 if last_only else 0 :] = True
        padded = torch.cat((ids, ids.new_zeros((extra, count))))
        logits = context.read(padded, positions, plan, cache, keep).unflatten(0, (len(rows) + extra, -1))
        after = cache.after() if cache is not None else {}
        states = [{layer: s.rows(torch.tensor([i])) for layer, s in after.items()} for i in range(len(rows))]
        return Reading(logits[: len(rows)], states)

    def commit(self, row: Stretch, tokens: int, logits: Tensor, states: States) -> None:
        """The row now holds so many tokens more: those of the last `read`, whose keys and values lie in its pages."""
        row.length += tokens
        row.logits, row.states = logits.clone(), states

    def extend(self, rows: Sequence[Stretch], ids: Tensor, *, last_only: bool = True) -> Reading:
        """Read and commit ids int64 [R, n]."""
        reading = self.read(rows, ids, last_only=last_only)
        for row, logits, states in zip(rows, reading.logits, reading.states, strict=True):
            self.commit(row, ids.shape[1], logits[-1], states)
        return reading

    def denoise(self, rows: Sequence[Stretch], canvases: Tensor, times: Tensor) -> Tensor:
        """Logits [R, S, V] of the denoiser for canvases int64 [R, S] behind the rows, at times [R] in [0, 1]."""
        denoiser = self.towers.writer()
        count = canvases.shape[1]
        extra = extra_rows(len(rows), count)
        plan, positions = self._plan(rows, count, 0, span=BOTH_WAYS)
        if denoiser.device != self.cache.device:
            plan = Across(plan, self.cache.device)
        seeds = self._joined([row.states for row in rows] + [rows[0].states] * extra)
        return denoise(denoiser, canvases, positions, times, plan, seeds)

    def release(self, row: Stretch) -> None:
        """Give the row's pages back."""
        self.cache.pool.release(row.pages)
        row.pages = []

    def _joined(self, states: list[States]) -> States:
        held = [s for s in states if s]
        if held and len(held) != len(states):
            raise UserError("Rows that hold tokens and rows that hold none cannot share a forward.")
        return join_states(states)

    def _plan(self, rows: Sequence[Stretch], count: int, extra: int, span: int) -> tuple[CappingPlan, Tensor]:
        """The attention of `count` tokens behind each row, and positions int64 [R + extra, count]."""
        pieces, where = [], []
        for index, row in enumerate(rows):
            end = row.length + count
            while len(row.pages) < self.cache.pages_for(end):
                row.pages.append(self.cache.pool.take())
            table = np.array(row.pages, dtype=np.int64)
            pieces.append(Piece(index * count, count, row.length, end, span, table))
            where.append(self.cache.where(table, np.arange(row.length, end)))
        plan = DecodePlan(self.cache, pieces, torch.from_numpy(np.concatenate(where)).to(self.cache.device))
        starts = torch.tensor([row.length for row in rows] + [0] * extra)
        return Capping(plan, self.storage), starts[:, None] + torch.arange(count)


@dataclass(frozen=True)
class Capping:
    """A decoding plan for models of which only some layers attend: those count in the pages, one after the other."""

    plan: DecodePlan
    storage: dict[int, int]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        place = self.storage.setdefault(layer, len(self.storage))
        return self.plan.attend(place, query, key, value, scale, sliding_window)

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        place = self.storage.setdefault(layer, len(self.storage))
        return self.plan.attend_capped(place, query, key, value, scale, window, softcap)


@dataclass(frozen=True)
class Across:
    """Attention on another device than the layers: where the cache lies, so that no prefix ever moves."""

    plan: CappingPlan
    device: torch.device

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        q, k, v = (x.to(self.device) for x in (query, key, value))
        return self.plan.attend(layer, q, k, v, scale, sliding_window).to(query.device)

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        q, k, v = (x.to(self.device) for x in (query, key, value))
        return self.plan.attend_capped(layer, q, k, v, scale, window, softcap).to(query.device)
