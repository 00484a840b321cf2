"""What `bench prepare` may be asked for."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipelines.benches.result import BenchConfig
from pipelines.jobkit import PackConfig


class PrepareBenchConfig(BenchConfig):
    """Time chats into packed rows against datasets.map with the published grouping, by workers, and watch memory."""

    output_name: ClassVar[str] = "bench/prepare.json"
    takes_data: ClassVar[bool] = True

    parts: tuple[Literal["core", "scaling", "memory"], ...] = Field(
        ("core", "scaling"), description="what to measure; memory takes minutes"
    )
    tasks: int = Field(20_000, ge=1, description="generated tasks to prepare where --data is absent")
    workers: tuple[int, ...] = Field((1, 2), description="numbers of workers that scaling compares")
    copies: int = Field(4, ge=1, description="times that scaling takes the data, for a job of some length")
    shard_bytes: int = Field(1 << 20, ge=1, description="bytes of a file that one task of scaling and memory reads")
    object_store_mib: int = Field(80, ge=76, description="object store in MiB of the Ray that runs the job")
    stores: tuple[float, ...] = Field(
        (1.0, 5.0), description="sizes of the data that memory compares, in object stores"
    )
    pack: PackConfig = PackConfig()
