"""Rates of GPUs and of what connects them, each with its source; every one can be overridden (`--hardware.*`).

Peak rates are the vendors' own, dense, with bfloat16 operands and float32 sums. A node is what clouds rent as one
machine of 8 such GPUs; its network differs most between sites, so state your own where you know it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from model.errors import UserError
from pipelines.jobkit import Section

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """One GPU and its place in a node.

    tflops: peak, 10^12 per second. memory_gb: 10^9 bytes. bandwidth_gbs: of its memory, GB/s. link_gbs: what a GPU
    sends to the others of its node while it receives as much, GB/s. host_gbs: to and from the host's memory, GB/s each.
    node_gpus: GPUs of a node. network_gbit: of a node, each way, Gbit/s. host_memory_gb: of a node.
    """

    tflops: float
    memory_gb: float
    bandwidth_gbs: float
    link_gbs: float
    host_gbs: float
    node_gpus: int
    network_gbit: float
    host_memory_gb: float
    source: str


GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(312, 40, 1555, 300, 32, 8, 400, 1100, "NVIDIA A100 data sheet (SXM); node: AWS p4d.24xlarge"),
    "a100-80gb": Gpu(312, 80, 2039, 300, 32, 8, 400, 1100, "NVIDIA A100 data sheet (SXM); node: AWS p4de.24xlarge"),
    "h100-80gb": Gpu(989, 80, 3350, 450, 64, 8, 3200, 2000, "NVIDIA H100 data sheet (SXM); node: AWS p5.48xlarge"),
    "h200-141gb": Gpu(989, 141, 4800, 450, 64, 8, 3200, 2000, "NVIDIA H200 data sheet (SXM); node: AWS p5en.48xlarge"),
    "b200-180gb": Gpu(
        2250, 180, 7700, 900, 64, 8, 3200, 2000, "NVIDIA DGX B200 data sheet; node: AWS p6-b200.48xlarge"
    ),
    "l40s-48gb": Gpu(362, 48, 864, 32, 32, 8, 400, 1500, "NVIDIA L40S data sheet; node: AWS g6e.48xlarge, no NVLink"),
    "rtx4090-24gb": Gpu(
        165, 24, 1008, 32, 32, 8, 100, 512, "NVIDIA Ada whitepaper; node: PCIe 4.0, 100 Gbit/s assumed"
    ),
}
DEFAULT = "a100-80gb"


class HardwareSection(Section):
    """The cluster. What is null is taken from the table of GPU kinds (docs/planning.md has it with sources)."""

    gpu: str = Field(DEFAULT, description=f"kind of GPU: {', '.join(GPUS)}; another name needs every rate below")
    nodes: int | None = Field(None, ge=1, description="machines; null: as many as hold train.workers")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of one machine, each runs one worker; null: 8")
    tflops: float | None = Field(None, gt=0, description="peak of one GPU in bfloat16, dense, 10^12 operations/s")
    memory_gb: float | None = Field(None, gt=0, description="memory of one GPU, 10^9 bytes")
    bandwidth_gbs: float | None = Field(None, gt=0, description="speed of a GPU's memory, 10^9 bytes/s")
    link_gbs: float | None = Field(
        None, gt=0, description="from a GPU to the others of its node, 10^9 bytes/s each way"
    )
    host_gbs: float | None = Field(None, gt=0, description="between a GPU and its host's memory, 10^9 bytes/s each way")
    network_gbit: float | None = Field(None, gt=0, description="network of a node, 10^9 bits/s each way")
    host_memory_gb: float | None = Field(None, gt=0, description="memory of a node, 10^9 bytes; offloading needs it")
    price: float | None = Field(None, ge=0, description="price of one GPU for an hour, in your currency; null: no cost")


RATES = ("tflops", "memory_gb", "bandwidth_gbs", "link_gbs", "host_gbs", "network_gbit", "host_memory_gb")


@dataclass(frozen=True)
class Cluster:
    """nodes x gpus_per_node workers, one a GPU."""

    kind: str
    gpu: Gpu
    nodes: int
    gpus_per_node: int

    @property
    def workers(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def text(self) -> str:
        """`8 nodes of 8 a100-80gb`."""
        return f"{self.nodes} node{'' if self.nodes == 1 else 's'} of {self.gpus_per_node} {self.kind}"


def cluster_of(section: HardwareSection, workers: int | None) -> Cluster:
    """The cluster that the section describes. workers: the run's, where stated; it decides the nodes if they are not.

    Raises UserError for an unknown kind without its rates, and where workers do not fill whole nodes.
    """
    given: dict[str, Any] = {name: getattr(section, name) for name in RATES if getattr(section, name) is not None}
    known = GPUS.get(section.gpu)
    if known is None and (missing := [name for name in RATES if name not in given]):
        raise UserError(
            f"--hardware.gpu {section.gpu} is not in the table ({', '.join(GPUS)}): give its --hardware.{missing[0]} "
            f"{f'and {len(missing) - 1} more rates' if missing[1:] else ''}".rstrip()
            + ", or take one that is."
        )
    gpu = replace(known, **given) if known else Gpu(**given, node_gpus=8, source="as given")
    each = section.gpus_per_node or (gpu.node_gpus if workers is None else min(gpu.node_gpus, workers))
    nodes = section.nodes or (1 if workers is None else -(-workers // each))
    if section.nodes is None and workers is not None and workers % each:
        raise UserError(
            f"--train.workers {workers} do not fill whole nodes of {each} GPUs: say --hardware.nodes and "
            "--hardware.gpus_per_node."
        )
    return Cluster(section.gpu, gpu, nodes, each)
