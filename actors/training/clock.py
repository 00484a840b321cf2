"""Where a step's time goes: data, forward, backward, optimizer, communication, and what is left.

A phase ends where another begins, and a phase inside another (communication inside backward) stops the outer one, so
the shares add up to one. On CPU the clock is the host's; on CUDA it is events on the main stream, which keep the device
running and are read once, after the step's loss was waited for.

Communication is what the step *waits* for: `watch_collectives` stands between DeepSpeed and torch.distributed, and its
time runs while a collective is called or its handle is waited for, waiting for a slower worker included. What overlaps
with computation costs no time and is not counted; nor is, on CUDA, what another stream than the main one waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "optimizer", "communication")
OTHER = "other"
COLLECTIVES = (
    "all_reduce",
    "inference_all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_base",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all_single",
    "all_to_all",
    "barrier",
)


class StepClock:
    """Seconds of each phase of a step. begin() first, then phase(...), then end(); outside of these it does nothing."""

    def __init__(self, device: str) -> None:
        """device: "cpu", or "cuda" for the process's current GPU."""
        self._cuda = device == "cuda"
        self._stream: Any = None
        self._running = False
        self._now = OTHER
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """A step begins; one that did not end is forgotten."""
        self._marks, self._running = [], True
        self._stream = torch.cuda.current_stream() if self._cuda else None
        self._enter(OTHER)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """name: one of PHASES; the phase around it, if any, goes on afterwards."""
        if not self._running or self._elsewhere():
            yield
            return
        outer = self._now
        self._enter(name)
        try:
            yield
        finally:
            if self._running:
                self._enter(outer)

    def end(self) -> dict[str, float]:
        """Seconds by phase, `other` included, since begin()."""
        self._enter(OTHER)
        self._running = False
        seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        if self._stream is not None:
            self._marks[-1][1].synchronize()
        for (name, since), (_, until) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += self._between(since, until)
        return seconds

    def _elsewhere(self) -> bool:
        return self._stream is not None and torch.cuda.current_stream() != self._stream

    def _enter(self, name: str) -> None:
        self._now = name
        if self._stream is None:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((name, event))

    def _between(self, since: Any, until: Any) -> float:
        if self._stream is None:
            return float(until - since)
        return float(since.elapsed_time(until)) / 1000


def watch_collectives(backend: Any, clock: StepClock) -> Any:
    """DeepSpeed's communication backend with its collectives on the clock; everything else of it is as it was."""
    return _Watched(backend._inner if isinstance(backend, _Watched) else backend, clock)


class _Watched:
    """Hands every attribute of `inner` on; methods named in COLLECTIVES, and what they return, are on the clock."""

    def __init__(self, inner: Any, clock: StepClock) -> None:
        self.__dict__["_inner"], self.__dict__["_clock"] = inner, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in COLLECTIVES:
            timed = _timed(found, self._clock)
            self.__dict__[name] = timed
            return timed
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class _Handle:
    """A collective under way."""

    def __init__(self, work: Any, clock: StepClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.phase("communication"):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(collective: Callable[..., Any], clock: StepClock) -> Callable[..., Any]:
    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        with clock.phase("communication"):
            work = collective(*args, **kwargs)
        return _Handle(work, clock) if hasattr(work, "wait") else work

    return call
