"""deploy/Dockerfile, read rather than built: there is no container engine where the tests run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.conftest import free_port
from tests.deploy.dockerfile import Instruction, is_sent, read_dockerfile, user_of
from tests.deploy.scripts import load_script


@pytest.fixture(scope="module")
def dockerfile(project: Path) -> list[Instruction]:
    return read_dockerfile(project / "deploy" / "Dockerfile")


def of(dockerfile: list[Instruction], keyword: str) -> list[Instruction]:
    return [instruction for instruction in dockerfile if instruction.keyword == keyword]


def test_the_variants_are_stages_and_the_last_stage_is_built_on_the_one_that_is_chosen(
    dockerfile: list[Instruction],
) -> None:
    stages = [instruction.rest for instruction in of(dockerfile, "FROM")]
    assert stages == [
        "python:${PYTHON} AS base",
        "base AS torch-cpu",
        "base AS torch-cuda",
        "torch-${VARIANT} AS blockcast",
    ]
    defaults = dict(i.rest.split("=") for i in of(dockerfile, "ARG") if i.stage == "")
    assert defaults["VARIANT"] == "cpu"
    assert defaults["PYTHON"].startswith("3.11-")


def test_every_source_of_a_copy_is_there_and_reaches_the_build(project: Path, dockerfile: list[Instruction]) -> None:
    sources = [word for copy in of(dockerfile, "COPY") for word in copy.rest.split()[:-1] if not word.startswith("--")]
    assert {"model", "actors", "pipelines", "deploy", "pyproject.toml", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (project / source).exists(), source
        assert is_sent(project / ".dockerignore", source), source


@pytest.mark.parametrize("name", [".git", ".venv", "out", "tests", "docs", ".env", "keys.txt", "id_rsa"])
def test_nothing_else_reaches_the_build(project: Path, name: str) -> None:
    assert not is_sent(project / ".dockerignore", name)


def test_every_package_is_pinned(dockerfile: list[Instruction]) -> None:
    installs = [part for run in of(dockerfile, "RUN") for part in run.rest.split(" && ") if "pip install" in part]
    assert len(installs) == 4
    for install in installs:
        ours = install.endswith("--editable .") and "--no-deps" in install
        assert ours or "--constraint constraints.txt" in install, install


def test_it_does_not_run_as_root(project: Path, dockerfile: list[Instruction]) -> None:
    assert of(dockerfile, "USER")[-1].stage == "blockcast"
    uid, gid = user_of(project / "deploy" / "Dockerfile")
    assert uid > 0 and gid > 0
    assert any(f"useradd --uid {uid} --gid {gid}" in run.rest for run in of(dockerfile, "RUN"))
    keywords = [instruction.keyword for instruction in dockerfile]
    assert "RUN" not in keywords[keywords.index("USER") :], "what is installed after USER is not root's to protect"


def test_it_holds_no_secret(dockerfile: list[Instruction]) -> None:
    for instruction in [*of(dockerfile, "ENV"), *of(dockerfile, "ARG")]:
        assert re.search(r"token|secret|password|api_key", instruction.rest, re.IGNORECASE) is None, instruction


def test_its_health_check_and_its_command_are_there(project: Path, dockerfile: list[Instruction]) -> None:
    check = of(dockerfile, "HEALTHCHECK")[-1].rest
    command = json.loads(check.split(" CMD ")[1])
    assert command[0] == "python" and (project / command[1]).is_file()
    start = json.loads(of(dockerfile, "CMD")[-1].rest)
    assert "ray start --head --block" in start[-1]


@pytest.mark.slow
def test_the_health_check_runs_without_ray_and_says_what_is_wrong(project: Path) -> None:
    environment = {"RAY_AGENT_PORT": str(free_port()), "SERVE_PORT": str(free_port()), "PATH": "/usr/bin:/bin"}
    script = str(project / "deploy" / "healthcheck.py")
    done = subprocess.run(
        [sys.executable, "-I", script], capture_output=True, text=True, env=environment, timeout=60, cwd="/"
    )
    assert done.returncode == 1
    assert done.stdout.startswith("unhealthy: http://127.0.0.1:") and done.stderr == ""


def test_the_health_check_asks_serve_only_where_serve_listens() -> None:
    assert not load_script("healthcheck").listens(free_port())
