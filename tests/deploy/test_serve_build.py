"""`serve build`: the file it writes is one that we would deploy, and says what deploy/serve.yaml says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.application import load_args
from actors.serve_args import GATEWAY, REPLICA, check_config
from model.errors import UserError

SERVE = Path(sys.executable).parent / "serve"


@pytest.mark.slow
def test_what_serve_build_writes_says_the_same_as_the_committed_file(project: Path, tmp_path: Path) -> None:
    committed = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    built_file = tmp_path / "built.yaml"
    subprocess.run(
        [SERVE, "build", "actors.application:app", "-o", built_file],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(project), "BLOCKCAST_SERVE_CONFIG": str(project / "deploy/serve.yaml")},
        timeout=100,
    )
    check_config(built_file)
    built = yaml.safe_load(built_file.read_text(encoding="utf-8"))
    assert built["proxy_location"] == committed["proxy_location"]
    assert built["http_options"]["port"] == committed["http_options"]["port"]
    assert [application["import_path"] for application in built["applications"]] == ["actors.application:app"]
    assert built["applications"][0]["route_prefix"] == committed["applications"][0]["route_prefix"]
    args = committed["applications"][0]["args"]
    deployments: dict[str, Any] = {d["name"]: d for d in built["applications"][0]["deployments"]}
    assert set(deployments) == {GATEWAY, REPLICA}
    replica = deployments[REPLICA]
    assert replica["ray_actor_options"]["num_gpus"] == args["gpus_per_replica"]
    assert replica["ray_actor_options"]["num_cpus"] == args["cpus_per_replica"]
    assert replica["autoscaling_config"]["min_replicas"] == args["min_replicas"]
    assert replica["autoscaling_config"]["max_replicas"] == args["max_replicas"]
    assert {d["graceful_shutdown_timeout_s"] for d in deployments.values()} == {args["drain_s"]}


@pytest.mark.slow
def test_importing_the_application_reads_no_file_and_starts_no_ray(tmp_path: Path) -> None:
    code = "import actors.application, ray, sys; sys.exit(ray.is_initialized())"
    environment = {**os.environ, "BLOCKCAST_SERVE_CONFIG": str(tmp_path / "absent.yaml")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=100).returncode == 0


def test_a_file_without_exactly_one_application_of_ours_is_refused(project: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    two = [{**config["applications"][0], "name": name, "route_prefix": f"/{name}"} for name in ("a", "b")]
    for count, applications in ((0, []), (2, two)):
        path = tmp_path / f"{count}.yaml"
        path.write_text(yaml.safe_dump({**config, "applications": applications}), encoding="utf-8")
        with pytest.raises(UserError, match=f"has {count} applications"):
            load_args(path)
