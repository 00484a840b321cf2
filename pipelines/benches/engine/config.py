"""The keys of `bench.py engine`."""

from __future__ import annotations

import sys
from typing import ClassVar, Literal, get_args

from pydantic import Field

from pipelines.benches.result import BenchConfig

PartName = Literal["single", "rivals", "closed", "lockstep", "open", "host", "memory", "forward", "floor"]
ALL_PARTS: tuple[PartName, ...] = get_args(PartName)


class EngineBenchConfig(BenchConfig):
    """Time the engine against AR, transformers, llama.cpp, lock-step batches and other schedulers."""

    output_name: ClassVar[str] = "bench/engine.json"

    parts: tuple[PartName, ...] = Field(ALL_PARTS, description="parts to measure, in this order")
    control: str | None = Field(None, description="a next-token model to compare in AR mode: id, folder or URI")
    width: int | None = Field(
        None, ge=16, description="measure a random Llama of this hidden size, with the model's tokenizer and depth"
    )
    layers: int | None = Field(None, ge=1, description="decoder layers of the random Llama; null: as the model")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="number format")
    weights: Literal["model", "int8"] = Field("model", description="on a CPU: int8 decodes with quantised weights")
    tasks: int = Field(8, ge=1, description="held-out tasks that are asked")
    max_tokens: int = Field(96, ge=1, description="longest answer in tokens (its length where nothing stops it)")
    thresholds: tuple[float, ...] = Field((0.9, 0.7), description="confidence thresholds of an adapted model's blocks")
    steps: int | None = Field(
        None,
        ge=1,
        description="denoising steps of a block where the model is not adapted; null: a quarter of the block",
    )
    also: tuple[str, ...] = Field(
        (), description="more block decoders for the part `single`, such as policy=static,steps=8"
    )
    fused: Literal["off", "masked_head", "speculative"] = Field(
        "speculative", description="commit form of the block decoder in all parts but `single` and `lockstep`"
    )
    batch: int = Field(8, ge=1, description="rows at a time in lockstep, open, host and memory, sequences in rivals")
    concurrency: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32), description="requests at a time in `closed`")
    per_slot: int = Field(2, ge=1, description="requests for each one at a time, in closed, lockstep and host")
    arrivals: int = Field(40, ge=1, description="requests of an open loop")
    load: float = Field(0.7, gt=0, description="rate of arrivals, a share of what a closed loop of them sustains")
    long_share: float = Field(0.25, ge=0, le=1, description="share of long prompts among the arrivals")
    long_prompt: tuple[int, int] = Field(
        (1024, 2048), description="shortest and longest long prompt in tokens, as far as the context reaches"
    )
    queries: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32, 64), description="query tokens a row in `forward`")
    cached: int = Field(256, ge=1, description="tokens in the cache in `forward`, a multiple of every query length")
    gguf: str | None = Field(None, description="weights for llama.cpp; null: those of the demo's package")
    llama_python: str = Field(sys.executable, description="interpreter that can import llama_cpp, this one by default")
