"""`make serve`'s command as a user meets it: its own Ray, a ready line, a status line that works, and a clean end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from actors.serve_local import check_model
from model.errors import UserError
from tests.api.conftest import free_port
from tests.api.successor import ANSWER
from tests.deploy.scripts import DEPLOY

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

    @property
    def dashboard(self) -> str:
        return shlex.split(self.printed[-1])[-1]

    def deploy(self, config: dict[str, Any], folder: Path) -> None:
        """`serve deploy`, which says nothing about how it ended."""
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        serve = Path(sys.executable).parent / "serve"
        environment = {**self.environment, "RAY_AUTH_MODE": "token"}
        subprocess.run([serve, "deploy", "--address", self.dashboard, path], check=True, env=environment, timeout=60)

    def wait_ready(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(DEPLOY / "wait_ready.py"), "--address", self.dashboard, *arguments],
            capture_output=True,
            text=True,
            env={**self.environment, "RAY_AUTH_MODE": "token", **environment},
            timeout=300,
        )


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


def test_wait_ready_is_exit_0_when_a_token_was_generated(served: Served) -> None:
    done = served.wait_ready("--application", "blockcast", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"wait_ready: blockcast: have 2 of 2 replicas, status RUNNING .*: ready\n", done.stdout)


def test_wait_ready_is_exit_1_for_an_application_that_is_not_there(served: Served) -> None:
    done = served.wait_ready("--application", "other", "--timeout", "5")
    assert done.returncode == 1
    assert "application other is not deployed; there is blockcast" in done.stderr


def test_wait_ready_is_exit_1_where_serve_runs_but_http_is_elsewhere(served: Served) -> None:
    done = served.wait_ready("--url", f"http://127.0.0.1:{free_port()}", "--timeout", "5")
    assert done.returncode == 1
    assert "status RUNNING" in done.stderr and "--url" in done.stderr


def test_wait_ready_is_exit_2_with_a_token_that_the_dashboard_refuses(served: Served) -> None:
    done = served.wait_ready("--timeout", "60", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64)
    assert done.returncode == 2
    assert "refuses the token" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def config(served: Served, successor_model: Path, project: Path) -> dict[str, Any]:
    """deploy/serve.yaml, as far as this machine can serve it."""
    loaded: dict[str, Any] = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    loaded["http_options"]["port"] = served.port
    loaded["proxy_location"] = "HeadOnly"
    loaded["applications"][0]["args"] |= {
        "model": str(successor_model),
        "served_name": "deployed",
        "gpus_per_replica": 0,
        "cpus_per_replica": 1,
        "max_replicas": 1,
        "drain_s": 0,
    }
    loaded["applications"][0]["args"]["engine"] |= {"max_length": 128}
    return loaded


def test_the_committed_serve_yaml_deploys_the_same_application_and_wait_ready_says_when(
    served: Served, config: dict[str, Any], tmp_path: Path
) -> None:
    for deployment in config["applications"][0]["deployments"]:
        deployment["max_surge_percent"] = 0  # the replica that is there has every CPU: there is no room beside it
    served.deploy(config, tmp_path)
    done = served.wait_ready("--timeout", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert served.model_ids() == ["deployed"]


def test_wait_ready_is_exit_1_with_our_own_sentence_when_a_deploy_failed_and_the_old_version_serves_on(
    served: Served, config: dict[str, Any], tmp_path: Path
) -> None:
    config["applications"][0]["args"]["model"] = str(tmp_path / "absent")
    served.deploy(config, tmp_path)
    done = served.wait_ready("--timeout", "200")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last == f"wait_ready: blockcast is DEPLOY_FAILED: --model {tmp_path / 'absent'}: there is no such folder."
    assert done.stderr == ""
    assert served.model_ids() == ["deployed"]


def test_wait_ready_does_not_take_the_failure_before_for_this_deploys(
    served: Served, config: dict[str, Any], tmp_path: Path
) -> None:
    served.deploy(config, tmp_path)
    done = served.wait_ready("--timeout", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert served.model_ids() == ["deployed"]


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
