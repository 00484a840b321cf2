"""Attention of one decoding forward: rows of different phases, packed into [1, T], each over its own stretch of cache.

A forward is a list of pieces; a piece is consecutive query tokens of one row. All queries of a piece see the row's
positions [0, visible); in AR rows (`causal`) a query sees only up to itself. Block-causal prefill of n blocks is n
pieces, one a block, so an attention call has the same shape whatever the chunk, the batch or the neighbours: nothing
there can make a row depend on them. Keys and values are written to the cache first and read as views of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.cache import BlockCache


@dataclass(frozen=True)
class Piece:
    """`count` queries from packed index `offset` on, at the row's positions from `position` on.

    begin: storage index of the row's position 0. visible: positions that the last query sees.
    """

    offset: int
    count: int
    begin: int
    position: int
    visible: int
    causal: bool

    def first_key(self, sliding_window: int | None) -> int:
        """First position that any query of the piece reaches."""
        return 0 if sliding_window is None else max(0, self.position - sliding_window + 1)

    def needs_mask(self, sliding_window: int | None) -> bool:
        """False where every query sees every key of the stretch."""
        several = self.count > 1
        slides = sliding_window is not None and self.position + self.count > sliding_window
        return several and (self.causal or slides)


def row_pieces(whole: Piece, block_size: int) -> list[Piece]:
    """`whole` itself where it is causal or stays in one block; a block-causal chunk as one piece a block."""
    if whole.causal or whole.count <= block_size:
        return [whole]
    starts = range(0, whole.count, block_size)
    return [
        Piece(whole.offset + i, block_size, whole.begin, whole.position + i, whole.position + i + block_size, False)
        for i in starts
    ]


@dataclass
class DecodePlan:
    """Attention plan over `pieces`. where: int64 [tokens], storage indices of the tokens that are not padding."""

    cache: BlockCache
    pieces: list[Piece]
    where: Tensor
    _biases: dict[tuple[Piece, int | None], Tensor] = field(init=False, default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Write key and value [1, Hkv, T, D], then attend with query [1, Hq, T, D]. Padding gets zeros."""
        tokens = self.where.shape[0]
        self.cache.write(layer, self.where, key[0, :, :tokens].transpose(0, 1), value[0, :, :tokens].transpose(0, 1))
        out = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
        for piece in self.pieces:
            span = slice(piece.offset, piece.offset + piece.count)
            out[span] = self._attend_piece(layer, piece, query[0, :, span], scale, sliding_window)
        out[tokens:] = 0
        return out.transpose(0, 1)[None]

    def _attend_piece(self, layer: int, piece: Piece, query: Tensor, scale: float, window: int | None) -> Tensor:
        """query [Hq, n, D] -> [n, Hq, D]. The query heads of a group are folded into the query length."""
        first = piece.first_key(window)
        key, value = self.cache.view(layer, piece.begin + first, piece.begin + piece.visible)
        heads, count, width = query.shape
        folded = query.reshape(1, key.shape[1], -1, width)
        bias = self._bias(piece, window, folded) if piece.needs_mask(window) else None
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
        return out.view(heads, count, value.shape[3]).transpose(0, 1)

    def _bias(self, piece: Piece, sliding_window: int | None, folded: Tensor) -> Tensor:
        """Additive mask [group * n, keys], made once a forward."""
        if (piece, sliding_window) not in self._biases:
            q = torch.arange(piece.position, piece.position + piece.count, device=folded.device)[:, None]
            k = torch.arange(piece.first_key(sliding_window), piece.visible, device=folded.device)[None]
            hidden = k > q if piece.causal else torch.zeros_like(k > q)
            if sliding_window is not None:
                hidden = hidden | (q - k >= sliding_window)
            bias = torch.zeros(hidden.shape, dtype=folded.dtype, device=folded.device).masked_fill_(hidden, -torch.inf)
            self._biases[piece, sliding_window] = bias.repeat(folded.shape[2] // piece.count, 1)
        return self._biases[piece, sliding_window]
