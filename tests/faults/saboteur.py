"""An engine replica that can be broken, or watched, from inside on demand; production code has no such door."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

from actors.serving.replica import EngineReplica


class Sabotage(BaseException):
    """What ends the engine's thread: nothing in it expects this."""


class Saboteur(EngineReplica):
    """What breaks the engine of the replica that is asked returns the replica's process id."""

    async def kill_engine_thread(self) -> int:
        """Raise an exception inside the engine's thread, wherever it stands."""
        thread = next(t for t in threading.enumerate() if t.name == "blockcast-engine")
        assert thread.ident is not None
        hit = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Sabotage))
        assert hit == 1, "the engine's thread was not found"
        return os.getpid()

    async def watch(self, round_s: float) -> None:
        """Let every round take so long at least, and note when rounds end and rows are released; 0: no longer."""
        decoder = self._engine.decoder
        for name in ("step", "release"):
            vars(decoder).pop(name, None)
        self._rounds: list[float] = []
        self._released: dict[str, float] = {}
        if not round_s:
            return
        step, release = decoder.step, decoder.release

        def slow_step(turns: Any) -> Any:
            time.sleep(round_s)
            outcomes = step(turns)
            self._rounds.append(time.monotonic())
            return outcomes

        def noted_release(row: Any) -> None:
            release(row)
            self._released[row.request.id] = time.monotonic()

        decoder.step, decoder.release = slow_step, noted_release  # type: ignore[method-assign]

    async def watched(self) -> dict[str, Any]:
        """Since `watch`: the ends of rounds, and when the rows of which requests were released (time.monotonic())."""
        return {"rounds": list(self._rounds), "released": dict(self._released)}

    async def stick_engine(self) -> int:
        """Let the next forward never return, as one on a hung device would."""

        def never(*_: Any, **__: Any) -> Any:
            threading.Event().wait()

        self._engine.decoder.step = never  # type: ignore[method-assign]
        return os.getpid()
