"""A gateway that listens on a loopback port while a test runs, over any backend: for clients that need real HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from actors.gateway.app import create_app
from actors.gateway.backend import Backend
from tests.direct import gateway_over


@contextmanager
def listening(backend: Backend, *, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of the gateway, without a slash at its end. keys: SHA-256 in hex, as `Access` takes them."""
    app = create_app(gateway_over(backend, keys=keys))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the gateway did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join()
