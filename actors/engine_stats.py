"""What the engine counts: sums since its start, and a moment of it for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from model.decoding import Outcome, Phase, Turn


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine. forwards: row-forwards by phase; prefix_hits: pages found in the prefix cache;
    preemptions: rows that lost their pages; pages_cached count as free. Sums and seconds are since the start; forward_s
    is the part of round_s that packing, the model's forwards and the choices took, model_s the model's forwards alone.
    """

    running: int
    waiting: int
    rounds: int
    forwards: dict[str, int]
    query_tokens: int
    committed_tokens: int
    pages_used: int
    pages_cached: int
    pages_free: int
    prefix_hits: int
    preemptions: int
    round_s: float
    forward_s: float
    model_s: float


@dataclass
class Counters:
    """Sums since the start, as EngineStats shows them. Not thread-safe: the engine holds its lock."""

    rounds: int = 0
    query_tokens: int = 0
    committed_tokens: int = 0
    preemptions: int = 0
    round_s: float = 0.0
    forward_s: float = 0.0
    forwards: dict[str, int] = field(default_factory=lambda: {p.value: 0 for p in Phase if p is not Phase.DONE})

    def count(self, turns: Sequence[Turn], outcomes: Sequence[Outcome], round_s: float, forward_s: float) -> None:
        """A round has ended."""
        self.rounds += 1
        self.round_s += round_s
        self.forward_s += forward_s
        for turn, outcome in zip(turns, outcomes, strict=True):
            self.forwards[outcome.phase.value] += 1
            self.query_tokens += len(turn.query)
            if outcome.error is None and turn.query.phase is Phase.COMMIT:
                self.committed_tokens += turn.query.keep - turn.query.start
