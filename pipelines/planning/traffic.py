"""What workers send each other in a step, and how long that takes on links and network."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.planning.hardware import GB, Cluster
from pipelines.planning.setup import STATE_WIDTH, Setup
from pipelines.planning.shape import Shape
from pipelines.planning.work import UPDATE_BYTES

BITS = 8
HOST_MEMORY = 200e9  # bytes/s that a node's CPUs read and write together: assumed
NODE_DISK = 6e9  # bytes/s of a node's NVMe disks: assumed
REACHED = 0.8  # of a link's rate that collectives of large messages get: assumed


@dataclass(frozen=True)
class Traffic:
    """Bytes that each worker receives in a step. gathers: parameters; reductions: gradients."""

    gathers: float
    reductions: float

    @property
    def total(self) -> float:
        return self.gathers + self.reductions


def traffic_of(shape: Shape, setup: Setup) -> Traffic:
    """ZeRO's collectives: a worker receives (W - 1) / W of what is gathered or reduced.

    Stage 3 gathers all parameters for the forward pass and again for the backward pass of every micro-step, and reduces
    the gradients of each; a model that stays gathered (below DeepSpeed's bound of live parameters) is gathered once.
    Stage 2 reduces in every micro-step, stages 0 and 1 at the end of the step; 1 and 2 gather the updated parameters
    once. What is recomputed in the backward pass is gathered with it.
    """
    passed = (setup.workers - 1) / setup.workers
    whole = setup.width * shape.parameters * passed
    trained = setup.width * shape.parameters * setup.trainable * passed
    if setup.zero_stage == 3:
        times = 1 if shape.parameters <= setup.live_parameters else 2
        return Traffic(times * whole * setup.micro_steps, trained * setup.micro_steps)
    if setup.zero_stage == 2:
        return Traffic(trained, trained * setup.micro_steps)
    if setup.zero_stage == 1:
        return Traffic(trained, trained)
    return Traffic(0.0, 2 * trained)


def seconds_of(traffic: Traffic, setup: Setup, cluster: Cluster) -> float:
    """Seconds of all collectives of a step, were nothing else done: the slower of links and network decides.

    What crosses a node's network: from other nodes every node receives (n - 1) / n of each collective once.
    """
    if setup.workers == 1:
        return 0.0
    whole = traffic.total * setup.workers / (setup.workers - 1)
    inside = traffic.total / (cluster.gpu.link_gbs * GB)
    between = whole * (cluster.nodes - 1) / cluster.nodes / (cluster.gpu.network_gbit * GB / BITS)
    return max(inside, between) / REACHED


def offload_seconds(shape: Shape, setup: Setup, cluster: Cluster) -> float:
    """Seconds of a step that offloading costs, nothing of it hidden: gradients down and weights up, AdamW in the
    host's memory, parameters up for every pass, and what goes to and from a disk."""
    share = shape.parameters * setup.trainable / setup.workers
    whole = setup.width * shape.parameters / setup.workers
    moved = disk = updated = 0.0
    if setup.offload_optimizer != "none":
        moved += (STATE_WIDTH + setup.width) * share
        updated = UPDATE_BYTES * share * cluster.gpus_per_node
        disk += 2 * 3 * STATE_WIDTH * share if setup.offload_optimizer == "nvme" else 0.0
    if setup.offload_parameters != "none":
        passes = 2 * setup.micro_steps
        moved += passes * whole
        disk += passes * whole if setup.offload_parameters == "nvme" else 0.0
    links = moved / (cluster.gpu.host_gbs * GB * REACHED)
    return links + updated / HOST_MEMORY + disk * cluster.gpus_per_node / NODE_DISK
