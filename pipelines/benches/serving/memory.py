"""Memory of a service's processes over time: samples of it, and a straight line through them with its noise."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import psutil

from pipelines.benches.serving.service import Service

MIB = 2**20
ROLES = ("gateway", "proxy", "replica", "controller")
BLOCKS = 12  # whose averages the line goes through: neighbouring samples are no independent ones


@dataclass(frozen=True)
class Slope:
    """MiB an hour; noise: twice the standard error."""

    per_hour: float
    noise: float

    @property
    def flat(self) -> bool:
        return abs(self.per_hour) <= self.noise


def slope_of(seconds: Sequence[float], mib: Sequence[float]) -> Slope:
    """A straight line through the averages of BLOCKS equal parts. Needs at least three samples a part on average."""
    if len(seconds) < 3 * BLOCKS:
        return Slope(float("nan"), float("nan"))
    hours = np.array([np.mean(part) for part in np.array_split(np.asarray(seconds), BLOCKS)]) / 3600
    means = np.array([np.mean(part) for part in np.array_split(np.asarray(mib), BLOCKS)])
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ means) / spread
    rest = means - means.mean() - slope * centred
    return Slope(slope, 2 * float(np.sqrt(rest @ rest / (BLOCKS - 2) / spread)))


@dataclass
class MemoryWatch:
    """`with MemoryWatch(...)`: resident MiB of every role, all its processes together, one sample each `every_s`."""

    service: Service
    every_s: float
    seconds: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stopping.wait(self.every_s):
                return

    def sample(self) -> None:
        self.seconds.append(time.monotonic())
        for role in ROLES:
            self.mib[role].append(sum(resident(process) for process in self.service.processes(role)) / MIB)

    def slope(self, role: str, since: float) -> Slope:
        """Of what was sampled at `since` (time.monotonic()) or later."""
        kept = [(s, m) for s, m in zip(self.seconds, self.mib[role], strict=True) if s >= since]
        return slope_of([s for s, _ in kept], [m for _, m in kept])


def resident(process: psutil.Process) -> int:
    """Bytes; 0 for a process that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0
