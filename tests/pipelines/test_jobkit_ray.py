"""A job and its Ray: found by address, never waited for in vain, left behind by nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

JOB = """
import sys, time
from pipelines.jobkit import JobConfig, connect_ray, main

class Config(JobConfig):
    "Connects and waits."

def run(config):
    connect_ray(object_store_bytes=150_000_000)
    print("connected", flush=True)
    time.sleep(120)
    return {}

sys.exit(main("waiting", Config, run))
"""


def test_an_address_where_nothing_listens_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, "-c", JOB],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"waiting: No Ray cluster answers at RAY_ADDRESS={address} (Connection refused): "
        "start it, or unset RAY_ADDRESS."
    )


@pytest.mark.slow
def test_sigterm_ends_a_job_and_the_local_ray_it_started(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in started)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.splitlines()[-1]) == (
        143,
        "waiting: interrupted; run the same command again to go on.",
    )
    deadline = time.monotonic() + 20
    while any(child.is_running() for child in started) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [child for child in started if child.is_running()] == []
