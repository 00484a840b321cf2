"""One real server for the folder: real Serve, real gateway, real engine, a tiny model with known answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.api.successor import build_successor_model

MODEL = "successor"


@dataclass(frozen=True)
class Server:
    """Where it listens, and what its only engine replica says of itself."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self) -> Any:
        from ray import serve

        return serve.get_deployment_handle("EngineReplica", "api_tests").stats.remote().result(timeout_s=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def successor_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_successor_model(tmp_path_factory.mktemp("models") / "successor")


@pytest.fixture(scope="package")  # it holds a CPU: training tests of other folders need both
def server(local_ray: None, successor_model: Path) -> Iterator[Server]:
    from ray import serve

    from actors.serve_args import ServeArgs
    from actors.server import build

    port = free_port()
    args = ServeArgs.model_validate(
        {"model": str(successor_model), "served_name": MODEL, "engine": {"max_rows": 4}, "max_queue": 40, "drain_s": 0}
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(args), name="api_tests", route_prefix="/")
    yield Server(port)
    serve.shutdown()
