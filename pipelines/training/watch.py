"""What the driver keeps an eye on while workers train: one that hangs is ended, a node that is taken away is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.training.watchdog import Beat, Hang
from model.errors import JobError

LOOK_EVERY_S = 1.0
END_WITHIN_S = 60.0


class WorkersLeft(Exception):
    """The workers were ended, or saved and ended, for a reason that another attempt gets over.

    counts: whether it is a failure of the run's own.
    """

    def __init__(self, message: str, *, counts: bool) -> None:
        super().__init__(message)
        self.counts = counts


class Watch:
    """Looked at now and then; `left` says why the workers of this attempt end, once they do."""

    def __init__(self, board: Any, timeout_s: float) -> None:
        self._board, self._timeout_s = board, timeout_s
        self._next_look, self._ended_at = 0.0, 0.0
        self.left: WorkersLeft | None = None

    def look(self) -> None:
        """Raises JobError where a hung worker cannot be ended."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        if self.left is None or not self.left.counts:
            self._look_for_hang()
        elif now > self._ended_at + END_WITHIN_S:
            raise JobError(f"{self.left} It could not be ended either: see to that node.")
        if self.left is None:
            self._look_for_drain()

    def _look_for_hang(self) -> None:
        hang: Hang | None = ray.get(self._board.hang.remote(self._timeout_s))
        if hang is None:
            return
        self.left = WorkersLeft(hang.message, counts=True)
        self._ended_at = time.monotonic()
        for beat in hang.beats:
            _end(beat)

    def _look_for_drain(self) -> None:
        """Ask for a checkpoint and leave, when a node under a worker is about to be taken away."""
        draining = draining_nodes()
        if not draining:
            return
        ours: dict[str, str] = ray.get(self._board.nodes.remote())
        for node, deadline_s in draining.items():
            if node in ours:
                within = f" in {max(0.0, deadline_s - time.time()):.0f} s" if deadline_s else ""
                message = f"The node {ours[node]} is taken away{within}: the workers save and start again elsewhere."
                print(f"adapt: {message}", file=sys.stderr, flush=True)
                self.left = WorkersLeft(message, counts=False)
                ray.get(self._board.request_stop.remote())
                return


def draining_nodes() -> dict[str, float]:
    """Nodes that Ray was told to drain (a spot machine reclaimed, a scale-down), with the UNIX time they go, 0 if
    none was given. Ray has no public call for it; Ray Train uses this one."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in found.items()}


@ray.remote(num_cpus=0, max_retries=0)
def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def _end(beat: Beat) -> None:
    """Kill a process on its node: one that hangs does not hear Ray."""
    where = NodeAffinitySchedulingStrategy(node_id=beat.node, soft=False)
    try:
        ray.get(_kill.options(scheduling_strategy=where).remote(beat.process), timeout=END_WITHIN_S / 2)
    except (RayError, ProcessLookupError) as error:
        print(f"adapt: ending worker {beat.rank}: {error}", file=sys.stderr, flush=True)
