"""`make serve`'s command as a user meets it: its own Ray, a ready line, a status line that works, and a clean end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from actors.serve_local import check_model
from model.errors import UserError
from tests.api.conftest import free_port
from tests.api.successor import ANSWER

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """A running `serve_local`: its process, its port, what it printed until it was ready, and a user's environment."""

    process: subprocess.Popen[str]
    port: int
    printed: list[str]
    environment: dict[str, str]

    def model_ids(self) -> list[str]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=5, trust_env=False)
        except httpx.TransportError:
            return []
        return [entry["id"] for entry in answer.json()["data"]] if answer.status_code == 200 else []


def command(model: Path | str, port: int) -> list[str]:
    return [sys.executable, "-m", "actors.serve_local", "--model", str(model), "--port", str(port)]


@pytest.fixture(scope="module")
def served(successor_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    # As for a user who has set nothing: Ray then asks a token of everyone, kept in the user's home.
    environment = {**os.environ, "HOME": str(home), "RAY_ADDRESS": "127.0.0.1:1"}
    del environment["RAY_AUTH_MODE"]
    port = free_port()
    process = subprocess.Popen(
        command(successor_model, port), stdout=subprocess.PIPE, env=environment, text=True, cwd=home
    )
    assert process.stdout is not None
    printed: list[str] = []
    for line in process.stdout:
        printed.append(line.strip())
        if "serve status" in line:
            break
    yield Served(process, port, printed, environment)
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def test_it_says_ready_when_a_token_was_generated(served: Served) -> None:
    ready = [line for line in served.printed if "ready" in line]
    assert len(ready) == 1 and f"http://127.0.0.1:{served.port}/v1" in ready[0]
    body = {"model": served.model_ids()[0], "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"http://127.0.0.1:{served.port}/v1/chat/completions", json=body, trust_env=False).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_its_status_line_shows_healthy_from_a_second_shell(served: Served) -> None:
    line = served.printed[-1].split("second shell: ", 1)[1]
    shell = {"HOME": served.environment["HOME"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=shell, timeout=60)
    status = yaml.safe_load(done.stdout)
    application = status["applications"]["blockcast"]
    assert application["status"] == "RUNNING"
    assert {d["status"] for d in application["deployments"].values()} == {"HEALTHY"}


def test_the_committed_serve_yaml_deploys_the_same_application(
    served: Served, successor_model: Path, project: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = served.port
    config["proxy_location"] = "HeadOnly"
    config["applications"][0]["args"] |= {
        "model": str(successor_model),
        "served_name": "deployed",
        "gpus_per_replica": 0,
        "cpus_per_replica": 1,
        "max_replicas": 1,
        "drain_s": 0,
    }
    config["applications"][0]["args"]["engine"] |= {"max_length": 128}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = shlex.split(served.printed[-1])[-1]
    serve = Path(sys.executable).parent / "serve"
    environment = {**served.environment, "RAY_AUTH_MODE": "token"}
    subprocess.run([serve, "deploy", "--address", address, path], check=True, env=environment, timeout=60)
    deadline = time.monotonic() + 200
    while served.model_ids() != ["deployed"]:
        assert time.monotonic() < deadline, "the application of serve.yaml does not answer"
        time.sleep(0.5)


def test_an_interrupt_ends_it_cleanly_and_leaves_no_process(served: Served) -> None:
    started = psutil.Process(served.process.pid).children(recursive=True)
    assert len(started) > 3
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert served.model_ids() == []


def test_a_busy_port_is_exit_2_with_one_sentence(successor_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(command(successor_model, port), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(rf"serve: Port {port} .*busy.*\.\n", done.stderr)


def test_a_folder_that_is_no_model_is_found_before_ray_starts(tmp_path: Path) -> None:
    for model in (tmp_path / "absent", tmp_path, ""):
        with pytest.raises(UserError):
            check_model(str(model))
