"""Who hangs: every worker says where it stands, and the one that keeps the others waiting is told from them.

Workers wait for each other several times a step, so when one hangs all of them stop. The one to blame is a process
that no longer says anything (stopped, or stuck outside Python), or else the furthest behind of those that do not wait
for others just now. Between steps (a checkpoint, an evaluation) only silence counts. A beat carries no time: only the
board's clock counts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import ray

LONGEST_PAUSE_S = 5.0
BEATS_A_TIMEOUT = 8


BEHIND = -1


@dataclass(frozen=True)
class Place:
    """Where a worker stands: 1-based step; micro_batch 0 is reading its rows, then 1 .. micro_batches, then BEHIND."""

    step: int
    micro_batch: int
    micro_batches: int

    @property
    def in_step(self) -> bool:
        return self.micro_batch != BEHIND

    @property
    def text(self) -> str:
        if self.micro_batch > 0:
            return f"in its micro-batch {self.micro_batch} of {self.micro_batches}"
        return "while reading its rows" if self.in_step else "behind its last micro-batch"


@dataclass(frozen=True)
class Beat:
    """What a worker says now and then. waits: for other workers; last: it says no more from now on."""

    rank: int
    process: int
    node: str
    address: str
    place: Place
    waits: bool
    last: bool = False


@dataclass(frozen=True)
class Heard:
    """A worker's newest beat, and for how many seconds it has said nothing, and has been at the same place."""

    beat: Beat
    silent_s: float
    still_s: float


@dataclass(frozen=True)
class Hang:
    """Workers to be ended, and the sentence that says why."""

    beats: tuple[Beat, ...]
    message: str


def find_hang(heard: Iterable[Heard], timeout_s: float) -> Hang | None:
    """Who hangs, if anybody does: who is silent; or else, while all are in a step and none moves, who holds them up."""
    heard = list(heard)
    silent = [one.beat for one in heard if one.silent_s >= timeout_s]
    if silent:
        return _hang(silent, timeout_s)
    if not heard or any(not one.beat.place.in_step or one.still_s < timeout_s for one in heard):
        return None
    last = min(_order(one.beat) for one in heard)
    behind = [one.beat for one in heard if _order(one.beat) == last]
    return _hang([beat for beat in behind if not beat.waits] or behind, timeout_s)


def _order(beat: Beat) -> tuple[int, int]:
    return beat.place.step, beat.place.micro_batch


def _hang(beats: list[Beat], timeout_s: float) -> Hang:
    place = beats[0].place
    who = ", ".join(f"{beat.rank} (process {beat.process} on {beat.address})" for beat in beats)
    noun, verb = ("worker", "hangs") if len(beats) == 1 else ("workers", "hang")
    return Hang(tuple(beats), f"Step {place.step} has not moved for {timeout_s:g} s: {noun} {who} {verb} {place.text}.")


class Heart(threading.Thread):
    """Beats for the thread that makes it. tell: takes a Beat and does not wait."""

    def __init__(self, rank: int, tell: Callable[[Beat], None], timeout_s: float) -> None:
        super().__init__(name="heart", daemon=True)
        self._rank, self._tell = rank, tell
        self._pause_s = min(timeout_s / BEATS_A_TIMEOUT, LONGEST_PAUSE_S)
        self._thread = threading.get_ident()
        self._place = Place(0, BEHIND, 0)
        self._ended = threading.Event()
        context = ray.get_runtime_context() if ray.is_initialized() else None
        self._node = context.get_node_id() if context else ""
        self._address = ray.util.get_node_ip_address() if context else "this machine"

    def at(self, step: int, micro_batch: int, micro_batches: int) -> None:
        """The thread has come to a place of a 0-based step."""
        self._place = Place(step + 1, micro_batch, micro_batches)

    def rest(self) -> None:
        """The thread is between steps: told at once, so that a long save is not taken for a hang."""
        self._place = replace(self._place, micro_batch=BEHIND)
        self._beat()

    def run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._beat()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self._beat(last=True)

    def _beat(self, *, last: bool = False) -> None:
        waits = waits_for_others(self._thread)
        self._tell(Beat(self._rank, os.getpid(), self._node, self._address, self._place, waits, last))


def waits_for_others(thread: int) -> bool:
    """Whether a thread of this process is inside torch.distributed."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
