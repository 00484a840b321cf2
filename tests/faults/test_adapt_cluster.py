"""Training on two nodes outlives its workers, its nodes and its driver; each fault once, at length only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.faults.test_adapt_faults import job, steps_done, training_workers, wait_until
from tests.training_runs import arguments, read_metrics, timeless

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1500)]
PATIENCE_S = 600.0  # three raylets on two cores
STORE_BYTES = 80_000_000


class Nodes:
    """A head without CPUs, where the driver is, and raylets with one CPU each, for one worker."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add(), self.add()]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def workers(self, node: Any) -> list[psutil.Process]:
        return training_workers(node.all_processes["raylet"][0].process.pid)

    def kill_raylet(self, node: Any) -> None:
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def drain(self, node: Any) -> None:
        """What a cloud's notice of two minutes comes to."""
        words = ["drain-node", "--address", self.address, "--node-id", node.node_id, "--reason"]
        words += ["DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "120"]
        subprocess.run([str(Path(sys.executable).parent / "ray"), *words], check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def nodes(at_length: bool) -> Iterator[Nodes]:
    if not at_length:
        pytest.skip("only at length")
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


def two(model: Path, rows: Path, output: Path, **train: Any) -> list[str]:
    keys = {"workers": 2, "device": "cpu", "cpus_per_worker": 1, "step_timeout_s": 20, **train}
    return [*arguments(model, rows, output, **keys), "--cluster.wait_s", "120"]


@pytest.fixture(scope="module")
def unharmed(
    project: Path, nodes: Nodes, tiny_model: Path, training_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The metrics of the same run when nothing befalls it."""
    output = tmp_path_factory.mktemp("training") / "unharmed"
    with job(project, two(tiny_model, training_rows, output), nodes.address) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return timeless(read_metrics(output))


def kill_a_worker(nodes: Nodes) -> None:
    for worker in nodes.workers(nodes.nodes[0]):
        worker.send_signal(signal.SIGKILL)


def kill_the_other_worker(nodes: Nodes) -> None:
    for worker in nodes.workers(nodes.nodes[1]):
        worker.send_signal(signal.SIGKILL)


def stop_a_worker(nodes: Nodes) -> None:
    for worker in nodes.workers(nodes.nodes[1]):
        worker.send_signal(signal.SIGSTOP)


def kill_a_raylet(nodes: Nodes) -> None:
    nodes.kill_raylet(nodes.nodes[0])
    nodes.nodes[0] = nodes.add()


def take_a_node_away(nodes: Nodes) -> None:
    leaving, nodes.nodes[1] = nodes.nodes[1], nodes.add()
    nodes.drain(leaving)


@pytest.mark.parametrize(
    ("befall", "said"),
    [
        (kill_a_worker, "the workers failed after step"),
        (kill_the_other_worker, "the workers failed after step"),
        (stop_a_worker, "has not moved for 20 s: worker"),
        (kill_a_raylet, "the workers failed after step"),
        (take_a_node_away, "the workers save and start again elsewhere"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_workers_go_on_bit_for_bit(
    befall: Callable[[Nodes], None],
    said: str,
    project: Path,
    nodes: Nodes,
    unharmed: list[dict[str, Any]],
    tiny_model: Path,
    training_rows: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    with job(project, two(tiny_model, training_rows, output), nodes.address) as process:
        wait_until(lambda: steps_done(output) >= 14, "step 14", PATIENCE_S)
        befall(nodes)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert said in errors
    assert timeless(read_metrics(output)) == unharmed


def test_a_killed_driver_is_followed_by_the_same_command(
    project: Path,
    nodes: Nodes,
    unharmed: list[dict[str, Any]],
    tiny_model: Path,
    training_rows: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    with job(project, two(tiny_model, training_rows, output), nodes.address) as first:
        wait_until(lambda: steps_done(output) >= 14, "step 14", PATIENCE_S)
        first.send_signal(signal.SIGKILL)
    with job(project, two(tiny_model, training_rows, output), nodes.address) as second:
        _, errors = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, errors
    assert timeless(read_metrics(output)) == unharmed
