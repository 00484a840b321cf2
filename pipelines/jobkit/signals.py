"""SIGINT and SIGTERM as exceptions of the main thread, so that context managers tidy up on the way out."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM; a KeyboardInterrupt to every library in between."""


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated()


def install_signals() -> None:
    """SIGINT and SIGTERM raise in the main thread, even where a parent shell had them ignored.

    `connect_ray` calls this again: ray.init puts its own SIGTERM handler in place. Outside the main thread, where
    Python allows no handlers, nothing is changed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _on_terminate)
