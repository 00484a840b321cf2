"""The block cache and the attention of mixed rounds against a dense mask, written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece, row_pieces

HEADS, KV_HEADS, WIDTH, LENGTH, K = 6, 2, 8, 64, 8
SCALE = WIDTH**-0.5


@dataclass
class History:
    """All keys and values of one row, [KV_HEADS, LENGTH, WIDTH], as an oracle remembers them."""

    key: Tensor
    value: Tensor


def dense_attention(query: Tensor, history: History, allowed: Tensor) -> Tensor:
    """query [HEADS, n, WIDTH], allowed bool [n, LENGTH] -> [HEADS, n, WIDTH]."""
    groups = HEADS // KV_HEADS
    key, value = history.key.repeat_interleave(groups, 0), history.value.repeat_interleave(groups, 0)
    scores = (query @ key.transpose(1, 2) * SCALE).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


def block_causal(q: Tensor, k: Tensor) -> Tensor:
    return k // K <= q // K


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


# row slot, first position, count, rule, whether its positions before are in the cache
MIXED: list[tuple[int, int, int, Callable[[Tensor, Tensor], Tensor]]] = [
    (2, 0, 3 * K, block_causal),  # a prefill chunk of three blocks
    (0, 2 * K, K, block_causal),  # a whole block
    (3, 17, 1, causal),  # an AR step
    (1, 5, 11, causal),  # an AR prefill chunk
]


@pytest.mark.parametrize("window", [None, 1, 5, 12, 100])
def test_a_mixed_round_equals_dense_attention_of_each_row(window: int | None) -> None:
    torch.manual_seed(0)
    cache = BlockCache(4, LENGTH, dtype=torch.float64, device=torch.device("cpu"))
    rows = [History(*torch.randn(2, KV_HEADS, LENGTH, WIDTH, dtype=torch.float64)) for _ in range(4)]
    for slot, history in enumerate(rows):
        where = torch.arange(LENGTH) + cache.index(slot, 0)
        cache.write(0, where, history.key.transpose(0, 1), history.value.transpose(0, 1))
    pieces: list[Piece] = []
    where, offset = [], 0
    for slot, start, count, rule in MIXED:
        whole = Piece(offset, count, cache.index(slot, 0), start, start + count, rule is causal)
        pieces += row_pieces(whole, 1 if rule is causal else K)
        where += [cache.index(slot, p) for p in range(start, start + count)]
        offset += count
    padding = 3
    query = torch.randn(1, HEADS, offset + padding, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KV_HEADS, offset + padding, WIDTH, dtype=torch.float64)
    out = DecodePlan(cache, pieces, torch.tensor(where)).attend(0, query, key, value, SCALE, window)
    offset = 0
    for slot, start, count, rule in MIXED:
        span, history = slice(offset, offset + count), rows[slot]
        history.key[:, start : start + count] = key[0, :, span]
        history.value[:, start : start + count] = value[0, :, span]
        q, k = torch.arange(start, start + count)[:, None], torch.arange(LENGTH)[None]
        allowed = rule(q, k) if window is None else rule(q, k) & (q - k < window)
        assert torch.allclose(out[0, :, span], dense_attention(query[0, :, span], history, allowed), atol=1e-12)
        offset += count
    assert not out[0, :, offset:].any(), "padding attends to nothing"


def test_a_sub_block_sees_the_whole_working_block() -> None:
    torch.manual_seed(0)
    cache = BlockCache(1, LENGTH, dtype=torch.float64, device=torch.device("cpu"))
    history = History(*torch.randn(2, KV_HEADS, LENGTH, WIDTH, dtype=torch.float64))
    cache.write(0, torch.arange(LENGTH), history.key.transpose(0, 1), history.value.transpose(0, 1))
    piece = Piece(0, 4, 0, 2 * K, 3 * K, False)
    query = torch.randn(1, HEADS, 4, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KV_HEADS, 4, WIDTH, dtype=torch.float64)
    out = DecodePlan(cache, [piece], torch.arange(2 * K, 2 * K + 4)).attend(0, query, key, value, SCALE, None)
    history.key[:, 2 * K : 2 * K + 4], history.value[:, 2 * K : 2 * K + 4] = key[0], value[0]
    allowed = (torch.arange(LENGTH) < 3 * K).expand(4, -1)
    assert torch.allclose(out[0], dense_attention(query[0], history, allowed), atol=1e-12)


def test_writing_touches_only_the_named_positions_and_reading_copies_nothing() -> None:
    cache = BlockCache(2, LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    nothing = torch.zeros(2 * LENGTH, KV_HEADS, WIDTH)
    cache.write(0, torch.arange(2 * LENGTH), nothing, nothing)
    cache.write(
        0, torch.tensor([cache.index(1, 3)]), torch.ones(1, KV_HEADS, WIDTH), torch.full((1, KV_HEADS, WIDTH), 2.0)
    )
    key, value = cache.view(0, cache.index(1, 0), cache.index(1, 0) + 5)
    assert key.shape == value.shape == (1, KV_HEADS, 5, WIDTH)
    assert key.sum() == KV_HEADS * WIDTH and key[0, :, 3].eq(1).all()
    cache.write(0, torch.tensor([cache.index(1, 4)]), torch.ones(1, KV_HEADS, WIDTH), torch.ones(1, KV_HEADS, WIDTH))
    assert key[0, :, 4].eq(1).all(), "a view shows what is written later"
    assert cache.nbytes == 2 * 2 * LENGTH * KV_HEADS * WIDTH * 4


def test_slots_are_counted_exactly() -> None:
    cache = BlockCache(3, LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    taken = [cache.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and cache.free == 0
    with pytest.raises(IndexError):
        cache.take()
    cache.give_back(taken[1])
    assert cache.free == 1 and cache.take() == taken[1]
    cache.give_back(taken[0])
    with pytest.raises(AssertionError, match="given back twice"):
        cache.give_back(taken[0])
