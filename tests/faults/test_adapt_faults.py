"""Training survives what kills it: the same command goes on, and its losses are those of a run that nothing befell."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.training.checkpoints import CheckpointStore
from tests.training_runs import TrainingRun, adapt, arguments, read_metrics, timeless

pytestmark = [pytest.mark.faults, pytest.mark.slow]
PATIENCE_S = 280.0


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll closely: a step of the tiny model takes milliseconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}"
        time.sleep(0.01)


def steps_done(output: Path) -> int:
    return len(read_metrics(output))


def newest_step(output: Path) -> int:
    return CheckpointStore(str(output), keep=2).committed()[-1].step


@contextlib.contextmanager
def job(project: Path, argv: list[str], address: str) -> Iterator[subprocess.Popen[str]]:
    """The job as a user starts it, on the Ray at `address`; ended if it still runs."""
    command = [sys.executable, str(project / "pipelines" / "adapt.py"), *argv]
    environment = {**os.environ, "RAY_ADDRESS": address}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def training_workers(pid: int) -> list[psutil.Process]:
    """The Ray Train workers below a process."""
    return [p for p in psutil.Process(pid).children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline()[:1])]


def test_a_worker_killed_and_one_that_hangs_are_replaced_and_every_loss_is_as_if_nothing_had_happened(
    local_ray: None,
    uninterrupted: TrainingRun,
    tiny_model: Path,
    training_rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGKILL first, then SIGSTOP: a process that neither moves nor ends."""
    output = tmp_path / "out"

    def strike_after(step: int, number: int) -> None:
        wait_until(lambda: steps_done(output) >= step, f"step {step}")
        for worker in training_workers(os.getpid()):
            worker.send_signal(number)
        wait_until(lambda: steps_done(output) < step, "the next attempt")

    strikes = threading.Thread(
        target=lambda: (strike_after(14, signal.SIGKILL), strike_after(37, signal.SIGSTOP)), daemon=True
    )
    strikes.start()
    run = adapt(arguments(tiny_model, training_rows, output, step_timeout_s=20), output)
    assert run.code == 0
    assert not strikes.is_alive(), "the workers were not struck twice"
    assert timeless(run.metrics) == timeless(uninterrupted.metrics)
    message = r"Step \d+ has not moved for 20 s: worker 0 \(process \d+ on [\d.]+\) hangs (in|while|behind) "
    assert re.search(message, capsys.readouterr().err)


def test_a_job_stopped_then_killed_goes_on_to_the_same_end(
    project: Path, uninterrupted: TrainingRun, tiny_model: Path, training_rows: Path, tmp_path: Path
) -> None:
    """SIGTERM saves where it stands; kill -9 of the driver loses only steps since the last checkpoint."""
    import ray

    address = ray.get_runtime_context().gcs_address
    output = tmp_path / "out"
    argv = arguments(tiny_model, training_rows, output)

    with job(project, argv, address) as first:
        wait_until(lambda: steps_done(output) >= 13, "step 13")
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 143
    assert errors.splitlines()[-1] == "adapt: interrupted; run the same command again to go on."
    stopped_at = newest_step(output)
    assert stopped_at == steps_done(output) >= 13

    with job(project, argv, address) as second:
        wait_until(lambda: steps_done(output) >= max(34, stopped_at + 1), "step 34")
        second.send_signal(signal.SIGKILL)
    assert not (output / "model").exists()

    assert adapt(argv, output).code == 0
    assert timeless(read_metrics(output)) == timeless(uninterrupted.metrics)
    for name in ("model.safetensors", "config.json"):
        assert (output / "model" / name).read_bytes() == (uninterrupted.output / "model" / name).read_bytes()
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_50", "step_60"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem too small for one checkpoint (1.2 MB); only root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small filesystem needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small filesystem is not allowed here")
    yield place
    wait_until(  # Ray's workers are still ending
        lambda: subprocess.run(["umount", str(place)], capture_output=True).returncode == 0, f"{place} to be unused"
    )


def test_no_space_for_a_checkpoint_is_one_sentence_and_leaves_nothing_half_written(
    local_ray: None,
    tiny_model: Path,
    training_rows: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = small_disk / "out"
    assert adapt(arguments(tiny_model, training_rows, output), output).code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("adapt: No space for a checkpoint in")
    assert message.endswith("free some and run the same command again to go on.")
    assert list((output / "checkpoints").iterdir()) == []
    assert not (output / "model").exists()
