"""The job line, verbatim: `ray start --head` in the checkout, then `ray job submit -- python pipelines/adapt.py`.

One full chain on a tiny model: generated chats, packed rows, two training workers, checkpoints, model, assessment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM

from model.packed_linear import cpu_multiplies_bfloat16

JOB_LINE = "ray job submit -- python pipelines/adapt.py"
JOB_S = 900
START_TRIES = 3
PORT_OPTIONS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
)


@dataclass(frozen=True)
class Head:
    """A running head: what a second shell needs, and where its jobs write."""

    environment: dict[str, str]
    storage: Path


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def job_config(model: Path) -> dict:
    return {
        "model": str(model),
        "tasks": {"count": 40, "held_out": 4},
        "pack": {"block_size": 8, "context_length": 256},
        "train": {
            "steps": 3,
            "rows_per_step": 4,
            "micro_rows": 2,
            "workers": 2,
            "checkpoint_every": 2,
        },
        "assess": True,
        "assessment": {"tasks": 2, "held_out_tasks": 4, "max_tokens": 8},
        "cluster": {"wait_s": 120},
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the head and everything it started, by pid."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)  # its own way is to drain for 30 s
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)


def start_head(
    project: Path, environment: dict[str, str], session: str, log: Path
) -> tuple[subprocess.Popen[bytes], str]:
    """A head in the checkout that says it has started, and its dashboard's address.

    Ray gives a raylet 30 s to appear, which a busy machine may miss: then another one is started on other ports.
    """
    for _ in range(START_TRIES):
        ports = dict(zip(PORT_OPTIONS, free_ports(len(PORT_OPTIONS)), strict=True))
        command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=true"]
        command += ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats", f"--temp-dir={session}"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=project, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            if "Ray runtime started" in log.read_text():
                return process, f"http://127.0.0.1:{ports['dashboard-port']}"
            time.sleep(0.5)
    pytest.fail(f"no head came up: {log.read_text()}")


@pytest.fixture
def head(project: Path, tiny_model: Path, tmp_path: Path) -> Iterator[Head]:
    """`ray start --head` in the checkout, the environment's bin first on PATH, a tiny BLOCKCAST_CONFIG."""
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(job_config(tiny_model)))
    session = tempfile.mkdtemp(prefix="ray-")  # short: socket paths below it have at most 107 characters
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BLOCKCAST_CONFIG": str(config),
        "BLOCKCAST_STORAGE": str(tmp_path / "storage"),
    }
    process, address = start_head(project, environment, session, tmp_path / "head.log")
    try:
        yield Head({**environment, "RAY_API_SERVER_ADDRESS": address}, tmp_path / "storage")
    finally:
        stop(process)
        shutil.rmtree(session, ignore_errors=True)


def run_job_line(environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Its exit code and what it printed, which is the job's log; 124 when it ran past JOB_S."""
    log = folder / "job.log"
    with log.open("wb") as output:
        process = subprocess.Popen(JOB_LINE.split(), cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            code = process.wait(timeout=JOB_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 124
    return code, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_job_line_runs_the_whole_chain_on_a_head_started_in_the_checkout(head: Head, tmp_path: Path) -> None:
    second_shell = {name: value for name, value in head.environment.items() if not name.startswith("BLOCKCAST_")}
    code, logs = run_job_line(second_shell, tmp_path)
    assert code == 0, logs
    assert "succeeded" in logs
    assert "adapt: 3/3 steps" in logs
    listed = subprocess.run(["ray", "job", "list"], env=second_shell, capture_output=True, text=True, check=True)
    assert "SUCCEEDED" in listed.stdout

    output = head.storage / "adapt"
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["figures"]["steps"] == 3
    trained_in = "bfloat16" if cpu_multiplies_bfloat16() else "float32"  # nothing was said: device and dtype are auto
    assert manifest["config"]["train"]["dtype"] == trained_in
    assert manifest["figures"]["held_out_loss"] > 0  # on the held-out tasks' rows, without being told
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    assert model.config.block_diffusion["block_size"] == 8
    for name in ("rows/stats.json", "loss.png", "samples.jsonl", "assess/report.md"):
        assert (output / name).is_file()
