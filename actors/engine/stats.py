"""What the engine counts: sums since its start, and a moment of it for whoever asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from model.decoding import Outcome, Phase, Turn

PHASES = tuple(phase.value for phase in Phase if phase is not Phase.DONE)


def mix_of(phases: Iterable[str]) -> str:
    """The name of a round by the phases of its rows: "denoise", "prefill+denoise", ..."""
    present = set(phases)
    return "+".join(phase for phase in PHASES if phase in present)


MIXES = tuple(mix_of(some) for size in range(1, len(PHASES) + 1) for some in combinations(PHASES, size))


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine. forwards: row-forwards by phase; rounds_by_mix: rounds by the phases of their rows (see
    `mix_of`); prefix_hits: pages found in the prefix cache; preemptions: rows that lost their pages;
    drafted_tokens, accepted_tokens: of lossless mode, tokens that were verified and those of them that stood;
    pages_cached count as free. Sums and seconds are since the start; forward_s is the part of round_s that packing, the
    model's forwards and the choices took, model_s the model's forwards alone.
    """

    running: int
    waiting: int
    rounds: int
    rounds_by_mix: dict[str, int]
    forwards: dict[str, int]
    query_tokens: int
    query_tokens_by_phase: dict[str, int]
    committed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    round_s: float = 0.0
    forward_s: float = 0.0
    forwards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    query_tokens_by_phase: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    rounds_by_mix: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MIXES, 0))

    def count(self, turns: Sequence[Turn], outcomes: Sequence[Outcome], round_s: float, forward_s: float) -> None:
        """A round has ended."""
        self.rounds += 1
        self.rounds_by_mix[mix_of(phase for outcome in outcomes for phase in _phases(outcome))] += 1
        self.round_s += round_s
        self.forward_s += forward_s
        for turn, outcome in zip(turns, outcomes, strict=True):
            self.forwards[outcome.phase.value] += 1
            self.query_tokens += len(turn.query)
            self.query_tokens_by_phase[outcome.phase.value] += len(turn.query)
            if turn.query.phase is not Phase.PREFILL:
                self.committed_tokens += outcome.committed
            if outcome.canvas:
                self.forwards[Phase.DENOISE.value] += 1
                self.query_tokens += outcome.canvas
                self.query_tokens_by_phase[Phase.DENOISE.value] += outcome.canvas
            self.drafted_tokens += outcome.drafted
            self.accepted_tokens += outcome.accepted


def _phases(outcome: Outcome) -> tuple[str, ...]:
    """Of the one forward that a row took part in, or of both."""
    return (outcome.phase.value, Phase.DENOISE.value) if outcome.canvas else (outcome.phase.value,)


def answer_tokens(turns: Sequence[Turn], outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """(query tokens of a round that were not a prompt's, tokens decided in it)."""
    prompts = sum(turn.query.keep - turn.query.start for turn in turns if turn.query.phase is Phase.PREFILL)
    ran = sum(len(turn.query) for turn in turns) + sum(outcome.canvas for outcome in outcomes)
    return ran - prompts, sum(len(outcome.reveals) for outcome in outcomes)
