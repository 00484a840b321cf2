"""How many requests a gateway lets in: all together, and of one API key. Who must wait is told for how long.

Running and waiting requests count alike: the engines' queues are theirs, the bound is ours.
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

    def enter(self, key: str | None = None) -> None:
        """Take a slot; key: who asks (a name of the API key, never the key), None without keys. Raises RequestError."""
        if self.inside >= self.limit:
            raise self._refusal("The server is full: try again in a moment.")
        if key is not None and self.per_key is not None and self._of_key[key] >= self.per_key:
            message = f"This API key has {self.per_key} requests open, as many as it may: wait for one to end."
            raise self._refusal(message)
        self.inside += 1
        if key is not None:
            self._of_key[key] += 1

    def leave(self, key: str | None = None) -> None:
        """Give the slot back."""
        self.inside -= 1
        self._left_at.append(self.clock())
        if key is not None:
            self._of_key[key] -= 1
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
