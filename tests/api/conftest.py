"""One real server for the folder: real Serve, real gateway, real engine, a tiny model with known answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from tests.api.successor import build_successor_model

MODEL = "successor"
KEYS = ("first-key", "second-key", "third-key")
ORIGIN = "https://app.example"


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

    def await_idle(self, within_s: float = 10.0) -> Any:
        """The engine's figures once it runs nothing."""
        deadline = time.monotonic() + within_s
        while (stats := self.stats()).running or stats.waiting:
            assert time.monotonic() < deadline, "a row is still running after its client left"
            time.sleep(0.02)
        return stats


@dataclass(frozen=True)
class Guarded:
    """A gateway that asks for keys, with little room and patience, and a page of another origin that may call it."""

    server: Server
    path: ClassVar[str] = "/guarded"
    slots: ClassVar[int] = 8
    slots_of_a_key: ClassVar[int] = 3
    max_body_bytes: ClassVar[int] = 2**20

    def client(self, key: str) -> openai.AsyncOpenAI:
        url = f"{self.server.url}{self.path}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


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
        {"model": str(successor_model), "served_name": MODEL, "engine": {"max_rows": 4}, "drain_s": 0}
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(args), name="api_tests", route_prefix="/")
    yield Server(port)
    serve.shutdown()


@pytest.fixture(scope="package")
def guarded(server: Server, successor_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    """A second gateway in front of the same engine."""
    from ray import serve

    from actors.gateway.access import load_key_hashes
    from actors.serve_args import ServeArgs
    from actors.server import GatewayDeployment

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who may ask\n" + "\n".join(KEYS), encoding="utf-8")
    args = ServeArgs.model_validate(
        {
            "model": str(successor_model),
            "api_keys_file": str(keys),
            "engine": {"max_rows": 4},
            "max_queue": Guarded.slots - 4,
            "max_requests_per_key": Guarded.slots_of_a_key,
            "max_body_bytes": Guarded.max_body_bytes,
            "body_timeout_s": 1,
            "cors_origins": [ORIGIN],
        }
    )
    gateway: Any = serve.deployment(
        serve.ingress()(GatewayDeployment), name="Gateway", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    )
    engine = serve.get_deployment_handle("EngineReplica", "api_tests")
    hashes = load_key_hashes(args.api_keys_file, {})
    serve.run(gateway.bind(engine, args, hashes), name="guarded", route_prefix="/guarded")
    return Guarded(server)


@pytest.fixture(scope="package")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
