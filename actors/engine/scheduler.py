"""The round planner: who runs, with how many query tokens. Knows numbers only: no torch, no Ray, no rows, no model.

Every decoding row runs in every round, so an easy row never waits for a hard one. Prefill has a token budget of its
own, given in arrival order in whole blocks: a stream of long prompts lengthens a round by at most that budget. Pages of
the cache go to the oldest rows first; when they run out the newest row gives its own back and waits at the head of the
queue. The oldest row always gets what it needs, so somebody always moves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """What a running row could do next. prefill_left: prompt tokens to encode first (0: it decodes), in whole blocks.

    query_tokens: tokens of its next decoding forward; ignored while prefill_left is not 0. phase: of that forward, for
    planners that tell phases apart.
    """

    id: str
    prefill_left: int
    query_tokens: int
    block_size: int
    phase: str = ""


@dataclass(frozen=True)
class Grant:
    """A row's part in the next round: `tokens` query tokens, a multiple of the block while it prefills."""

    id: str
    tokens: int


Planner = Callable[[Sequence[Demand], int], list[Grant]]  # at least one grant where there is a demand


def plan_round(demands: Iterable[Demand], prefill_tokens: int) -> list[Grant]:
    """All decoding rows, and prefill chunks within the budget; demands in order of arrival.

    The first row that prefills gets at least one block, so that a budget below the block size cannot stall it.
    """
    grants: list[Grant] = []
    left = prefill_tokens
    prefilling = False
    for demand in demands:
        if not demand.prefill_left:
            grants.append(Grant(demand.id, demand.query_tokens))
            continue
        affordable = left // demand.block_size * demand.block_size
        if not prefilling:
            affordable = max(affordable, demand.block_size)
        tokens = min(demand.prefill_left, affordable)
        prefilling = True
        if tokens:
            grants.append(Grant(demand.id, tokens))
            left = max(0, left - tokens)
    return grants


class Queue:
    """Requests that wait to run, by id, in order of arrival; those that lost their pages stand before all others."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def join(self, request_id: str) -> None:
        assert request_id not in self._waiting, f"{request_id} waits already"
        self._waiting[request_id] = None

    def join_first(self, request_id: str) -> None:
        """A row that was preempted: it is older than all who wait."""
        self.join(request_id)
        self._waiting.move_to_end(request_id, last=False)

    def leave(self, request_id: str) -> None:
        """It runs now, or the caller went away."""
        del self._waiting[request_id]
