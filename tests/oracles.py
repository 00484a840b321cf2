"""Slow and obvious forms of what the project computes, for comparison: dense masks, two rows of 2L, plain softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.corruption import complementary_views
from model.layout import RowBatch
from model.masks import CLEAN, NOISY_1, NOISY_2, TAIL, block_diffusion, dense, stream_tokens


@dataclass(frozen=True)
class DensePlan:
    """Attention under an explicit bool mask [T, T], written out."""

    allowed: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        return self.attend_capped(layer, query, key, value, scale, sliding_window, float("inf"))

    def attend_capped(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) * scale
        if softcap < float("inf"):
            scores = softcap * (scores / softcap).tanh()
        return scores.masked_fill(~self.allowed, float("-inf")).softmax(-1) @ value


def logits_of(model: Any, ids: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
    """Logits [T, V] of one sequence [T] under a dense mask."""
    out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_plan=DensePlan(allowed))
    logits: Tensor = out.logits[0]
    return logits


def reference_loss(
    model: Any, rows: RowBatch, mask: Tensor, mask_token_id: int, block_size: int, streams: int
) -> Tensor:
    """Sum of cross-entropy over both views. streams=2: two rows [noisy | clean] (4L, as published); 3: one row (3L)."""
    total = torch.zeros((), dtype=model.dtype)
    views = complementary_views(rows.input_ids, rows.labels, mask, mask_token_id)
    for b in range(rows.input_ids.shape[0]):
        noisy = [v[b] for v in views]
        if streams == 3:
            total = total + _row_loss(model, rows, mask, b, noisy, (NOISY_1, NOISY_2), block_size)
        else:
            for view, stream in ((0, NOISY_1), (1, NOISY_2)):
                total = total + _row_loss(model, rows, mask, b, [noisy[view]], (stream,), block_size)
    return total


def _row_loss(
    model: Any, rows: RowBatch, mask: Tensor, b: int, noisy: list[Tensor], streams: tuple[int, ...], block_size: int
) -> Tensor:
    length, labels, documents = rows.input_ids.shape[1], rows.labels[b], rows.document_ids[b]
    tokens = stream_tokens(documents, block_size, (*streams, CLEAN))
    ids = torch.cat((*noisy, rows.input_ids[b]))
    logits = logits_of(model, ids, rows.position_ids[b].repeat(len(streams) + 1), dense(block_diffusion, tokens))
    total = torch.zeros((), dtype=logits.dtype)
    for n, stream in enumerate(streams):
        in_view = mask[b] if stream == NOISY_1 else ~mask[b]
        for i in range(1, length):
            same = documents[i] == documents[i - 1] and documents[i] != TAIL
            if labels[i] != -100 and in_view[i] and same:
                total = total + functional.cross_entropy(logits[n * length + i - 1], labels[i])
    return total
