"""Which workers a run gets: decided from what was asked and what the cluster is, then waited for, never quietly less.

`auto` is for a Ray on this machine only: one worker a GPU, or one worker that owns all CPUs as torch threads (several
processes on the same cores only slow each other). On a cluster the recipe states workers and device, and the job waits
for them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from model.errors import JobError, UserError
from model.packed_linear import cpu_multiplies_bfloat16
from pipelines.training.section import TrainSection

REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """What a Ray offers. ours: this job started it; alone: it is one node, this machine, and nothing can join it;
    cloud: an autoscaler may bring nodes of other kinds. cpus and gpus: of each node alive."""

    ours: bool
    alone: bool
    cloud: bool
    cpus: tuple[float, ...]
    gpus: tuple[float, ...]

    @property
    def here(self) -> bool:
        return self.ours or self.alone


@dataclass(frozen=True)
class Placement:
    """The workers of a run: each reserves `cpus` CPUs (and one GPU on cuda) and runs `threads` torch threads."""

    workers: int
    device: str
    cpus: float
    threads: int

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": 1.0} if self.device == "cuda" else {})}

    @property
    def text(self) -> str:
        """`2 workers of 1 GPU and 4 CPUs each`."""
        gpu = "1 GPU and " if self.device == "cuda" else ""
        many = self.workers > 1
        return f"{_count(self.workers, 'worker')} of {gpu}{_count(self.cpus, 'CPU')}{' each' if many else ''}"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


# What there is --------------------------------------------------------------------------------------------------------


def cluster_here() -> Cluster:
    """The connected Ray."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ours = not os.environ.get("RAY_ADDRESS")
    provider = None if ours else autoscaler_provider()
    mine = ray.get_runtime_context().get_node_id()
    return Cluster(
        ours=ours,
        alone=len(nodes) == 1 and nodes[0]["NodeID"] == mine and provider is None,
        cloud=provider not in (None, "local"),
        cpus=tuple(float(node["Resources"].get("CPU", 0)) for node in nodes),
        gpus=tuple(float(node["Resources"].get("GPU", 0)) for node in nodes),
    )


def cluster_expected() -> Cluster:
    """What a local Ray would be on this machine, without starting one; a cluster of which nothing is known where
    RAY_ADDRESS names one."""
    import torch

    if ray.is_initialized():
        return cluster_here()
    if os.environ.get("RAY_ADDRESS"):
        return Cluster(False, False, True, (), ())
    return Cluster(True, True, False, (float(os.cpu_count() or 1),), (float(torch.cuda.device_count()),))


def autoscaler_provider() -> str | None:
    """The provider type of the autoscaler that runs on this machine (`ray up` starts one on the head), if any."""
    for process in psutil.process_iter(["cmdline"]):
        for word in process.info["cmdline"] or ():
            name, _, value = word.partition("=")
            if name == "--autoscaling-config" and value:
                return _provider_of(Path(value))
    return None


def _provider_of(path: Path) -> str:
    try:
        config = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
        return str(config["provider"]["type"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return "unknown"


# What is asked --------------------------------------------------------------------------------------------------------


def place_workers(train: TrainSection, cluster: Cluster) -> Placement:
    """The placement for `train` on `cluster`. Raises UserError where `auto` would have to guess about a cluster."""
    device = device_of(train, cluster)
    workers = _workers(train, cluster, device)
    cpus = train.cpus_per_worker or _cpus(cluster, workers)
    threads = max(1, int(cpus))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return Placement(workers, device, cpus, min(threads, int(limit)) if limit.isdigit() and int(limit) else threads)


def number_format(train: TrainSection, device: str) -> str:
    """What `--train.dtype` comes to on cpu or cuda. Of workers on CPUs this machine's says what theirs can."""
    if train.dtype != "auto":
        return train.dtype
    return "bfloat16" if device == "cuda" or cpu_multiplies_bfloat16() else "float32"


def device_of(train: TrainSection, cluster: Cluster) -> str:
    """cpu or cuda. Raises UserError where `auto` would have to guess about a cluster."""
    if train.device != "auto":
        return {"cpu": "cpu", "gpu": "cuda"}[train.device]
    if sum(cluster.gpus):
        return "cuda"
    if cluster.cloud:
        raise UserError("This cluster may still get GPUs: say --train.device gpu (or cpu), auto is for one machine.")
    return "cpu"


def _workers(train: TrainSection, cluster: Cluster, device: str) -> int:
    if train.workers != "auto":
        return train.workers
    if not cluster.here:
        raise UserError("--train.workers auto is for a Ray on this machine only: on a cluster say how many workers.")
    if device == "cpu":
        return 1
    return max(1, int(sum(cluster.gpus)))


def _cpus(cluster: Cluster, workers: int) -> float:
    """An equal share of this machine; on a Ray that others share, whole CPUs; on a cluster, one."""
    if not cluster.here:
        return 1.0
    share = sum(cluster.cpus) / workers
    if cluster.ours and share < 1:
        return int(share * 100) / 100 or 0.01
    return max(1.0, float(int(share)))


# Waiting for it -------------------------------------------------------------------------------------------------------


def wait_for_workers(placement: Placement, wait_s: float, shared: Sequence[tuple[str, str]]) -> None:
    """Return when the cluster can run the placement; ask the autoscaler for it meanwhile.

    shared: (key, path) of places that every worker must see. Raises JobError after wait_s, UserError where a node does
    not see a place.
    """
    group = placement_group([placement.bundle] * placement.workers, strategy="PACK")
    try:
        _wait(group, placement, wait_s)
        if len([node for node in ray.nodes() if node["Alive"]]) > 1:
            _check_shared(group, placement, shared)
    finally:
        remove_placement_group(group)


def _wait(group: PlacementGroup, placement: Placement, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    ready = group.ready()
    while True:
        left = deadline - time.monotonic()
        done, _ = ray.wait([ready], timeout=max(0.0, min(REPORT_EVERY_S, left)))
        if done:
            return
        have = joined(placement, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        state = f"have {have} of {placement.workers}" + (", others use them" if have == placement.workers else "")
        if time.monotonic() >= deadline:
            raise JobError(
                f"The cluster did not offer {placement.text} within {wait_s:g} s ({state}): add nodes, raise "
                "--cluster.wait_s, or ask for less with --train.workers and --train.cpus_per_worker."
            )
        print(f"adapt: waiting for {placement.text}: {state}", file=sys.stderr, flush=True)


def joined(placement: Placement, nodes: Sequence[dict[str, float]]) -> int:
    """How many of the workers fit on the nodes that have joined, were they idle."""
    fits = (min(int(node.get(name, 0) / need + 1e-9) for name, need in placement.bundle.items()) for node in nodes)
    return min(placement.workers, sum(fits))


@ray.remote
def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


def _check_shared(group: PlacementGroup, placement: Placement, shared: Sequence[tuple[str, str]]) -> None:
    """Ask from where each worker will be whether it sees the places that are plain paths."""
    paths = {path: key for key, path in shared if path.startswith("/")}
    asked: list[Any] = []
    for index in range(placement.workers):
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        options = {"num_cpus": placement.cpus, "num_gpus": placement.bundle.get("GPU", 0), "scheduling_strategy": where}
        asked.append(_missing.options(**options).remote(list(paths)))
    answers: list[list[str]] = ray.get(asked)
    for path, key in paths.items():
        blind = sum(path in answer for answer in answers)
        if blind:
            raise UserError(
                f"{key} {path} is not seen by {blind} of {placement.workers} workers: "
                "use a folder that all nodes share, or a URI."
            )
