"""deploy/wait_ready.py without a cluster: what it reads, what it says, and its exit codes where nothing answers.

With a real Serve it is tested in tests/api/test_serve_local.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import free_port
from tests.deploy.scripts import DEPLOY, load_script

wait_ready = load_script("wait_ready")

TRACEBACK = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:blockcast:EngineReplica.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "/app/model/sources.py", line 45, in fetch_model
    raise UserError("...")
model.errors.UserError: --model /models/absent: there is no such folder.

The above exception was the direct cause of the following exception:
RuntimeError: Traceback (most recent call last):
model.errors.UserError: --model /models/absent: there is no such folder.
"""


def told(status: str = "RUNNING", **deployments: dict[str, Any]) -> dict[str, Any]:
    """An application as the dashboard tells it."""
    return {
        "status": status,
        "message": "",
        "route_prefix": "/",
        "deployments": {name: {"name": name, **deployment} for name, deployment in deployments.items()},
    }


def deployment(
    states: list[str], want: int, status: str = "HEALTHY", trigger: str = "CONFIG_UPDATE_COMPLETED"
) -> dict[str, Any]:
    replicas = [{"state": state} for state in states]
    return {"status": status, "status_trigger": trigger, "replicas": replicas, "target_num_replicas": want}


def read(application: dict[str, Any]) -> Any:
    return wait_ready.read_applications({"applications": {"blockcast": application}})["blockcast"]


def test_progress_says_how_many_of_how_many_replicas_there_are() -> None:
    starting = read(
        told(
            "DEPLOYING",
            Gateway=deployment(["RUNNING"], 1),
            EngineReplica=deployment(["STARTING", "RUNNING"], 3, "UPDATING"),
        )
    )
    assert str(starting) == (
        "blockcast: have 2 of 4 replicas, status DEPLOYING (Gateway 1 of 1 HEALTHY, EngineReplica 1 of 3 UPDATING)"
    )
    assert not starting.runs and not starting.failed


def test_an_application_runs_when_every_deployment_is_healthy_or_scaled_by_its_load() -> None:
    assert read(told(Gateway=deployment(["RUNNING"], 1))).runs
    assert read(told(Engine=deployment(["RUNNING"], 2, "UPSCALING", "AUTOSCALING"))).runs
    assert not read(told(Engine=deployment(["RUNNING"], 2, "UPSCALING"))).runs, "an operator asked for a second one"
    assert not read(told(Gateway=deployment(["RUNNING"], 1), Engine=deployment([], 1, "UPDATING"))).runs
    assert not read(told()).runs, "Serve has not built it yet"


@pytest.mark.parametrize("status", ["DEPLOY_FAILED", "UNHEALTHY"])
def test_a_failed_application_is_settled(status: str) -> None:
    assert read(told(status)).failed


def test_our_own_sentence_is_found_in_a_traceback() -> None:
    assert wait_ready.sentence(TRACEBACK) == "--model /models/absent: there is no such folder."


def test_a_message_without_a_sentence_of_ours_is_shown_whole_and_without_colours() -> None:
    assert wait_ready.sentence("\x1b[31mno such import\x1b[0m\n") == "no such import"
    assert wait_ready.sentence("Traceback:\n  at a\nKeyError: 'b'") == "\nTraceback:\n  at a\nKeyError: 'b'"


def test_serve_is_looked_for_on_the_dashboards_host_at_serves_own_port() -> None:
    details = {"http_options": {"host": "0.0.0.0", "port": 8123}}
    assert wait_ready.http_base(details, "http://head.example:8265") == "http://head.example:8123"
    assert wait_ready.http_base({"http_options": None}, "http://[::1]:8265") == "http://[::1]:8000"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--address", "localhost:8265"],
        ["--url", "ftp://here"],
        ["--timeout", "0"],
        ["--timeout", "soon"],
        ["--applicaton", "blockcast"],
        ["blockcast"],
    ],
)
def test_bad_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        wait_ready.main(arguments)
    assert caught.value.code == 2
    assert "wait_ready: error:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dashboard_that_does_not_answer_is_exit_1_in_the_time_that_was_given(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "wait_ready.py"), "--address", address, "--timeout", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert f"{address} does not answer (" in done.stdout
    assert "not ready after 2 s" in done.stderr
    assert "Traceback" not in done.stderr
