"""How many requests a gateway lets in."""

from __future__ import annotations

from dataclasses import dataclass

from actors.fields import RequestError


@dataclass
class Admission:
    """At most `limit` requests at a time in this gateway; the next one is told to come back."""

    limit: int
    inside: int = 0

    def enter(self) -> None:
        if self.inside >= self.limit:
            raise RequestError("The server is full: try again in a moment.", status=429, code="rate_limit_exceeded")
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
