"""Applications of several replicas on one real Serve: a model with known answers, streams that last, and who runs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from tests.api.conftest import free_port
from tests.api.successor import build_successor_model, letters_after

MODEL = "successor"
PATIENCE_S = 240.0
CONTEXT = 8192
T = TypeVar("T")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)


def alone(call: Callable[[], T]) -> T:
    """The call again, where another thread was describing a deployment to Ray at the same moment.

    Ray registers a module while it does so, for all threads, and the second to end raises before it has sent anything.
    """
    while True:
        try:
            return call()
        except ValueError as error:
            if "not registered for pickle by value" not in str(error):
                raise
            time.sleep(0.05)


@dataclass(frozen=True)
class App:
    """A deployed application, and its engine replicas as Serve sees them."""

    port: int
    name: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def states(self) -> dict[str, int]:
        """How many engine replicas are in which of Serve's states."""
        from ray import serve

        status = alone(serve.status).applications[self.name].deployments["EngineReplica"]
        return {str(getattr(state, "value", state)): n for state, n in status.replica_states.items() if n}

    def running(self) -> int:
        return self.states().get("RUNNING", 0)

    def deploy(self, model: Path, **args: Any) -> None:
        """Deploy it, or deploy it again with other arguments; returns when Serve says that it runs."""
        from ray import serve

        from actors.serve_args import ServeArgs
        from actors.server import build

        fixed = {"model": str(model), "served_name": MODEL, "cpus_per_replica": 0.25, "drain_s": PATIENCE_S}
        told = ServeArgs.model_validate({**fixed, **args})
        alone(lambda: serve.run(build(told), name=self.name, route_prefix="/"))


class Stream:
    """A completion that is being streamed by a thread of its own: `count` letters after "a", known in advance."""

    def __init__(self, app: App, count: int) -> None:
        self.count = count
        self.id = ""
        self.text = ""
        self.error: Exception | None = None
        self._client = app.client()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            stream = self._client.completions.create(model=MODEL, prompt="a", max_tokens=self.count, stream=True)
            self._socket = stream.response.extensions["network_stream"].get_extra_info("socket")
            for chunk in stream:
                self.id = chunk.id
                self.text += chunk.choices[0].text
        except Exception as error:  # whatever it is, `check` shows it
            self.error = error

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        """Go away in the middle of it."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> Exception | None:
        """Wait for its end, good or bad; what came is right as far as it goes. Returns what ended it too early."""
        self._thread.join(PATIENCE_S)
        assert not self.open and letters_after("a", self.count).startswith(self.text)
        return self.error

    def check(self) -> None:
        """It ended, whole."""
        error = self.end()
        assert error is None, error
        assert self.text == letters_after("a", self.count)


class Load:
    """Clients that ask for short answers one after another, until they are told to stop.

    refusals: statuses that are as good as an answer: of a model that may not be there yet.
    """

    def __init__(
        self, app: App, clients: int, count: int, *, model: str = MODEL, refusals: tuple[int, ...] = ()
    ) -> None:
        self._app, self._count, self._model, self._refusals = app, count, model, refusals
        self._stop = threading.Event()
        self.answered = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        client = self._app.client()
        while not self._stop.is_set():
            try:
                answer = client.completions.create(model=self._model, prompt="a", max_tokens=self._count)
                if answer.choices[0].text != letters_after("a", self._count):
                    self.wrong.append(answer.choices[0].text)
                self.answered += 1
            except openai.APIStatusError as error:
                if error.status_code not in self._refusals:
                    self.wrong.append(repr(error))
                time.sleep(0.1)
            except Exception as error:  # whatever it is, `check` shows it
                self.wrong.append(repr(error))

    def check(self) -> None:
        """Stop; every answer came and was right."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.wrong, self.wrong[:3]
        assert self.answered


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The successor model with a long context: its answers may last, at one token a step."""
    return build_successor_model(tmp_path_factory.mktemp("models") / "slow_successor", context=CONTEXT)


@pytest.fixture(scope="package")
def serve_port(local_ray: None) -> Iterator[int]:
    from ray import serve

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()


@pytest.fixture
def app(serve_port: int) -> Iterator[App]:
    """An application to deploy; gone after the test."""
    from ray import serve

    yield App(serve_port, "scaling")
    with contextlib.suppress(KeyError):
        serve.delete("scaling")
