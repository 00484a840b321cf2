"""Attention of one decoding forward: rows of different phases, packed into [1, T], each over its own pages.

A forward is a list of pieces, one a row: consecutive query tokens of the row and how far each of them sees. `span` is
the row's mask in one number: a query sees to the end of its own span, so 1 is causal and the block size is
block-causal. One piece may therefore hold a prefill chunk of many blocks, or a commit and the next block's canvas.
Keys and values are written to the pages first. On CPU the project's own kernel then reads them where they are. Without
a compiler, PyTorch reads a copy a piece and attends span by span with views of it: a call has the same shape whatever
the chunk, the pages or the neighbours, so nothing there can make a row depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.cache import BlockCache
from model.capping import capped_attention
from model.kernels import paged_attention

NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Piece:
    """`count` queries from packed index `offset` on, at the row's positions from `position` on.

    visible: positions the row holds after this forward; span: see above; table: the row's pages, int64 [pages].
    """

    offset: int
    count: int
    position: int
    visible: int
    span: int
    table: np.ndarray

    def spans(self) -> list[Span]:
        """The piece cut where its queries begin to see further; a causal piece stays whole."""
        if self.span == 1:
            return [Span(self.offset, self.count, self.position, self.visible, True)]
        end = self.position + self.count
        starts = [self.position, *range((self.position // self.span + 1) * self.span, end, self.span)]
        ends = [*starts[1:], end]
        return [
            Span(self.offset + a - self.position, b - a, a, min((a // self.span + 1) * self.span, self.visible), False)
            for a, b in zip(starts, ends, strict=True)
        ]


@dataclass(frozen=True)
class Span:
    """Queries of a piece that see the same positions [0, visible), or in a causal piece at most up to themselves."""

    offset: int
    count: int
    position: int
    visible: int
    causal: bool

    def first_key(self, sliding_window: int | None) -> int:
        """First position that any query reaches."""
        return 0 if sliding_window is None else max(0, self.position - sliding_window + 1)

    def hidden(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """Bool [count, keys from `first_key` on]: what a query does not see."""
        q = torch.arange(self.position, self.position + self.count, device=device)[:, None]
        k = torch.arange(self.first_key(sliding_window), self.visible, device=device)[None]
        hidden = k > q if self.causal else torch.zeros_like(k > q)
        return hidden if sliding_window is None else hidden | (q - k >= sliding_window)

    def needs_mask(self, sliding_window: int | None) -> bool:
        """False where every query sees every key of the stretch."""
        slides = sliding_window is not None and self.position + self.count > sliding_window
        return self.count > 1 and (self.causal or slides)


@dataclass
class DecodePlan:
    """Attention plan over `pieces`. where: int64 [tokens], storage indices of the tokens that are not padding."""

    cache: BlockCache
    pieces: list[Piece]
    where: Tensor
    _biases: dict[tuple[Span, int | None], Tensor] = field(init=False, default_factory=dict)
    _storage: dict[int, Tensor] = field(init=False, default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Write key and value [1, Hkv, T, D], then attend with query [1, Hq, T, D]. Padding gets zeros."""
        tokens = self._write(layer, key, value)
        if self._kernel_takes(query, value):
            return self._attend_kernel(layer, query, scale, sliding_window)
        out = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
        for index, piece in enumerate(self.pieces):
            keys, values = self.cache.read(layer, self._where(index, piece))
            for span in piece.spans():
                here = slice(span.offset, span.offset + span.count)
                out[here] = self._attend_span(span, query[0, :, here], keys, values, scale, sliding_window)
        out[tokens:] = 0
        return out.transpose(0, 1)[None]

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        """As `attend`, with capped scores; always in PyTorch."""
        self._write(layer, key, value)
        out = query.new_zeros((*query.shape[:3], value.shape[3]))
        for index, piece in enumerate(self.pieces):
            keys, values = self.cache.read(layer, self._where(index, piece))
            for span in piece.spans():
                here, seen = slice(span.offset, span.offset + span.count), slice(span.first_key(window), span.visible)
                k, v, allowed = keys[:, :, seen], values[:, :, seen], ~span.hidden(window, query.device)
                out[:, :, here] = capped_attention(query[:, :, here], k, v, allowed.__getitem__, scale, softcap)
        return out

    def _write(self, layer: int, key: Tensor, value: Tensor) -> int:
        """Keys and values of the tokens that are no padding into the pages; how many they are."""
        tokens = self.where.shape[0]
        self.cache.write(layer, self.where, key[0, :, :tokens].transpose(0, 1), value[0, :, :tokens].transpose(0, 1))
        return tokens

    def _kernel_takes(self, query: Tensor, value: Tensor) -> bool:
        fits = query.dtype in paged_attention.DTYPES and query.shape[3] == value.shape[3]
        return query.device.type == "cpu" and fits and paged_attention.available()

    def _attend_kernel(self, layer: int, query: Tensor, scale: float, sliding_window: int | None) -> Tensor:
        pieces, tables = self.descriptors
        out = paged_attention.paged_attention(
            query[0].transpose(0, 1),
            self.cache.keys[layer],
            self.cache.values[layer],
            pieces,
            tables,
            self.cache.page_size,
            scale,
            sliding_window,
        )
        return out.transpose(0, 1)[None]

    @cached_property
    def descriptors(self) -> tuple[Tensor, Tensor]:
        """The pieces as the kernels read them: int64 [P, 6] and the page tables behind one another, int64 [pages]."""
        lines, begin = [], 0
        for piece in self.pieces:
            lines.append((piece.offset, piece.count, piece.position, piece.visible, piece.span, begin))
            begin += len(piece.table)
        tables = [NONE, *(piece.table for piece in self.pieces)]
        pieces = np.array(lines, dtype=np.int64).reshape(-1, paged_attention.PIECE_FIELDS)
        return torch.from_numpy(pieces), torch.from_numpy(np.concatenate(tables))

    def _where(self, index: int, piece: Piece) -> Tensor:
        """Storage indices of a piece's positions [0, visible), made once a forward."""
        if index not in self._storage:
            where = self.cache.where(piece.table, np.arange(piece.visible))
            self._storage[index] = torch.from_numpy(where).to(self.where.device)
        return self._storage[index]

    def _attend_span(
        self, span: Span, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """query [Hq, n, D] -> [n, Hq, D]. The query heads of a group are folded into the query length."""
        seen = slice(span.first_key(window), span.visible)
        key, value = keys[:, :, seen], values[:, :, seen]
        heads, count, width = query.shape
        folded = query.reshape(1, key.shape[1], -1, width)
        bias = self._bias(span, window, folded) if span.needs_mask(window) else None
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
        return out.view(heads, count, value.shape[3]).transpose(0, 1)

    def _bias(self, span: Span, sliding_window: int | None, folded: Tensor) -> Tensor:
        """Additive mask [group * n, keys], made once a forward."""
        if (span, sliding_window) not in self._biases:
            hidden = span.hidden(sliding_window, folded.device)
            bias = torch.zeros(hidden.shape, dtype=folded.dtype, device=folded.device).masked_fill_(hidden, -torch.inf)
            self._biases[span, sliding_window] = bias.repeat(folded.shape[2] // span.count, 1)
        return self._biases[span, sliding_window]
