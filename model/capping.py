"""Attention with capped scores, cap * tanh(score / cap), as Gemma 2 has it.

No fused kernel of PyTorch's takes such scores on a CPU, so there it is plain PyTorch, a tile of queries at a time:
slower, and in training the scores are kept. Flex attention, on CUDA, is told what to do with a score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

TILE = 128  # query tokens whose scores against all keys stand in memory at once


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Callable[[slice], Tensor], scale: float, softcap: float
) -> Tensor:
    """Attention with scores cap * tanh(score / cap), [1, Hq, T, D], tile by tile; every query must see something.

    allowed: bool [rows, keys] of a slice of queries.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = []
    for start in range(0, query.shape[2], TILE):
        rows = slice(start, min(start + TILE, query.shape[2]))
        scores = (query[:, :, rows].to(wide) @ key.to(wide).transpose(-1, -2)) * scale
        scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~allowed(rows).to(scores.device), -torch.inf).softmax(-1)
        out.append(weights.to(value.dtype) @ value)
    return torch.cat(out, dim=2)


@cache
def capped_score(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The cap as flex attention's score_mod; one function for each cap, so that a kernel is compiled once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
