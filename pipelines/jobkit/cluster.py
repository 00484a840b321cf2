"""Meeting Ray: the one that the environment names, else a local one of our own; never a stale address file."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

from actors.local_ray import init_ray
from model.errors import JobError
from pipelines.jobkit.signals import install_signals

OBJECT_STORE_BYTES = 512 * 1024 * 1024
KNOCK_S = 10.0


def connect_ray(*, object_store_bytes: int = OBJECT_STORE_BYTES) -> None:
    """Connect to RAY_ADDRESS, or start a local Ray with a bounded object store. A process already connected stays so.

    What workers print stays in Ray's own log files: the job speaks for itself, and errors reach it as exceptions.
    RAY_AUTH_MODE is respected as Ray does. Raises JobError when the address does not answer.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    _knock(address)
    ours: dict[str, Any] = {"include_dashboard": False, "object_store_memory": object_store_bytes}
    try:
        quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
        init_ray(address=address, **quiet, **(ours if address == "local" else {}))
    except ConnectionError as error:
        raise _no_answer(address, str(error).strip().splitlines()[0]) from None
    install_signals()


def _knock(address: str) -> None:
    """Raises JobError at once where nothing listens; ray.init itself keeps trying for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        raise _no_answer(address, error.strerror or str(error)) from None


def _no_answer(address: str, reason: str) -> JobError:
    return JobError(f"No Ray cluster answers at RAY_ADDRESS={address} ({reason}): start it, or unset RAY_ADDRESS.")


def cause_of(error: BaseException) -> BaseException:
    """What user code raised inside a Ray task or actor; the error itself when it is not Ray's wrapping."""
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
