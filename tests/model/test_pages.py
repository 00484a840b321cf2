"""The books of the cache's pages, and the keys of the prefix cache."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.pages import PagePool, chain_keys

SALT = b"model"


def keys(*tokens: int, salt: bytes = SALT) -> list[bytes]:
    return chain_keys(salt, np.array(tokens), 2)


def test_a_key_stands_for_a_whole_prefix() -> None:
    assert len(keys(1, 2, 3, 4, 5)) == 2, "a block that is not whole has no key"
    assert keys(1, 2, 3, 4) == keys(1, 2, 3, 4, 5)
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 9, 9)[0]
    assert keys(1, 2, 3, 4)[1] != keys(9, 9, 3, 4)[1], "the same block behind another one is another prefix"
    assert keys(1, 2)[0] != keys(1, 2, salt=b"other")[0], "another model, mask or adapter"
    first = keys(1, 2)[0]
    assert chain_keys(first, np.array([3, 4]), 2) == keys(1, 2, 3, 4)[1:], "a chain may be continued"


def test_pages_are_counted_exactly() -> None:
    pool = PagePool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and (pool.available, pool.used) == (0, 3)
    with pytest.raises(IndexError, match="no page is available"):
        pool.take()
    pool.share(taken[:1])
    pool.release(taken[:1])
    assert pool.available == 0, "somebody still holds it"
    pool.release(taken)
    assert (pool.available, pool.free, pool.used) == (3, 3, 0)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken[:1])


def test_a_published_page_is_found_until_its_place_is_needed() -> None:
    pool = PagePool(3)
    one, two = keys(1, 2, 3, 4)
    a, b = pool.take(), pool.take()
    pool.publish(a, one)
    pool.publish(b, two)
    assert pool.find([one, two]) == [a, b] and pool.find([two, one]) == [b, a]
    pool.release([a, b])
    assert (pool.cached, pool.free, pool.available) == (2, 1, 3)
    assert pool.needed([a, b]) == 2
    pool.share([a])
    assert (pool.hits, pool.cached, pool.used) == (1, 1, 1)
    pool.take(), pool.take()
    assert pool.find([one, two]) == [a], "the page nobody held was evicted"
    assert pool.find([two]) == []
    pool.check([a, *[p for p in range(3) if p != a]])


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(2)
    one, two = keys(1, 2)[0], keys(3, 4)[0]
    a, b = pool.take(), pool.take()
    pool.publish(a, one)
    pool.publish(b, two)
    pool.release([a])
    pool.release([b])
    pool.share([a])
    pool.release([a])
    pool.take()
    assert pool.find([one]) == [a] and pool.find([two]) == []


def test_a_key_that_is_known_stays_where_it_is_and_the_other_page_stays_private() -> None:
    pool = PagePool(2)
    (key,) = keys(1, 2)
    a, b = pool.take(), pool.take()
    pool.publish(a, key)
    pool.publish(b, key)
    assert pool.find([key]) == [a]
    pool.release([b])
    assert (pool.free, pool.cached) == (1, 0)


def test_forgetting_leaves_what_rows_hold() -> None:
    pool = PagePool(3)
    one, two = keys(1, 2, 3, 4)
    a, b = pool.take(), pool.take()
    pool.publish(a, one)
    pool.publish(b, two)
    pool.release([a])
    pool.forget()
    assert (pool.free, pool.cached, pool.used) == (2, 0, 1) and pool.find([one]) == []
    pool.check([b])
    pool.release([b])
    assert pool.free == 3


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(1, prefix_cache=False)
    (key,) = keys(1, 2)
    page = pool.take()
    pool.publish(page, key)
    pool.release([page])
    assert pool.find([key]) == [] and pool.free == 1


@pytest.mark.parametrize("damage", ["lost", "twice", "forgotten", "wrong key"])
def test_the_check_finds_every_kind_of_wrong_book(damage: str) -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.publish(page, keys(1, 2)[0])
    held = [page]
    pool.check(held)
    if damage == "lost":
        pool._free.pop()
    elif damage == "twice":
        pool._free.append(page)
    elif damage == "forgotten":
        held = []
    else:
        pool._page_of[keys(1, 2)[0]] = page + 1
    with pytest.raises(AssertionError):
        pool.check(held)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_any_history_keeps_the_books(seed: int) -> None:
    """Rows that share prefixes come, grow, publish and go; the pages always add up and never hold two prefixes."""
    chance = random.Random(seed)
    pool = PagePool(12)
    rows: list[tuple[list[int], np.ndarray]] = []
    content: dict[int, bytes] = {}  # what a page holds, as its writer knows it
    for _ in range(120):
        if chance.random() < 0.5:
            tokens = np.array([chance.randrange(2) for _ in range(2 * chance.randrange(1, 5))])
            chain = keys(*tokens)
            found = pool.find(chain)
            assert [content[p] for p in found] == chain[: len(found)], "a found page holds what its key says"
            if pool.available - pool.needed(found) < len(chain) - len(found):
                continue
            pool.share(found)
            pages = found + [pool.take() for _ in chain[len(found) :]]
            for page, key in zip(pages[len(found) :], chain[len(found) :], strict=True):
                content[page] = key
                pool.publish(page, key)
            rows.append((pages, tokens))
        elif rows:
            pages, _ = rows.pop(chance.randrange(len(rows)))
            pool.release(pages)
        pool.check([page for pages, _ in rows for page in pages])
        assert pool.used + pool.cached + pool.free == 12
    for pages, _ in rows:
        pool.release(pages)
    pool.check()
    assert pool.available == 12
    assert all(a != b for a, b in pairwise(sorted(pool._free)))
