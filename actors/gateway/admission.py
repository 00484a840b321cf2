"""How many requests a gateway lets in: all together, and of one API key. Who must wait is told for how long.

Running and waiting requests count alike: the engines' queues are theirs, the bound is ours. A request that asks for
several answers counts for as many.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.protocol.fields import RequestError

LONGEST_WAIT_S = 60
RECENT = 32  # requests that left last, whose pace tells when the next slot will be free


@dataclass
class Admission:
    """At most `limit` requests at a time in this gateway, at most `per_key` of one API key (None: no bound of its own).

    clock: seconds, monotonic.
    """

    limit: int
    per_key: int | None = None
    clock: Callable[[], float] = time.monotonic
    inside: int = 0
    _of_key: Counter[str] = field(default_factory=Counter)
    _left_at: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def check(self, slots: int, key: str | None = None) -> None:
        """Raises RequestError (400) for more answers at once than there will ever be room for."""
        most = self.limit if key is None or self.per_key is None else min(self.limit, self.per_key)
        if slots > most:
            raise RequestError(f"n {slots} is more than this server gives at once: ask for at most {most}.", param="n")

    def enter(self, key: str | None = None, slots: int = 1) -> None:
        """Take slots; key: who asks (a name of the API key, never the key), None without keys. Raises RequestError."""
        if self.inside + slots > self.limit:
            raise self._refusal("The server is full: try again in a moment.")
        if key is not None and self.per_key is not None and self._of_key[key] + slots > self.per_key:
            message = f"This API key may have {self.per_key} requests open, {self._of_key[key]} are: wait for an end."
            raise self._refusal(message)
        self.inside += slots
        if key is not None:
            self._of_key[key] += slots

    def leave(self, key: str | None = None, slots: int = 1) -> None:
        """Give the slots back."""
        self.inside -= slots
        self._left_at.extend([self.clock()] * slots)
        if key is not None:
            self._of_key[key] -= slots
            if not self._of_key[key]:
                del self._of_key[key]

    def retry_after_s(self) -> int:
        """Whole seconds until a slot should be free, at the pace of those who left last: 1 to 60."""
        if len(self._left_at) < 2:
            return 1
        now = self.clock()
        pace = (now - self._left_at[0]) / len(self._left_at)
        return min(LONGEST_WAIT_S, max(1, math.ceil(pace)))

    def _refusal(self, message: str) -> RequestError:
        return RequestError(message, status=429, code="rate_limit_exceeded", retry_after_s=self.retry_after_s())
