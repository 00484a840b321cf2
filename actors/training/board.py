"""Where workers and driver of a run meet: progress one way, the wish to stop the other way. A tiny Ray actor.

The class is plain; `ray.remote(num_cpus=0)(Board)` makes the actor. It lives as long as its driver, so a worker whose
driver was killed notices at its next micro-step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.training.watchdog import Beat, Hang, Heard, find_hang


@dataclass(frozen=True)
class News:
    """What the driver sees: the newest step's record, the phase that the workers are in, further warnings."""

    phase: str
    record: dict[str, Any] | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An expected ending, told in one sentence: bad input (exit code 2) or something that could not be done (1)."""

    user_error: bool
    message: str


class Board:
    """environment: variables that workers need and no log may show, such as HF_TOKEN. clock: in seconds."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._environment = dict(environment)
        self._clock = clock
        self._beats: dict[int, Beat] = {}
        self._heard_at: dict[int, float] = {}
        self._moved_at: dict[int, float] = {}
        self._phase = "starting"
        self._record: dict[str, Any] | None = None
        self._warnings: list[str] = []
        self._failure: Failure | None = None
        self._stop = False

    def environment(self) -> dict[str, str]:
        return self._environment

    def enter(self, phase: str) -> None:
        """Rank 0 says what it is doing."""
        self._phase = phase

    def warn(self, message: str) -> None:
        """Any rank says what went wrong without ending the run."""
        self._warnings.append(message)

    def publish(self, record: dict[str, Any]) -> None:
        """Rank 0 says that a step is done."""
        self._record = record

    def fail(self, failure: Failure) -> None:
        """Any rank says why it ends; the first word counts."""
        self._failure = self._failure or failure

    def failure(self) -> Failure | None:
        return self._failure

    def news(self, told: int = 0) -> News:
        """told: warnings that the driver has had already."""
        return News(self._phase, self._record, tuple(self._warnings[told:]))

    def request_stop(self) -> None:
        self._stop = True

    def stop_requested(self) -> bool:
        return self._stop

    def beat(self, beat: Beat) -> None:
        """Any rank says where it stands."""
        before, now = self._beats.get(beat.rank), self._clock()
        if before is None or before.place != beat.place:
            self._moved_at[beat.rank] = now
        self._beats[beat.rank], self._heard_at[beat.rank] = beat, now

    def hang(self, timeout_s: float) -> Hang | None:
        """Who has kept the others waiting for so long."""
        now = self._clock()
        heard = [
            Heard(beat, now - self._heard_at[rank], now - self._moved_at[rank])
            for rank, beat in self._beats.items()
            if not beat.last
        ]
        return find_hang(heard, timeout_s)

    def nodes(self) -> dict[str, str]:
        """Addresses of the nodes that workers have been heard from, by node id."""
        return {beat.node: beat.address for beat in self._beats.values()}
