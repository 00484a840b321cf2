"""How much an engine still has to run: its backlog in query tokens. Arithmetic only: no torch, no Ray, no engine.

    backlog = prompt tokens to encode + expected answer tokens * query tokens that a token of an answer costs

Nobody knows how long an answer gets, so the lengths of the latest finished ones are asked: of those longer than what
this answer has by now, the mean of what they had left, never more than its max_tokens allow. What a token costs is
measured too: one that is decoded autoregressively costs one query token, one of a block as many as the block's steps
need, divided by what they decide.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

BACKLOG = "backlog_tokens"  # the name under which replicas report it to Serve
REMEMBERED = 256  # finished answers
UNKNOWN_LENGTH = 256  # expected of an answer, in tokens, before any has finished
UNKNOWN_COST, UNKNOWN_WEIGHT = 4.0, 64.0  # query tokens a token before any was decided, and how many tokens that counts
HALVED_AT = 16_384  # decided tokens after which what was measured long ago counts half


@dataclass(frozen=True)
class Work:
    """What one unfinished request has before it. prompt_left: prompt tokens to encode; answered: tokens decided."""

    prompt_left: int
    answered: int
    max_tokens: int


@dataclass(frozen=True)
class Backlog:
    """Query tokens still to run, and what one more request would add to its prompt: its expected answer.

    answer_length: tokens expected of an answer; token_cost: query tokens for each.
    """

    tokens: float
    answer_length: float
    token_cost: float

    def of_request(self, prompt_tokens: int, max_tokens: int) -> float:
        """Query tokens that a new request brings, of whose prompt `prompt_tokens` are not cached."""
        return prompt_tokens + min(self.answer_length, max_tokens) * self.token_cost


class AnswerLengths:
    """The lengths of the latest finished answers, and what they let one expect of others."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # of the first n of `_sorted`

    def learn(self, length: int) -> None:
        """An answer has ended with `length` tokens."""
        if len(self._latest) == self._remembered:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)
        self._sums = [0, *accumulate(self._sorted)]

    def left(self, answered: int, max_tokens: int) -> float:
        """Tokens still to come of an answer that has `answered` of at most `max_tokens`."""
        most = max_tokens - answered
        if most <= 0:
            return 0.0
        longer = bisect_right(self._sorted, answered)
        count = len(self._sorted) - longer
        if not count:  # longer than all that is known: as long again
            return float(min(most, answered or UNKNOWN_LENGTH))
        capped = max(longer, bisect_right(self._sorted, max_tokens))
        whole = self._sums[capped] - self._sums[longer] + (len(self._sorted) - capped) * max_tokens
        return whole / count - answered


class TokenCost:
    """Query tokens that a decided token costs, over the latest some ten thousand."""

    def __init__(self) -> None:
        self._query_tokens = UNKNOWN_COST * UNKNOWN_WEIGHT
        self._decided = UNKNOWN_WEIGHT

    @property
    def value(self) -> float:
        return self._query_tokens / self._decided

    def learn(self, query_tokens: int, decided: int) -> None:
        """A round ran so many query tokens of answers and decided so many tokens."""
        self._query_tokens += query_tokens
        self._decided += decided
        if self._decided > HALVED_AT:
            self._query_tokens /= 2
            self._decided /= 2


class BacklogMeter:
    """What an engine learns of its answers, and the backlog that follows. The engine holds its lock."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self.cost = TokenCost()

    def measure(self, works: Iterable[Work]) -> Backlog:
        """The backlog of these requests."""
        prompts, answers = 0, 0.0
        for work in works:
            prompts += work.prompt_left
            answers += self.lengths.left(work.answered, work.max_tokens)
        endless = 2**62
        return Backlog(prompts + answers * self.cost.value, self.lengths.left(0, endless), self.cost.value)
