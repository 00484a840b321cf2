"""DeepSpeed ZeRO around a TrainingModel: start it, collect its weights.

Traps met here: DeepSpeed compiles a small extension on CPU with ninja, which must be found although nobody activated
the environment, and a process that is killed meanwhile leaves a lock that would hang every later start; a parameter is
whole only inside GatheredParameters; every rank must enter each of these functions.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.training.ranks import Ranks
from actors.training.settings import TrainSettings, deepspeed_settings, frozen_settings
from model.errors import JobError
from model.sources import cache_folder, first_line

EXTENSION = "deepspeed_shm_comm"
NO_COMPILER = (RuntimeError, ImportError, OSError, AssertionError, subprocess.SubprocessError)  # as torch tells of it


def start_engine(module: nn.Module, settings: TrainSettings) -> Any:
    """The DeepSpeed engine that trains `module` with AdamW; inside an initialised process group."""
    os.environ["DS_ACCELERATOR"] = settings.device
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if settings.device == "cpu":
        build_extension()
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=_optimizer(module, settings), config=deepspeed_settings(settings)
    )
    _forget_first_step(engine)
    return engine


def share_out(module: nn.Module, settings: TrainSettings) -> Any:
    """Share a frozen module out over the workers: from now on each of its layers is gathered when it is called. Returns
    what must be kept for as long; `start_engine` comes first."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, config=frozen_settings(settings))
    return engine


def _forget_first_step(engine: Any) -> None:
    """Without ZeRO in bfloat16 DeepSpeed takes a step with zero gradients to make AdamW's state: it must not count."""
    for state in engine.basic_optimizer.state.values():
        if engine.zero_optimization_stage() == 0:
            state["step"].zero_()


def _optimizer(module: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; where its state is offloaded, DeepSpeed's for CPUs."""
    groups = weight_groups(module, settings.weight_decay)
    told: dict[str, Any] = {"lr": 0.0, "betas": (0.9, settings.beta2)}  # every step sets its own rate
    if settings.offload.optimizer == "none":
        return torch.optim.AdamW(groups, fused=True, **told)
    return optimizer_for_cpus(groups, told)


def optimizer_for_cpus(groups: list[dict[str, Any]], told: dict[str, Any]) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for state that lies in the machine's memory. Raises JobError where it cannot be compiled."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    with _alone("cpu_adam", "--train.offload.optimizer"):
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **told)
    return optimizer


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


def extensions_folder() -> Path:
    """Where this environment's DeepSpeed is compiled: another one compiles other sources, and would overwrite what runs
    here have loaded."""
    import deepspeed

    parts = (sys.version, torch.__version__, torch.__file__, deepspeed.__version__, str(deepspeed.__file__))
    return cache_folder() / "torch_extensions" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _alone(extension: str, user: str) -> Iterator[None]:
    """Compile an extension of DeepSpeed in here: one process of a machine at a time.

    Whoever holds our file lock is the only builder, so torch's own lock file, if it is there, was left by the dead.
    user: what needs the extension. Raises JobError where it cannot be compiled.
    """
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder())))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / extension / "lock").unlink(missing_ok=True)
        try:
            yield
        except NO_COMPILER as error:
            raise JobError(
                f"DeepSpeed's {extension} could not be compiled on {platform.node()} ({first_line(error)}): {user} "
                "needs a C++ compiler on every node, and beside GPUs the CUDA toolkit."
            ) from error


def build_extension() -> None:
    """Compile and load the extension that workers of one machine talk through on CPUs. Raises JobError where it cannot
    be compiled."""
    with _alone(EXTENSION, "training on CPUs"):
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible():
            builder.load()


def gather_weights(module: nn.Module, ranks: Ranks, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Every parameter (or every trained one) whole, on the CPU, by name, gathered one at a time: on rank 0; nothing
    elsewhere."""
    import deepspeed

    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            if ranks.first:
                weights[name] = parameter.detach().to("cpu", copy=True)
    return weights
