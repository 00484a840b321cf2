"""How many rounds an engine still runs for a client that has left: from its closed connection to its pages being free.

Every replica notes the ends of its rounds and the releases of its rows, on the clock that all processes of a machine
share; a round is made to take as long as one of a large model, so that it can be told which one was running.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
from bisect import bisect_right
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pipelines.benches.serving.load import wait_for
from tests.api.wire import Wire, post
from tests.faults.serving import LONG, MODEL, Rig

ROUND_S = 0.1
FREED_S = 30.0
READS = 5  # lines of the stream before the client goes


@dataclass(frozen=True)
class Leaving:
    """rounds: that ended after the client had gone and before its pages were free; seconds: the same in time."""

    rounds: int
    seconds: float


def measure(rig: Rig, times: int) -> list[Leaving]:
    """Clients that come and go one after another; every second one resets its connection."""
    rig.service.tell("call_all", method="watch", arguments=[ROUND_S])
    try:
        return [_one(rig, resets=bool(number % 2)) for number in range(times)]
    finally:
        rig.service.tell("call_all", method="watch", arguments=[0.0])


def _one(rig: Rig, *, resets: bool) -> Leaving:
    fields = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "stream": True}
    with Wire(rig.service.port) as wire:
        wire.send(post("/v1/completions", rig.service.port, fields))
        run = [json.loads(data)["id"] for data in itertools.islice(wire.events(), READS)][-1]
        if resets:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left = monotonic()

    def told() -> list[dict[str, Any]]:
        every: list[dict[str, Any]] = rig.service.tell("call_all", method="watched")
        return [one for one in every if run in one["released"]]

    wait_for(lambda: bool(told()), "the pages of a client that left to be free", FREED_S, poll_s=0.05)
    (replica,) = told()
    freed = replica["released"][run]
    return Leaving(bisect_right(replica["rounds"], freed) - bisect_right(replica["rounds"], left), freed - left)
