"""An engine replica that can be broken from inside on demand; production code has no such door."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from actors.serving.replica import EngineReplica


class Sabotage(BaseException):
    """What ends the engine's thread: nothing in it expects this."""


class Saboteur(EngineReplica):
    """Each method breaks the engine of the replica that is asked, and returns the replica's process id."""

    async def kill_engine_thread(self) -> int:
        """Raise an exception inside the engine's thread, wherever it stands."""
        thread = next(t for t in threading.enumerate() if t.name == "blockcast-engine")
        assert thread.ident is not None
        hit = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Sabotage))
        assert hit == 1, "the engine's thread was not found"
        return os.getpid()

    async def stick_engine(self) -> int:
        """Let the next forward never return, as one on a hung device would."""

        def never(*_: Any, **__: Any) -> Any:
            threading.Event().wait()

        self._engine.decoder.step = never  # type: ignore[method-assign]
        return os.getpid()
