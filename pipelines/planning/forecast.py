"""Shape, setup and cluster together: memory, time, and what to change where it does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipelines.planning import traffic as collectives
from pipelines.planning import work as arithmetic
from pipelines.planning.hardware import GB, Cluster
from pipelines.planning.memory import Memory, memory_of
from pipelines.planning.setup import Setup
from pipelines.planning.shape import Shape
from pipelines.planning.traffic import Traffic, traffic_of
from pipelines.planning.work import Rows, Seconds, Work, work_of

HOUR_S = 3600


@dataclass(frozen=True)
class Assumed:
    """efficiency: share of the peak that matrix products reach. overlap: share of the shorter of computing and
    communicating that hides behind the longer. documents: in a row, on average."""

    efficiency: float
    overlap: float
    documents: float


@dataclass(frozen=True)
class Time:
    """Seconds of a step. communication: were nothing else done; exposed: what of it nobody hides."""

    compute: Seconds
    communication: float
    exposed: float
    offload: float

    @property
    def step(self) -> float:
        return self.compute.total + self.exposed + self.offload


@dataclass(frozen=True)
class Forecast:
    """Everything that is known before a run. mfu: the model's own operations over the peak of the time they take."""

    shape: Shape
    setup: Setup
    cluster: Cluster
    memory: Memory
    traffic: Traffic
    work: Work
    time: Time
    steps: int

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.cluster.gpu.memory_gb * GB and self.fits_host

    @property
    def fits_host(self) -> bool:
        return self.memory.host * self.cluster.gpus_per_node <= self.cluster.gpu.host_memory_gb * GB

    @property
    def mfu(self) -> float:
        return self.work.model / (self.cluster.workers * self.cluster.gpu.tflops * arithmetic.TERA * self.time.step)

    @property
    def row_tokens_per_second(self) -> float:
        """Of packed rows over all workers, the tails of rows included (metrics.jsonl leaves tails out)."""
        return self.setup.rows_per_step * self.setup.row_tokens / self.time.step

    @property
    def hours(self) -> float:
        return self.steps * self.time.step / HOUR_S

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.cluster.workers


def forecast(
    shape: Shape, setup: Setup, cluster: Cluster, assumed: Assumed, steps: int, rows: Rows | None = None
) -> Forecast:
    """rows: what a row costs; None: as this project lays it out."""
    rows = rows or arithmetic.own_rows(setup, assumed.documents)
    traffic, work = traffic_of(shape, setup), work_of(shape, rows, setup)
    compute = arithmetic.seconds_of(work, setup, cluster.gpu, assumed.efficiency)
    communication = collectives.seconds_of(traffic, setup, cluster)
    hidden = assumed.overlap * min(communication, compute.total)
    time = Time(compute, communication, communication - hidden, collectives.offload_seconds(shape, setup, cluster))
    return Forecast(shape, setup, cluster, memory_of(shape, setup), traffic, work, time, steps)


def largest_micro_rows(shape: Shape, setup: Setup, cluster: Cluster) -> int:
    """Rows in one forward that fit, at most a worker's share of a step; 0 where not even one does."""
    budget = cluster.gpu.memory_gb * GB
    most = max(1, -(-setup.rows_per_step // setup.workers))
    # so many fit before the first that does not: the peak never falls with more rows
    return bisect_left(range(1, most + 1), True, key=lambda rows: _peak(shape, setup, rows) > budget)


def _peak(shape: Shape, setup: Setup, micro_rows: int) -> float:
    return memory_of(shape, replace(setup, micro_rows=micro_rows)).peak


@dataclass(frozen=True)
class Remedy:
    """A change that makes the run fit: what to say on the command line, and what the peak is then."""

    words: str
    peak: float


def remedies(shape: Shape, setup: Setup, cluster: Cluster) -> list[Remedy]:
    """Each change alone, then those that only help together; the mildest first. Empty where nothing of this helps."""
    found = [Remedy(words, memory.peak) for words, memory in _changed(shape, setup, cluster) if _fits(memory, cluster)]
    return found[:4]


def _fits(memory: Memory, cluster: Cluster) -> bool:
    host = memory.host * cluster.gpus_per_node <= cluster.gpu.host_memory_gb * GB
    return memory.peak <= cluster.gpu.memory_gb * GB and host


def _changed(shape: Shape, setup: Setup, cluster: Cluster) -> Iterator[tuple[str, Memory]]:
    base: list[tuple[str, Setup]] = [("", setup)]
    steps: list[tuple[str, dict[str, object]]] = [
        ("--train.micro_rows 1", {"micro_rows": 1}),
        ("--train.activation_checkpointing true", {"checkpointing": True}),
        ("--train.zero_stage 3", {"zero_stage": 3}),
        ("--train.offload.optimizer cpu", {"offload_optimizer": "cpu"}),
        ("--train.offload.parameters cpu", {"offload_parameters": "cpu"}),
    ]
    useful = [(words, change) for words, change in steps if replace(setup, **change) != setup]  # type: ignore[arg-type]
    for words, change in useful:
        yield words, memory_of(shape, replace(setup, **change))  # type: ignore[arg-type]
    for nodes in (cluster.nodes * 2, cluster.nodes * 4, cluster.nodes * 8):
        yield f"--hardware.nodes {nodes}", memory_of(shape, replace(setup, workers=nodes * cluster.gpus_per_node))
    words, together = base[0]
    for name, change in useful:
        words, together = f"{words} {name}".strip(), replace(together, **change)  # type: ignore[arg-type]
        if " --" in words:
            yield words, memory_of(shape, together)
