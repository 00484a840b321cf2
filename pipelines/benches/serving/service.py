"""A served application in processes of its own, seen from outside: where it listens, its processes, what it is told."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from actors.serve_args import GATEWAY, REPLICA
from model.errors import JobError
from pipelines.benches.serving.host import APPLICATION, HOST

HOST_MODULE = "pipelines.benches.serving.host"
START_S, COMMAND_S, END_S = 180.0, 30.0, 20.0
LOG_TAIL = 2000  # characters of the host's log in an error
TITLES = {
    "replica": f"ray::ServeReplica:{APPLICATION}:{REPLICA}",
    "gateway": f"ray::ServeReplica:{APPLICATION}:{GATEWAY}",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "gcs": "gcs_server",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """Start with `with Service(...)`. args: ServeArgs' fields; environment: added to this process's own.

    module: the host's module, where another than the bench's own is wanted.
    """

    args: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 2
    temp_dir: Path | None = None
    replica: str | None = None
    module: str = HOST_MODULE
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[str] | None = None
    _log: IO[str] | None = None
    _replies: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        options = {"args": self.args, "port": self.port, "cpus": self.cpus}
        options |= {"temp_dir": str(self.temp_dir)} if self.temp_dir else {}
        options |= {"replica": self.replica} if self.replica else {}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        root = str(Path(__file__).resolve().parents[3])
        python_path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": python_path, **self.environment},
            start_new_session=True,  # a Ctrl-C ends the bench, which then ends this
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            self._answer(0, START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._replies.put(json.loads(line))
        self._replies.put({"id": None, "error": "the host ended"})

    def tell(self, do: str, *, timeout_s: float = COMMAND_S, **arguments: Any) -> Any:
        """Have the host do something and return its reply. Raises JobError where it fails or takes too long."""
        assert self._process is not None and self._process.stdin is not None, "the service was not started"
        number = next(self._numbers)
        try:
            self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise JobError(f"The service's host has ended. {self.log_tail()}") from None
        return self._answer(number, timeout_s)

    def _answer(self, number: int, timeout_s: float) -> Any:
        """The reply to one command; replies to earlier ones that were given up are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise JobError(f"The service's host did not answer in {timeout_s:g} s. {self.log_tail()}") from None
            if message["id"] not in (number, None):
                continue
            if "error" in message:
                raise JobError(f"The service's host: {message['error']}. {self.log_tail()}")
            return message["reply"]

    def log_tail(self) -> str:
        """The last of what the host printed."""
        if self._log is None or self._log.closed:
            return ""
        text = Path(f"/proc/self/fd/{self._log.fileno()}").read_text(encoding="utf-8", errors="replace")
        return f"Its log ends: {text[-LOG_TAIL:]}" if text.strip() else ""

    def processes(self, role: str) -> list[psutil.Process]:
        """The living processes of a role (see TITLES)."""
        assert self._process is not None, "the service was not started"
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = (process.cmdline() or [""])[0]
                if process.status() != psutil.STATUS_ZOMBIE and Path(title).name.startswith(Path(TITLES[role]).name):
                    found.append(process)
        return found

    def running(self) -> int:
        """How many engine replicas run by Serve's own count."""
        return int(self.tell("status")[REPLICA].get("RUNNING", 0))

    def whole(self, replicas: int, without: Collection[int] = ()) -> bool:
        """Whether Serve says that everything runs, with so many engine replicas; `without`: processes that are not
        counted, and may be on their way out.
        """
        try:
            status = self.tell("status")
        except JobError:
            return False
        left = [process for process in self.processes("replica") if process.pid not in without]
        enough = status[REPLICA].get("RUNNING") == replicas and status[GATEWAY] == {"RUNNING": 1}
        return bool(enough) and status["application"] == "RUNNING" and len(left) == replicas

    def stop(self) -> None:
        """End the host and every process it started."""
        process, self._process = self._process, None
        if process is None:
            return
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        _, left = psutil.wait_procs(started, timeout=2.0)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait()
        if self._log is not None:
            self._log.close()
