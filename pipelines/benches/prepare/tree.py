"""CPU seconds and memory of this process and all below it: a driver, its Ray and the workers of that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

POLL_S = 0.2
MIB = 1 << 20


@dataclass
class Watched:
    """cpu_s: CPU seconds of all processes while watched. Peaks in bytes of private memory (shared pages, the object
    store among them, left out): of the driver, of the largest other process, and of all together."""

    cpu_s: float = 0.0
    driver: int = 0
    worker: int = 0
    whole: int = 0
    _at_first: dict[int, float] = field(default_factory=dict)
    _latest: dict[int, float] = field(default_factory=dict)

    def look(self, driver: psutil.Process) -> None:
        """Take a sample."""
        private: dict[int, int] = {}
        for process in [driver, *driver.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times, memory = process.cpu_times(), process.memory_info()
                self._latest[process.pid] = times.user + times.system
                private[process.pid] = memory.rss - memory.shared
        own = private.pop(driver.pid, 0)
        self.driver = max(self.driver, own)
        self.worker = max(self.worker, *private.values(), 0)
        self.whole = max(self.whole, own + sum(private.values()))
        self.cpu_s = sum(seconds - self._at_first.get(pid, 0.0) for pid, seconds in self._latest.items())

    def begin(self, driver: psutil.Process) -> None:
        """What was spent before does not count."""
        self.look(driver)
        self._at_first, self.cpu_s = dict(self._latest), 0.0


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Sample the tree of this process until the block ends."""
    driver, seen, ended = psutil.Process(), Watched(), threading.Event()
    seen.begin(driver)

    def poll() -> None:
        while not ended.wait(POLL_S):
            seen.look(driver)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        seen.look(driver)
