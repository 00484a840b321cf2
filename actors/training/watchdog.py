"""Who hangs: every worker says where it stands, and the one that keeps the others waiting is told from them.

Workers wait for each other several times a step, so when one hangs all of them stop. The one to blame is a process
that no longer says anything (stopped, or stuck outside Python), or else the furthest behind of those that do not wait
for others just now. A beat carries no time: only the board's clock counts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import ray

LONGEST_PAUSE_S = 5.0
BEATS_A_TIMEOUT = 8


@dataclass(frozen=True)
class Place:
    """Where a worker stands: 1-based step; micro_batch 0 is reading its rows, then 1 .. micro_batches."""

    step: int
    micro_batch: int
    micro_batches: int

    @property
    def text(self) -> str:
        if not self.micro_batch:
            return "while reading its rows"
        return f"in its micro-batch {self.micro_batch} of {self.micro_batches}"


@dataclass(frozen=True)
class Beat:
    """What a worker says now and then. place: None between steps, where nobody watches. waits: for other workers."""

    rank: int
    process: int
    node: str
    address: str
    place: Place | None
    waits: bool


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
    """Who hangs in a step, if anybody does; nobody does while one worker moves or is between steps."""
    heard = list(heard)
    if not heard or any(one.beat.place is None or one.still_s < timeout_s for one in heard):
        return None
    silent = [one.beat for one in heard if one.silent_s >= timeout_s]
    places = [place for one in heard if (place := one.beat.place) is not None]
    last = min((place.step, place.micro_batch) for place in places)
    behind = [one.beat for one in heard if one.beat.place and (one.beat.place.step, one.beat.place.micro_batch) == last]
    busy = [beat for beat in behind if not beat.waits]
    return _hang(silent or busy or behind, timeout_s)


def _hang(beats: list[Beat], timeout_s: float) -> Hang:
    place = beats[0].place
    assert place is not None
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
        self._place: Place | None = None
        self._ended = threading.Event()
        context = ray.get_runtime_context() if ray.is_initialized() else None
        self._node = context.get_node_id() if context else ""
        self._address = ray.util.get_node_ip_address() if context else "this machine"

    def at(self, step: int, micro_batch: int, micro_batches: int) -> None:
        """The thread has come to a place of a 0-based step."""
        self._place = Place(step + 1, micro_batch, micro_batches)

    def rest(self) -> None:
        """The thread is between steps: told at once, so that a long save is not taken for a hang."""
        self._place = None
        self._beat()

    def run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._beat()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        waits = waits_for_others(self._thread)
        self._tell(Beat(self._rank, os.getpid(), self._node, self._address, self._place, waits))


def waits_for_others(thread: int) -> bool:
    """Whether a thread of this process is inside torch.distributed."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
