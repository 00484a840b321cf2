"""Which replica a prompt should go to: prefix reports, a ledger of what was sent lately, and the ranking.

Arithmetic over numbers and hashes: no Ray, no torch. A replica reports now and then the keys of the blocks in its page
cache (`model.pages`: equal keys mean equal prefixes) and its backlog; between two reports the ledger knows what this
router has sent where, so that a follow-up finds its conversation at once and a burst does not pile up on one replica.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from model.pages import Key, chain_keys

SHORT = 8  # bytes of a key that travel: two blocks in 2^64 may be taken for each other, which only costs a detour
MOST_PAGES = 1024  # of a prompt that are looked at
SAME_BACKLOG = 256  # query tokens: replicas whose backlogs differ by less are equally good


# ------------------------------------------------------------------------------------------------- the ranking
@dataclass(frozen=True)
class Candidate:
    """A replica as a prompt sees it. cached: tokens of the prompt that it holds; backlog: query tokens before it."""

    replica: Hashable
    cached: int
    backlog: float


def rank(candidates: Sequence[Candidate], most_extra: float) -> list[list[Hashable]]:
    """Replicas in groups, best first; those in a group are equally good.

    First who holds the longest prefix, unless its backlog exceeds the shortest by more than `most_extra` query tokens;
    then all others by their backlog.
    """
    if not candidates:
        return []
    shortest = min(c.backlog for c in candidates)
    near = [c for c in candidates if c.cached and c.backlog <= shortest + most_extra]
    longest = max((c.cached for c in near), default=0)
    holders = [c for c in near if c.cached == longest]
    least = min((c.backlog for c in holders), default=0.0)
    chosen = [c for c in holders if c.backlog < least + SAME_BACKLOG]
    groups: dict[int, list[Hashable]] = defaultdict(list)
    for candidate in candidates:
        if candidate not in chosen:
            groups[int((candidate.backlog - shortest) / SAME_BACKLOG)].append(candidate.replica)
    others = [groups[i] for i in sorted(groups)]
    return [[c.replica for c in chosen], *others] if chosen else others


# ------------------------------------------------------------------------------------------------- reports
@dataclass(frozen=True)
class PrefixReport:
    """What one engine says to routers. at: time.time() there; salts: the first key of a chain, by decoding mode.

    backlog, answer_length, token_cost: see `actors.engine.backlog.Backlog`.
    """

    at: float
    page_size: int
    salts: Mapping[str, Key]
    keys: frozenset[bytes]
    backlog: float
    answer_length: float
    token_cost: float

    def pack(self) -> dict[str, Any]:
        """As it travels: keys in one string of bytes."""
        return {**self.__dict__, "salts": dict(self.salts), "keys": b"".join(sorted(self.keys))}

    @staticmethod
    def unpack(packed: Mapping[str, Any]) -> PrefixReport:
        keys = packed["keys"]
        return PrefixReport(**{**packed, "keys": frozenset(keys[i : i + SHORT] for i in range(0, len(keys), SHORT))})

    def chains(self, prompt: Sequence[int], mode: str) -> list[list[bytes]]:
        """The prompt's short keys in order, for each mode that it may be decoded in ("auto": the engine chooses)."""
        tokens = np.array(prompt[: MOST_PAGES * self.page_size], dtype=np.int64)
        salts = [self.salts[mode]] if mode in self.salts else list(self.salts.values())
        return [[key[:SHORT] for key in chain_keys(salt, tokens, self.page_size)] for salt in salts]

    def cost(self, uncached: int, max_tokens: int, answers: int = 1) -> float:
        """Query tokens that a call for `answers` to one prompt brings, of which `uncached` tokens must be encoded."""
        return uncached + answers * min(self.answer_length, max_tokens) * self.token_cost


# ------------------------------------------------------------------------------------------------- the ledger
@dataclass
class _Sent:
    """What went to one replica. keys: when they were sent; loads: query tokens and time, by request."""

    keys: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    loads: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)


class Ledger:
    """What this router has sent where and no report can know yet.

    remember_s: how long a sent prompt counts as cached without a report that says so (reports are late, and a prompt
    must be encoded first); most_keys: remembered of one replica.
    """

    def __init__(self, remember_s: float, most_keys: int = 16_384, clock: Callable[[], float] = time.time) -> None:
        self._remember_s = remember_s
        self._most_keys = most_keys
        self._clock = clock
        self._sent: dict[Hashable, _Sent] = defaultdict(_Sent)

    def record(self, replica: Hashable, request_id: str, chains: Iterable[Iterable[bytes]], load: float) -> None:
        """A request went there, `load` query tokens with it."""
        sent, now = self._sent[replica], self._clock()
        for chain in chains:
            for key in chain:
                sent.keys[key] = now
                sent.keys.move_to_end(key)
        while len(sent.keys) > self._most_keys:
            sent.keys.popitem(last=False)
        sent.loads[request_id] = (load, now)

    def ended(self, replica: Hashable, request_id: str) -> None:
        """It needs nothing any more."""
        if replica in self._sent:
            self._sent[replica].loads.pop(request_id, None)

    def forget_all_but(self, replicas: Iterable[Hashable]) -> None:
        """Other replicas are gone."""
        kept = set(replicas)
        for replica in [r for r in self._sent if r not in kept]:
            del self._sent[replica]

    def unreported(self, replica: Hashable, reported_at: float) -> float:
        """Query tokens that went there after its last report."""
        if replica not in self._sent:
            return 0.0
        loads = self._sent[replica].loads
        while loads and (oldest := next(iter(loads.items())))[1][1] <= reported_at:
            del loads[oldest[0]]
        return sum(load for load, _ in loads.values())

    def pages(self, replica: Hashable, chain: Sequence[bytes], reported: frozenset[bytes]) -> int:
        """Pages from the chain's beginning on that the replica holds: reported, or sent there lately."""
        keys = self._sent[replica].keys if replica in self._sent else {}
        since = self._clock() - self._remember_s
        return sum(1 for _ in takewhile(lambda k: k in reported or keys.get(k, since) > since, chain))
