"""The cluster as these stages need it: at least one CPU, and every node sees the places that are plain paths."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from model.errors import JobError, UserError

POLL_S = 1.0
REPORT_EVERY_S = 5.0


def wait_for_cpus(wait_s: float) -> None:
    """Return when some node offers a CPU; the head of a cluster often does not. Raises JobError after wait_s."""
    deadline, report = time.monotonic() + wait_s, time.monotonic()
    while ray.cluster_resources().get("CPU", 0) < 1:
        if time.monotonic() >= deadline:
            raise JobError(f"No node with a CPU joined within {wait_s:g} s: add nodes, or raise --cluster.wait_s.")
        if time.monotonic() >= report:
            print("prepare: waiting for a node with CPUs: have 0 of 1", file=sys.stderr, flush=True)
            report += REPORT_EVERY_S
        time.sleep(POLL_S)


def check_seen(places: Sequence[tuple[str, str]]) -> None:
    """places: (key, path). Raises UserError for a plain path that some working node does not see."""
    paths = {path: key for key, path in places if path.startswith("/")}
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    missing: list[list[str]] = ray.get([_ask(node, list(paths)) for node in nodes])
    for path, key in paths.items():
        blind = sum(path in answer for answer in missing)
        if blind:
            raise UserError(
                f"{key} {path} is not seen by {blind} of {len(nodes)} nodes: use a folder that all share, or a URI."
            )


def several_nodes() -> bool:
    """Whether more than one node is alive."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) > 1


def _ask(node: str, paths: list[str]) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return _missing.options(num_cpus=0, scheduling_strategy=here).remote(paths)


@ray.remote
def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
