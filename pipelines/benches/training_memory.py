"""Memory of real training workers against the forecast of `plan`: 1, 2 and 4 ZeRO workers on this machine.

Each worker is a process of its own (gloo, DeepSpeed, the training step of adapt) with a random model of
SmolLM2-135M's width. Measured is how far its resident memory grew at its peak, as Linux counts it, over what it was
with all libraries loaded and no model yet; of pages that workers share only its part. glibc is told to give freed
memory back, so that what is resident is what is in use (left alone it keeps it: 852 instead of 659 MB for one worker).
Forecast is `pipelines.planning.memory` for the same shape and settings.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from transformers import LlamaConfig

from model.errors import JobError, UserError
from pipelines.benches import training_memory_worker as worker
from pipelines.benches.result import BenchConfig, Result
from pipelines.jobkit.machine import describe_machine
from pipelines.planning.memory import Memory, memory_of
from pipelines.planning.setup import WIDTH
from pipelines.planning.shape import Shape, shape_of_config
from pipelines.planning.told import cpu_setup

MB = 1e6
SETTING = ("layers", "vocabulary", "length", "micro_rows", "dtype")  # of the forecast
WORKER_S = 600
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # glibc: what is freed is no longer resident


class MemoryBenchConfig(BenchConfig):
    """Compare the memory that training workers really use with what plan forecasts for them."""

    output_name: ClassVar[str] = "bench/memory.json"

    rounds: int = Field(1, ge=1, description="measured rounds; the table shows their medians")
    workers: tuple[int, ...] = Field((1, 2, 4), description="numbers of workers to measure")
    checkpointing: tuple[bool, ...] = Field((False, True), description="activation checkpointing to measure: off, on")
    layers: int = Field(6, ge=1, description="decoder layers of the random model, 576 wide")
    vocabulary: int = Field(8192, ge=64, description="tokens of its vocabulary")
    length: int = Field(256, ge=32, description="tokens in a row, a multiple of 32; every token is supervised")
    micro_rows: int = Field(1, ge=1, description="rows in one forward of one worker")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="number format of forward and backward")


def run_memory(config: MemoryBenchConfig) -> Result:
    """Measure all cases. Raises JobError where a worker fails."""
    if config.length % worker.BLOCK:
        raise UserError(f"--length {config.length} is not a multiple of {worker.BLOCK}.")
    table, ratios = [], {}
    for checkpointing in config.checkpointing:
        for count in config.workers:
            measured = [_measure(config, count, checkpointing) for _ in range(config.rounds)]
            middle = sorted(measured, key=lambda one: max(one))[len(measured) // 2]
            line = _line(forecast_memory(config, count, checkpointing), count, checkpointing, middle)
            table.append(line)
            how = "checkpointed" if checkpointing else "all activations"
            ratios[f"forecast over measured, {count} worker{'' if count == 1 else 's'}, {how}"] = line["ratio"]
    note = (
        f"Growth of a ZeRO-3 worker's proportional memory, {_shape(config).parameters / MB:.1f} M parameters in "
        f"{config.dtype}, "
        f"{config.micro_rows} x {config.length} tokens a forward, all supervised; the forecast of plan beside it."
    )
    setting = config.model_dump(mode="json", include=set(SETTING))
    return Result("memory", describe_machine(config.dtype, "cpu"), config.rounds, table, ratios, note, setting=setting)


def model_values(config: MemoryBenchConfig) -> dict[str, Any]:
    """SmolLM2-135M's width."""
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": config.layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def _shape(config: MemoryBenchConfig) -> Shape:
    return shape_of_config(LlamaConfig(**model_values(config)), "random")


def forecast_memory(config: MemoryBenchConfig, workers: int, checkpointing: bool) -> Memory:
    """What plan says of a worker of this bench."""
    setup = cpu_setup(
        workers=workers,
        width=WIDTH[config.dtype],
        micro_rows=config.micro_rows,
        rows_per_step=config.micro_rows * workers * worker.MICRO_STEPS,
        row_tokens=config.length,
        checkpointing=checkpointing,
    )
    return memory_of(_shape(config), setup)


def _line(memory: Memory, workers: int, checkpointing: bool, measured: list[float]) -> dict[str, Any]:
    mean = sum(measured) / len(measured)
    return {
        "workers": workers,
        "checkpointing": "yes" if checkpointing else "no",
        "measured MB a worker": mean / MB,
        "least": min(measured) / MB,
        "most": max(measured) / MB,
        "forecast MB": memory.peak / MB,
        "ratio": memory.peak / mean,
        "of it resident": memory.resident / MB,
        "activations": memory.activations / MB,
    }


def _measure(config: MemoryBenchConfig, workers: int, checkpointing: bool) -> list[float]:
    """Bytes that each worker's memory grew by."""
    with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
        told = {
            "model": model_values(config),
            "dtype": config.dtype,
            "length": config.length,
            "micro_rows": config.micro_rows,
            "workers": workers,
            "checkpointing": checkpointing,
            "port": _free_port(),
            "folder": scratch,
        }
        processes = [_start(told, rank, Path(scratch)) for rank in range(workers)]
        try:
            codes = [process.wait(WORKER_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            text = "".join(path.read_text(errors="replace") for path in sorted(Path(scratch).glob("*.log")))
            raise JobError(f"A worker of the memory bench failed: {(text.strip() or 'no output').splitlines()[-1]}")
        return [float(json.loads(Path(scratch, f"{rank}.json").read_text())["grown"]) for rank in range(workers)]


def _start(told: dict[str, Any], rank: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **GIVES_BACK}
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", worker.__name__, json.dumps({**told, "rank": rank})],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
