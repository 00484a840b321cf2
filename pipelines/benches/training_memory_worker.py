"""One training worker of the memory bench: the model, DeepSpeed and the objective of adapt, on rows of random tokens.

python -m pipelines.benches.training_memory_worker '{"rank": 0, "workers": 2, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.training.zero import start_engine
from model.attention import register_attention
from model.backbone import DTYPES
from model.layout import RowBatch
from model.objective import TrainingModel, make_objective, to_device
from pipelines.benches.memory import peak_bytes
from pipelines.planning.told import worker_settings

BLOCK = 32
STEPS = 2
MICRO_STEPS = 1
ROLLUP = Path("/proc/self/smaps_rollup")


def main(told: dict[str, Any]) -> None:
    """Train a few steps, write how much memory they took to `<folder>/<rank>.json`."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(told["port"]),
        "RANK": str(told["rank"]),
        "LOCAL_RANK": str(told["rank"]),
        "WORLD_SIZE": str(told["workers"]),
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _warm_up(told)
    dist.barrier()
    shared = _shared()
    engine: list[Any] = []
    peak = peak_bytes(lambda: engine.append(_train(told)), "cpu")
    grown = {"rank": told["rank"], "grown": peak - (_shared() - shared), "shared_grew": _shared() - shared}
    Path(told["folder"], f"{told['rank']}.json").write_text(json.dumps(grown))
    dist.barrier()
    dist.destroy_process_group()


def _warm_up(told: dict[str, Any]) -> None:
    """The same on a model too small to count: libraries, compiled extensions and thread pools are there afterwards."""
    small = {**told["model"], "hidden_size": 36, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    _train({**told, "model": small, "length": BLOCK}).destroy()


def _train(told: dict[str, Any]) -> Any:
    """The engine after its steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = worker_settings(
        workers=told["workers"],
        dtype=told["dtype"],
        micro_rows=told["micro_rows"],
        rows_per_step=told["micro_rows"] * told["workers"] * MICRO_STEPS,
        checkpointing=told["checkpointing"],
    )
    torch.manual_seed(0)
    config = LlamaConfig(**told["model"], attn_implementation=register_attention(), dtype=DTYPES[told["dtype"]])
    model = LlamaForCausalLM._from_config(config, attn_implementation=register_attention(), dtype=DTYPES[told["dtype"]])
    if told["checkpointing"]:
        model.activation_checkpointing_enable()
    engine = start_engine(TrainingModel(model).train(), settings)
    vocabulary = told["model"]["vocab_size"]
    objective = make_objective(
        "block_diffusion", block_size=BLOCK, mask_token_id=vocabulary - 1, seed=0, layers=config.num_hidden_layers
    )
    for step in range(STEPS):
        for index in range(MICRO_STEPS):
            sample = (step * MICRO_STEPS + index) * told["workers"] + told["rank"]
            rows = _rows(told["micro_rows"], told["length"], vocabulary, sample)
            batch = objective.batch(rows, range(sample, sample + told["micro_rows"]), 0)
            engine.backward(engine(to_device(batch, "cpu")) / batch.supervised_tokens)
            engine.step()
    return engine


def _rows(count: int, length: int, vocabulary: int, seed: int) -> RowBatch:
    """Random ids, one document a row, every token supervised."""
    ids = torch.randint(vocabulary - 1, (count, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(count, length).contiguous()
    return RowBatch(ids, ids.clone(), torch.zeros_like(ids), positions)


def _shared() -> int:
    """Resident pages that others hold a part of: what resident memory counts whole and proportional memory shares."""
    return _rollup("Rss") - _rollup("Pss")


def _rollup(name: str) -> int:
    for line in ROLLUP.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{ROLLUP} has no {name}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
