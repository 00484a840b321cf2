"""One writer per output: a small JSON file that names the writer and shows its last sign of life.

The writer is known by host (name, boot, PID namespace), pid and the process's start time, so on the same host a
killed writer's lock is seen to be stale at once. A writer on another host is believed dead when its sign of life is
older than STALE_S. On a local filesystem taking the lock is atomic (flock around read-decide-write); on an object
store two writers that start within the same second are told apart by reading the lock again.

A writer that lost its lock (suspended for minutes, say) finds out at `check`, which every publication calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from model.errors import JobError, UserError

BEAT_S = 10.0
STALE_S = 60.0
SETTLE_S = 1.0


@dataclass(frozen=True)
class Writer:
    """Who holds a lock; `beat` is the wall-clock time (seconds) of the last sign of life."""

    token: str
    host: str
    pid: int
    started: float
    beat: float

    @classmethod
    def here(cls) -> Writer:
        pid = os.getpid()
        return cls(uuid.uuid4().hex, host_identity(), pid, psutil.Process(pid).create_time(), time.time())

    @classmethod
    def from_text(cls, text: str) -> Writer | None:
        """None for an empty or unreadable lock, which names nobody."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "beat": time.time()})

    @property
    def alive(self) -> bool:
        """Whether the writer still runs; on another host, whether it gave a sign of life within STALE_S."""
        if self.host != host_identity():
            return time.time() - self.beat < STALE_S
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host.split('/')[0]}"


def host_identity() -> str:
    """Host name, boot and PID namespace: two containers of one machine are two hosts here."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def write_whole(filesystem: Any, path: str, text: str, *, local: bool) -> None:
    """Put a small text file in place at once: readers see the old one or the new one, also when the disk is full."""
    if not local:
        filesystem.pipe_file(path, text.encode())
        return
    partial = Path(f"{path}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Lock:
    """The lock at `path` on an fsspec filesystem, held from `acquire` to `release`. `what` names it in messages."""

    def __init__(self, filesystem: Any, path: str, what: str, *, local: bool) -> None:
        self._filesystem, self._path, self._what, self._local = filesystem, path, what, local
        self._writer = Writer.here()
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="output-lock", daemon=True)

    def acquire(self) -> None:
        """Raises UserError when a living writer holds the lock."""
        with self._exclusive():
            holder = self._read()
            if holder is not None and holder.alive:
                raise UserError(
                    f"{self._what} is being written by {holder.name}: wait for it or stop it, or give another --output."
                )
            self._write()
        if not self._local:
            time.sleep(SETTLE_S)
            self.check()
        self._beats.start()

    def release(self) -> None:
        """Remove the lock if it is still ours."""
        self._stop.set()
        if self._beats.is_alive():
            self._beats.join()
        with self._exclusive():
            holder = self._read()
            if holder is not None and holder.token == self._writer.token:
                self._filesystem.rm_file(self._path)

    def check(self) -> None:
        """Raises JobError when another writer has taken over."""
        holder = self._read()
        if holder is None or holder.token != self._writer.token:
            by = f" by {holder.name}" if holder else ""
            raise JobError(f"{self._what} was taken over{by}: this run stops so that it spoils nothing.")

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError), self._exclusive():  # a full disk costs one sign of life, not the lock
                holder = self._read()
                if holder is None or holder.token != self._writer.token:
                    return
                self._write()

    def _read(self) -> Writer | None:
        try:
            return Writer.from_text(self._filesystem.cat_file(self._path).decode("utf-8", "replace"))
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        write_whole(self._filesystem, self._path, self._writer.to_text(), local=self._local)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """On a local filesystem, no other process of this host decides about the lock meanwhile."""
        if not self._local:
            yield
            return
        descriptor = os.open(os.path.dirname(self._path), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
