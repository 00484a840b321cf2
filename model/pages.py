"""Which pages of the cache are whose: reference counts, and the prefix cache. Numbers only, no tensors.

A page holds one block of tokens and is in one of three states:

    free     nobody needs it
    used     `references` live rows read or write it
    cached   no row needs it, but it holds a whole committed block under a known key: it counts as free, and the least
             recently used one is evicted when no page is free

A key is the hash of a block's tokens chained to the key of the block before it, from a salt that names everything else
the keys and values depend on. So equal keys mean equal prefixes, and one look-up a block finds the longest known one.
Only whole committed blocks are ever published; a page that is being written is known to its row alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

Key = bytes


def chain_keys(salt: Key, tokens: np.ndarray, page_size: int) -> list[Key]:
    """Keys of the whole pages of `tokens` int64 [n], in order; n // page_size of them."""
    keys: list[Key] = []
    key = salt
    for start in range(0, len(tokens) - page_size + 1, page_size):
        block = np.ascontiguousarray(tokens[start : start + page_size], dtype=np.int64)
        key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class PagePool:
    """The pages [0, total) and who holds them. `prefix_cache` off: nothing is ever published."""

    def __init__(self, total: int, *, prefix_cache: bool = True) -> None:
        self.total = total
        self.prefix_cache = prefix_cache
        self.hits = 0  # pages that a look-up saved from being encoded again
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced published pages, least recently used first

    @property
    def available(self) -> int:
        """Pages that can be taken now: the free ones and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.available

    def take(self) -> int:
        """A page for one row, free ones first. Raises IndexError when none is available: ask `available` first."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            raise IndexError("no page is available")
        self._references[page] = 1
        return page

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Pages of the longest run of known keys from the first on, not taken yet: see `share`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def known(self, most: int) -> list[Key]:
        """At most `most` of the keys that `find` knows: those in use, then the latest used. For any thread: it copies
        first, and what changes meanwhile is only missing."""
        cached = list(self._cached)
        published = dict(self._key_of)
        idle = [published.pop(page) for page in reversed(cached) if page in published]
        return [*published.values(), *idle][:most]

    def needed(self, pages: Iterable[int]) -> int:
        """How many of these found pages `share` would take from the available ones."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more row holds each of these pages."""
        for page in pages:
            self._cached.pop(page, None)
            self._references[page] += 1
            self.hits += 1

    def publish(self, page: int, key: Key) -> None:
        """The page holds the whole committed block `key` from now on. A key that is known already stays where it is."""
        assert self._references[page] > 0, f"page {page} is published by nobody who holds it"
        if self.prefix_cache and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """One row fewer holds each of these pages."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} was released more often than taken"
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Empty the prefix cache: what nobody references becomes free, what rows hold is no longer found."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check(self, held: Iterable[int] = ()) -> None:
        """Raises AssertionError unless the books agree with the pages that live rows hold, named once for each row."""
        counted = [0] * self.total
        for page in held:
            counted[page] += 1
        wrong = [page for page in range(self.total) if counted[page] != self._references[page]]
        assert not wrong, f"pages {wrong[:5]} are counted {[self._references[p] for p in wrong[:5]]} times, not as held"
        idle = sorted([*self._free, *self._cached])
        assert idle == [page for page in range(self.total) if not counted[page]], "a page is lost or handed out twice"
        assert {self._page_of[key]: key for key in self._page_of} == self._key_of, "keys and pages do not agree"
