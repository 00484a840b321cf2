"""The paged cache and the attention of mixed rounds against a dense mask, written out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece

HEADS, KV_HEADS, WIDTH, LENGTH, K = 6, 2, 8, 64, 8
SCALE = WIDTH**-0.5
PAGES = 4 * LENGTH // K


@dataclass
class History:
    """All keys and values of one row, [KV_HEADS, LENGTH, WIDTH], as an oracle remembers them, and its pages."""

    key: Tensor
    value: Tensor
    table: np.ndarray


def dense_attention(query: Tensor, history: History, allowed: Tensor, cap: float | None) -> Tensor:
    """query [HEADS, n, WIDTH], allowed bool [n, LENGTH] -> [HEADS, n, WIDTH]."""
    groups = HEADS // KV_HEADS
    key, value = history.key.repeat_interleave(groups, 0), history.value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * SCALE
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value


def filled_cache(rows: int) -> tuple[BlockCache, list[History]]:
    """A cache whose rows are full, their pages scattered."""
    torch.manual_seed(0)
    cache = BlockCache(PAGES, K, dtype=torch.float64, device=torch.device("cpu"))
    scattered = torch.randperm(PAGES).numpy().reshape(4, -1)
    histories = [
        History(*torch.randn(2, KV_HEADS, LENGTH, WIDTH, dtype=torch.float64), scattered[i]) for i in range(rows)
    ]
    for history in histories:
        where = torch.from_numpy(cache.where(history.table, np.arange(LENGTH)))
        cache.write(0, where, history.key.transpose(0, 1), history.value.transpose(0, 1))
    return cache, histories


# row, first position, count, span, positions visible
MIXED = [
    (2, 0, 3 * K, K, 3 * K),  # a prefill chunk of three blocks
    (0, 2 * K, K, K, 3 * K),  # a whole block
    (3, 17, 1, 1, 18),  # an AR step
    (1, 5, 11, 1, 16),  # an AR prefill chunk
]
FUSED = [
    (1, 2 * K, 2 * K, K, 4 * K),  # a commit and the canvas of the next block
    (0, 2 * K + 4, 4, K, 3 * K),  # a sub-block, which sees its whole working block
    (2, 5 * K, K + 3, K, 6 * K + 3),  # a commit and a last block that is cut short
]


@pytest.mark.parametrize("window", [None, 1, 5, 12, 100])
@pytest.mark.parametrize("turns", [MIXED, FUSED])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_a_mixed_round_equals_dense_attention_of_each_row(
    turns: list[tuple[int, int, int, int, int]], window: int | None, cap: float | None
) -> None:
    cache, rows = filled_cache(4)
    pieces, where, offset = [], [], 0
    for row, start, count, span, visible in turns:
        pieces.append(Piece(offset, count, start, visible, span, rows[row].table))
        where.append(cache.where(rows[row].table, np.arange(start, start + count)))
        offset += count
    padding = 3
    query = torch.randn(1, HEADS, offset + padding, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KV_HEADS, offset + padding, WIDTH, dtype=torch.float64)
    plan = DecodePlan(cache, pieces, torch.from_numpy(np.concatenate(where)))
    if cap is None:
        out = plan.attend(0, query, key, value, SCALE, window)
    else:
        out = plan.attend_capped(0, query, key, value, SCALE, window, cap)
    offset = 0
    for row, start, count, span, visible in turns:
        here, history = slice(offset, offset + count), rows[row]
        history.key[:, start : start + count] = key[0, :, here]
        history.value[:, start : start + count] = value[0, :, here]
        q, k = torch.arange(start, start + count)[:, None], torch.arange(LENGTH)[None]
        allowed = (k // span <= q // span) & (k < visible)
        if window is not None:
            allowed &= q - k < window
        assert torch.allclose(out[0, :, here], dense_attention(query[0, :, here], history, allowed, cap), atol=1e-12)
        offset += count
    assert not out[0, :, offset:].any(), "padding attends to nothing"


def test_writing_touches_only_the_named_positions() -> None:
    cache, (one, two) = filled_cache(2)
    before = cache.keys[0].clone()
    where = torch.from_numpy(cache.where(two.table, np.array([3, 9])))
    new = torch.ones(2, KV_HEADS, WIDTH, dtype=torch.float64)
    cache.write(0, where, new, 2 * new)
    key, value = cache.read(0, where)
    assert key.shape == value.shape == (1, KV_HEADS, 2, WIDTH)
    assert key.eq(1).all() and value.eq(2).all()
    bits = cache.keys[0].view(torch.int64) != before.view(torch.int64)  # untouched memory may hold NaN
    changed = bits.any(-1).any(-1).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(where.tolist()) and len(where) == 2
    kept, _ = cache.read(0, torch.from_numpy(cache.where(one.table, np.arange(LENGTH))))
    assert torch.equal(kept[0], one.key)
    assert cache.nbytes == 2 * (PAGES + 1) * K * KV_HEADS * WIDTH * 8, "a page more, for padding"
    assert (cache.tokens, cache.pages_for(1), cache.pages_for(K), cache.pages_for(K + 1)) == (4 * LENGTH, 1, 1, 2)
