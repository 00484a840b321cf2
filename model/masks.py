"""Who may look at whom: one predicate per published mask, for training and for decoding.

A predicate takes two `Tokens` (queries and keys, broadcastable against each other) and returns a bool tensor, True =
may attend. The same function is the dense oracle (`dense`), the `mask_mod` of flex attention, the mask of a tile in
the structured CPU attention, and the picture in the docs. Source: Fast-dLLM v2 (arXiv 2509.26328), section 3.

    noisy_1  [ M_BD  .     M_OBC ]     M_BD   own block of the own view, both directions
    noisy_2  [ .     M_BD  M_OBC ]     M_OBC  clean blocks strictly before the own one
    clean    [ .     .     M_BC  ]     M_BC   clean blocks up to and including the own one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOISY_1, NOISY_2, CLEAN, CAUSAL = 0, 1, 2, 3
TAIL = -1  # document id of the unused end of a packed row

Predicate = Callable[["Tokens", "Tokens"], Tensor]


class Tokens(NamedTuple):
    """Where each token stands; int64 tensors of one shape. Blocks and positions count from the row's start."""

    stream: Tensor
    document: Tensor
    block: Tensor
    position: Tensor

    def at(self, index: Any) -> Tokens:
        return Tokens(*(field[index] for field in self))


def same_document(q: Tokens, k: Tokens) -> Tensor:
    """A document sees itself only; a tail block sees its own block only."""
    return (q.document == k.document) & ((q.document != TAIL) | (q.block == k.block))


def m_bd(q: Tokens, k: Tokens) -> Tensor:
    """M_BD: a noisy token sees its own block in its own view, bidirectionally."""
    return (q.stream != CLEAN) & (q.stream == k.stream) & (q.block == k.block)


def m_obc(q: Tokens, k: Tokens) -> Tensor:
    """M_OBC: a noisy token sees the clean blocks strictly before its own."""
    return (q.stream != CLEAN) & (k.stream == CLEAN) & (k.block < q.block)


def m_bc(q: Tokens, k: Tokens) -> Tensor:
    """M_BC: a clean token sees the clean blocks up to its own, bidirectional inside a block."""
    return (q.stream == CLEAN) & (k.stream == CLEAN) & (k.block <= q.block)


def block_diffusion(q: Tokens, k: Tokens) -> Tensor:
    """The training mask of Fast-dLLM v2, for two (2L) or three (3L) streams."""
    return same_document(q, k) & (m_bd(q, k) | m_obc(q, k) | m_bc(q, k))


def block_diffusion_beside_causal(q: Tokens, k: Tokens) -> Tensor:
    """The training mask with a fourth stream, which reads the clean tokens causally and which nobody else sees."""
    alone = (q.stream == CAUSAL) & (k.stream == CAUSAL)
    return torch.where(alone, causal(q, k), block_diffusion(q, k) & (q.stream != CAUSAL) & (k.stream != CAUSAL))


def two_tower(q: Tokens, k: Tokens) -> Tensor:
    """The denoiser tower of TwoTower (arXiv 2606.26493): the context strictly before the own block, and the own block.

    `block` holds a noisy block's first position, and a clean token's own position: blocks may start anywhere.
    """
    return same_document(q, k) & (m_bd(q, k) | m_obc(q, k))


def causal(q: Tokens, k: Tokens) -> Tensor:
    """Next-token training and AR decoding."""
    return same_document(q, k) & (k.position <= q.position)


def dense(predicate: Predicate, tokens: Tokens) -> Tensor:
    """The oracle: bool [T, T] for `tokens` of shape [T], rows are queries."""
    return predicate(tokens.at((slice(None), None)), tokens.at((None, slice(None))))


def stream_tokens(documents: Tensor, block_size: int, streams: tuple[int, ...]) -> Tokens:
    """`Tokens` [len(streams) * L] of whole streams laid one after the other over one row.

    documents: int64 [L], L a multiple of block_size.
    """
    position = torch.arange(documents.numel())
    repeat = len(streams)
    return Tokens(
        stream=torch.tensor(streams).repeat_interleave(documents.numel()),
        document=documents.repeat(repeat),
        block=(position // block_size).repeat(repeat),
        position=position.repeat(repeat),
    )
