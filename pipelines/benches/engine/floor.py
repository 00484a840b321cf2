"""The memory-bandwidth floor: one token at a time reads every weight once, and this machine reads only so fast.

The floor is measured, in turns with the rounds: a buffer as large as the weights that one token needs, read from end to
end with all threads, the faster of two ways (sums of int64 and of float32). What a round takes beyond it is attention,
arithmetic, and waiting between the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipelines.benches.decode import DecodeBenchConfig, RunningRows
from pipelines.benches.engine.setting import PartResult, Setting
from pipelines.benches.timing import take_turns

MIB = 2**20
INT8_BYTES = 34 / 32  # a byte a weight, and a scale of two for 32 of them
READS = {"int64": torch.int64, "float32": torch.float32}


def weight_bytes(model: nn.Module, weights: str) -> float:
    """What the products of one token read: every linear layer's weight once, the head included, in its format."""
    numbers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    return sum(w.numel() * (INT8_BYTES if weights == "int8" else w.itemsize) for w in numbers)


def measure_floor(setting: Setting) -> PartResult:
    """One row of one token a round against reading its weights."""
    config = setting.config
    size = weight_bytes(setting.backbone.model, config.weights)
    rounds = RunningRows(
        setting.backbone,
        1,
        1,
        DecodeBenchConfig(rounds=config.rounds, cached=config.cached, seed=config.seed, dtype=config.dtype),
        weights=config.weights,
    )
    buffers = {name: torch.ones(int(size) // dtype.itemsize, dtype=dtype) for name, dtype in READS.items()}
    forms = {name: buffer.sum for name, buffer in buffers.items()}
    times = take_turns({"round": rounds.rounds, **forms}, config.rounds, title="engine: floor")
    fastest = min(READS, key=times.median)
    lines = [
        _line("1 token", size, times.median("round") / rounds.each),
        _line("reading the weights", size, times.median(fastest)),
    ]
    return PartResult(lines, {"round of 1 token over the bandwidth floor": times.ratio("round", fastest) / rounds.each})


def _line(name: str, size: float, seconds: float) -> dict[str, Any]:
    return {
        "part": "floor",
        "decoder": name,
        "weights MiB": size / MIB,
        "round ms": 1000 * seconds,
        "GB/s": size / seconds / 1e9,
    }
