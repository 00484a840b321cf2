"""When things happened to a request inside the engine: queued, begun, prompt read, each block, ended.

Cheap enough to be always on: a few numbers per request, one look at each row a round. Times are nanoseconds since 1970,
taken from the monotonic clock, so that no duration is negative whatever the machine's clock does in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from model.decoding import Outcome, Phase, Row

_SINCE_1970_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since 1970; never runs backwards within a process."""
    return time.monotonic_ns() + _SINCE_1970_NS


class BlockTime(NamedTuple):
    """A block from the begin of its first denoising round to the end of the round that committed it, or that ended the
    answer inside it. steps: its denoising steps."""

    begin_ns: int
    end_ns: int
    steps: int


@dataclass(frozen=True)
class Timeline:
    """A request's life in the engine. begun_ns, prefilled_ns: None where it never came so far.

    Blocks overlap by a round where a commit and the next block's first step were one forward; rows that decode token by
    token (mode "ar") have none. preemptions: how often the row lost its pages; waiting for new ones counts to a block.
    """

    queued_ns: int
    begun_ns: int | None
    prefilled_ns: int | None
    ended_ns: int
    blocks: tuple[BlockTime, ...] = ()
    preemptions: int = 0

    @property
    def queue_s(self) -> float:
        """Seconds until the request's row was made."""
        return ((self.begun_ns or self.ended_ns) - self.queued_ns) / 1e9

    @property
    def prefill_s(self) -> float | None:
        """Seconds that reading the prompt took; 0 where all of it was in the prefix cache."""
        if self.begun_ns is None or self.prefilled_ns is None:
            return None
        return (self.prefilled_ns - self.begun_ns) / 1e9


@dataclass
class _Open:
    queued_ns: int
    begun_ns: int | None = None
    prefilled_ns: int | None = None
    block_ns: int | None = None  # when the working block's first denoising round began
    blocks: list[BlockTime] = field(default_factory=list)
    preemptions: int = 0


class Timelines:
    """The timelines of an engine's unfinished requests, by id. `queued` may come from any thread."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def queued(self, request_id: str) -> None:
        self._open[request_id] = _Open(now_ns())

    def begun(self, row: Row) -> None:
        """The row has its pages; after a preemption this is no beginning."""
        times = self._open[row.request.id]
        if times.begun_ns is None:
            times.begun_ns = now_ns()
            times.prefilled_ns = times.begun_ns if row.phase is not Phase.PREFILL else None

    def preempted(self, request_id: str) -> None:
        self._open[request_id].preemptions += 1

    def round(self, outcomes: Iterable[Outcome], began_ns: int) -> None:
        """A round that began at `began_ns` has ended for these rows."""
        ended_ns = now_ns()
        for outcome in outcomes:
            _note(self._open[outcome.row.request.id], outcome.row, began_ns, ended_ns)

    def end(self, request_id: str) -> Timeline:
        """The request has ended now."""
        times = self._open.pop(request_id)
        return Timeline(
            queued_ns=times.queued_ns,
            begun_ns=times.begun_ns,
            prefilled_ns=times.prefilled_ns,
            ended_ns=now_ns(),
            blocks=tuple(times.blocks),
            preemptions=times.preemptions,
        )

    def forget(self, request_id: str) -> None:
        """The request was aborted, or has ended."""
        self._open.pop(request_id, None)


def _note(times: _Open, row: Row, began_ns: int, ended_ns: int) -> None:
    if times.prefilled_ns is None and row.phase is not Phase.PREFILL:
        times.prefilled_ns = ended_ns
    while len(times.blocks) < len(row.steps_per_block):
        begin_ns = began_ns if times.block_ns is None else times.block_ns
        times.blocks.append(BlockTime(begin_ns, ended_ns, row.steps_per_block[len(times.blocks)]))
        times.block_ns = None
    if row.block_steps and times.block_ns is None:
        times.block_ns = began_ns
