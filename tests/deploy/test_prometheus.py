"""deploy/prometheus with the real Prometheus: the rules are valid and fire, and a real scrape of a real gateway is up.

Needs the binaries `prometheus` and `promtool` (Debian: apt-get install prometheus); without them these tests skip.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from tests.api.conftest import free_port
from tests.api.successor import build_successor_model
from tests.direct import direct_app

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus and promtool are not installed (apt-get install prometheus)",
)


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    """What promtool prints; fails where it finds fault."""
    done = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def deployed(project: Path) -> Path:
    return project / "deploy" / "prometheus"


def test_prometheus_accepts_configuration_and_rules(deployed: Path) -> None:
    assert "SUCCESS" in promtool("check", "config", deployed / "prometheus.yml")
    assert "FAILED" not in promtool("check", "rules", deployed / "alerts.yml")


def test_the_alerts_fire_when_they_should_and_only_then(project: Path) -> None:
    promtool("test", "rules", project / "tests" / "deploy" / "alerts_test.yml")


def test_every_alert_has_a_case_in_which_it_fires(project: Path, deployed: Path) -> None:
    cases = yaml.safe_load((project / "tests" / "deploy" / "alerts_test.yml").read_text())["tests"]
    fired = {rule["alertname"] for case in cases for rule in case["alert_rule_test"] if rule.get("exp_alerts")}
    rules = yaml.safe_load((deployed / "alerts.yml").read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"] for rule in rules}


# ------------------------------------------------------------------------------------------------- a real scrape
@contextmanager
def served(model: Path, port: int) -> Iterator[None]:
    """A gateway over a real engine behind a real HTTP server in this process."""
    app, _ = direct_app(model)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def prometheus(deployed: Path, folder: Path, target: int, port: int) -> Iterator[str]:
    """A Prometheus with our configuration, aimed at `target` and hurried; yields its address."""
    config = yaml.safe_load((deployed / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(deployed / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [
            str(PROMETHEUS),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, path: str, **parameters: str) -> Any:
    """The `data` of an answer of Prometheus' API; None while it does not answer."""
    try:
        with urllib.request.urlopen(
            f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=5
        ) as reply:
            return json.load(reply)["data"]
    except OSError:
        return None


def wait_for(address: str, path: str, wanted: Any, **parameters: str) -> Any:
    """The first answer that `wanted` accepts."""
    for _ in range(300):
        data = ask(address, path, **parameters)
        if data is not None and wanted(data):
            return data
        time.sleep(0.2)
    raise AssertionError(f"{path} {parameters}: {data}")


def complete(port: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 24}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 24


@pytest.mark.slow
def test_a_real_prometheus_finds_the_target_up_and_all_metrics_in_it(
    deployed: Path, project: Path, tmp_path: Path
) -> None:
    model = build_successor_model(tmp_path / "model")
    target, port = free_port(), free_port()
    with served(model, target), prometheus(deployed, tmp_path, target, port) as address:
        wait_for(address, "targets", lambda data: [t["health"] for t in data["activeTargets"]] == ["up"])
        complete(target)
        answered = wait_for(
            address,
            "query",
            lambda data: data["result"] and data["result"][0]["value"][1] == "1",
            query='blockcast_requests_total{endpoint="completion",outcome="length"}',
        )
        assert answered["result"][0]["metric"]["model"] == "tiny"
        known = {name for name in ask(address, "label/__name__/values") if name.startswith("blockcast_")}
        wait_for(address, "rules", lambda data: all(r["health"] == "ok" for g in data["groups"] for r in g["rules"]))
        firing = [alert for alert in ask(address, "alerts")["alerts"] if alert["state"] == "firing"]
        with urllib.request.urlopen(f"http://127.0.0.1:{target}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        for panel in json.loads((project / "deploy" / "grafana" / "blockcast.json").read_text())["panels"]:
            for expression in (target["expr"] for target in panel.get("targets", [])):
                query = expression.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$replica", ".*")
                assert ask(address, "query", query=query) is not None, f"{panel['title']}: {query}"
    assert firing == []
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")} <= known | histograms(text)
    promtool("check", "metrics", stdin=text)


def histograms(text: str) -> set[str]:
    """Families whose own name is no series."""
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ") and line.endswith(" histogram")}
