"""The forward of a round with static shapes, for CUDA: one graph a bucket, replayed over buffers that the host refills.

A round is padded to the next bucket of query tokens (powers of two), so that few shapes exist; its description stands
in tensors of fixed size, and attention is flex attention over the whole page storage under a mask read from them:

    row int32 [T]        the piece a query belongs to, -1 for padding      position int32 [T]  where it stands
    limit int32 [T]      positions it sees: [0, limit)                     where int64 [T]     storage of its key
    logical int32 [R, P] which page of row r the storage page p is, -1 for none
    kv_blocks, kv_count  storage pages that any query of a tile of queries reaches, and how many

Nothing in there depends on a device value, so a round has no synchronisation but the reading of its choices. On CPU the
same code runs eagerly, which is how its shapes and its mask are tested; it is not how CPU decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from model.attention import compiled_flex
from model.cache import BlockCache
from model.capping import capped_score
from model.decoding.packing import PIECES, Packed
from model.decoding.plan import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 16  # query tokens of the smallest bucket
Q_TILE = 128  # queries that share one list of pages


def bucket(count: int, smallest: int = SMALLEST) -> int:
    """The power of two from `smallest` on that holds `count`."""
    return max(smallest, 1 << (count - 1).bit_length())


@dataclass
class Buffers:
    """The tensors of one bucket: T query tokens, N slots that need a logit, R pieces, P pages of the pool."""

    ids: Tensor
    positions: Tensor
    read: Tensor
    where: Tensor
    row: Tensor
    limit: Tensor
    logical: Tensor
    kv_blocks: Tensor
    kv_count: Tensor

    @classmethod
    def allocate(cls, tokens: int, slots: int, rows: int, pages: int, device: torch.device) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tiles, small = -(-tokens // Q_TILE), torch.int32
        return cls(
            ids=zeros(1, tokens),
            positions=zeros(1, tokens),
            read=zeros(slots),
            where=zeros(tokens),
            row=zeros(tokens, dtype=small),
            limit=zeros(tokens, dtype=small),
            logical=zeros(rows, pages, dtype=small),
            kv_blocks=zeros(1, 1, tiles, pages, dtype=small),
            kv_count=zeros(1, 1, tiles, dtype=small),
        )

    def fill(self, packed: Packed, cache: BlockCache) -> None:
        """Copy a round into the buffers; padding queries belong to no row and write into the scratch page."""
        tokens, pieces = self.where.shape[0], packed.plan.pieces
        row, limit = np.full(tokens, -1, dtype=np.int32), np.zeros(tokens, dtype=np.int32)
        logical = np.full(tuple(self.logical.shape), -1, dtype=np.int32)
        for index, piece in enumerate(pieces):
            here = slice(piece.offset, piece.offset + piece.count)
            position = np.arange(piece.position, piece.position + piece.count)
            row[here] = index
            limit[here] = np.minimum(piece.visible, (position // piece.span + 1) * piece.span)
            used = piece.table[: cache.pages_for(piece.visible)]
            logical[index, used] = np.arange(len(used))
        blocks, count = _pages_of_tiles(pieces, self.kv_blocks.shape[2], self.kv_blocks.shape[3], cache)
        for name, values in (("row", row), ("limit", limit), ("logical", logical), ("kv_blocks", blocks[None, None])):
            self._copy(name, values)
        self._copy("kv_count", count[None, None])
        for name, given, rest in (
            ("ids", packed.ids[0], 0),
            ("positions", packed.positions[0], 0),
            ("read", packed.read, 0),
            ("where", packed.plan.where, cache.scratch),
        ):
            buffer = getattr(self, name).view(-1)
            length = min(len(given), len(buffer))
            buffer[:length].copy_(given[:length], non_blocking=True)
            buffer[length:].fill_(rest)

    def _copy(self, name: str, values: np.ndarray) -> None:
        getattr(self, name).copy_(torch.from_numpy(values), non_blocking=True)


def _pages_of_tiles(pieces: list[Piece], tiles: int, total: int, cache: BlockCache) -> tuple[np.ndarray, np.ndarray]:
    """(pages int32 [tiles, total], how many int32 [tiles]) that each tile of queries reaches."""
    blocks, count = np.zeros((tiles, total), dtype=np.int32), np.zeros(tiles, dtype=np.int32)
    for tile in range(tiles):
        first, end = tile * Q_TILE, (tile + 1) * Q_TILE
        inside = [piece for piece in pieces if piece.offset < end and piece.offset + piece.count > first]
        reached = [piece.table[: cache.pages_for(piece.visible)] for piece in inside]
        pages = np.unique(np.concatenate(reached)) if reached else np.zeros(0, dtype=np.int64)
        blocks[tile, : len(pages)], count[tile] = pages, len(pages)
    return blocks, count


@dataclass
class FlexPlan:
    """Attention over the page storage as the buffers describe it. Shapes never change within a bucket."""

    cache: BlockCache
    buffers: Buffers
    attention: Callable[..., Any]
    _masks: dict[int | None, BlockMask] = field(init=False, default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Write key and value [1, Hkv, T, D], then attend with query [1, Hq, T, D]. Padding gets zeros."""
        return self._attend(layer, query, key, value, scale, sliding_window, None)

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        """As `attend`, with capped scores."""
        return self._attend(layer, query, key, value, scale, window, capped_score(softcap))

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, score_mod: Any
    ) -> Tensor:
        self.cache.write(layer, self.buffers.where, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = (t[: self.cache.tokens].transpose(0, 1)[None] for t in self.cache.layer(layer, key[0], value[0]))
        out: Tensor = self.attention(
            query,
            keys,
            values,
            score_mod=score_mod,
            block_mask=self._mask(window),
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return out

    def _mask(self, sliding_window: int | None) -> BlockMask:
        if sliding_window not in self._masks:
            buffers = self.buffers
            self._masks[sliding_window] = BlockMask.from_kv_blocks(
                buffers.kv_count,
                buffers.kv_blocks,
                BLOCK_SIZE=(Q_TILE, self.cache.page_size),
                mask_mod=self._rule(sliding_window),
                seq_lengths=(buffers.where.shape[0], self.cache.tokens),
                compute_q_blocks=False,
            )
        return self._masks[sliding_window]

    def _rule(self, sliding_window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        buffers, size = self.buffers, self.cache.page_size
        position = buffers.positions[0]

        def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row = buffers.row[q]
            page = buffers.logical[row.clamp(min=0), k // size]
            seen = page * size + k % size
            inside = (row >= 0) & (page >= 0) & (seen < buffers.limit[q])
            return inside if sliding_window is None else inside & (position[q] - seen < sliding_window)

        return allowed


class StaticForward:
    """The model's forward by buckets. `rows`: the most rows a round has. On CUDA each bucket becomes a graph."""

    def __init__(self, model: PreTrainedModel, cache: BlockCache, rows: int) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._on_cuda = cache.device.type == "cuda"
        self._runs: dict[tuple[int, int], _Run] = {}
        cache.keep_finite()

    def __call__(self, packed: Packed) -> Tensor:
        """Logits [N, V] of the slots, N as packed; valid until the next call of the same bucket."""
        key = bucket(packed.ids.shape[1]), bucket(max(1, len(packed.read)))
        if key not in self._runs:
            self._runs[key] = self._make(*key)
        run = self._runs[key]
        run.buffers.fill(packed, self._cache)
        return run.forward()[: len(packed.slots.read)]

    def _make(self, tokens: int, slots: int) -> _Run:
        buffers = Buffers.allocate(tokens, slots, PIECES * self._rows, self._cache.pool.total, self._cache.device)
        buffers.row.fill_(-1)
        buffers.where.fill_(self._cache.scratch)
        plan = FlexPlan(self._cache, buffers, self._attention())
        run = _Run(self._model, buffers, plan)
        if self._on_cuda:
            run.capture()
        return run

    def _attention(self) -> Callable[..., Any]:
        if self._on_cuda:
            compiled: Callable[..., Any] = compiled_flex(dynamic=False)
            return compiled
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention


@dataclass
class _Run:
    """One bucket: its buffers, and the graph over them where there is one."""

    model: PreTrainedModel
    buffers: Buffers
    plan: FlexPlan
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None

    def forward(self) -> Tensor:
        """Logits [N, V]."""
        if self.graph is None:
            return self._eager()
        self.graph.replay()
        assert self.logits is not None, "capture keeps the graph's output"
        return self.logits

    def capture(self) -> None:
        """Record the forward once; two runs before it compile and allocate what a graph may not."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._eager()

    def _eager(self) -> Tensor:
        output = self.model(
            input_ids=self.buffers.ids,
            position_ids=self.buffers.positions,
            use_cache=False,
            attention_plan=self.plan,
            logits_to_keep=self.buffers.read,
        )
        logits: Tensor = output.logits[0]
        return logits
