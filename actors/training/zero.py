"""DeepSpeed ZeRO-3 around a TrainingModel: start it, save and load its shards, collect its weights.

Traps met here: DeepSpeed compiles a small extension on CPU with ninja, which must be found although nobody activated
the environment, and a process that is killed meanwhile leaves a lock that would hang every later start; a parameter is
whole only inside GatheredParameters; every rank must enter each of these functions.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.training.ranks import Ranks
from actors.training.settings import TrainSettings, deepspeed_settings
from model.sources import cache_folder

TAG = "zero"
STATE_BYTES = 12  # a parameter's float32 master copy and its two moments
SLACK_BYTES = 1 << 20
EXTENSION = "deepspeed_shm_comm"


def start_engine(module: nn.Module, settings: TrainSettings) -> Any:
    """The DeepSpeed engine that trains `module` with AdamW; inside an initialised process group."""
    os.environ["DS_ACCELERATOR"] = settings.device
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if settings.device == "cpu":
        build_extension()
    optimizer = torch.optim.AdamW(
        weight_groups(module, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(0.9, settings.beta2),
        fused=True,
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=deepspeed_settings(settings))
    return engine


def weight_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, gains and biases do not. Without decay it is one group: fewer, larger optimizer calls."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_extension() -> None:
    """Compile and load the CPU extension, one process of a machine at a time.

    Whoever holds our file lock is the only builder, so torch's own lock file, if it is there, was left by the dead.
    """
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_folder() / "torch_extensions")))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / EXTENSION / "lock").unlink(missing_ok=True)
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible():
            builder.load()


def checkpoint_bytes(parameters: int) -> int:
    """What the shards of all ranks take on disk, about."""
    return parameters * STATE_BYTES + SLACK_BYTES


def save_shards(engine: Any, folder: str) -> None:
    """Write this rank's shards into `folder`."""
    engine.save_checkpoint(folder, tag=TAG, save_latest=False)


def load_shards(engine: Any, folder: str) -> None:
    """Read this rank's shards from `folder`, as written by save_shards with as many ranks."""
    loaded, _ = engine.load_checkpoint(folder, tag=TAG)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")


def gather_weights(module: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Every parameter whole, on the CPU, by name, gathered one at a time: on rank 0; nothing elsewhere."""
    import deepspeed

    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if ranks.first:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights
