"""Trainers on two gloo processes without Ray: many short runs for the price of one start."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as processes

from actors.training.ranks import Ranks
from actors.training.run_files import Fence, StepRecord
from actors.training.settings import TrainSettings
from actors.training.trainer import Trainer
from model.errors import JobError, UserError

TOKEN = "token"


class SilentLink:
    """Nobody listens and nobody asks to stop."""

    def enter(self, phase: str) -> None: ...

    def warn(self, message: str) -> None: ...

    def beat(self, beat: Any) -> None: ...

    def publish(self, record: StepRecord) -> None: ...

    def stop_requested(self) -> bool:
        return False


def train_all(runs: Mapping[str, TrainSettings], world: int = 2) -> dict[str, str]:
    """Train each of the settings with `world` ranks, one after the other; what a run said when it failed, by name.

    Runs that end well leave their output, and no entry.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with processes.Manager() as manager:
        said = manager.dict()
        processes.spawn(_rank, (world, port, dict(runs), said), nprocs=world)
        return dict(said)


def _rank(rank: int, world: int, port: int, runs: Mapping[str, TrainSettings], said: Any) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    dist.init_process_group("gloo")
    ranks = Ranks.join(rank, world, rank)
    for name, settings in runs.items():
        if ranks.first:
            Path(settings.output).mkdir(parents=True, exist_ok=True)
            Fence(settings.output, TOKEN).raise_up()
        ranks.barrier()
        try:
            trainer = Trainer(settings, ranks, SilentLink(), TOKEN)  # type: ignore[arg-type]
            trainer.run()
            trainer.engine.destroy()
        except (UserError, JobError) as error:
            said[name] = str(error)
        except Exception:
            said[name] = traceback.format_exc()
            raise
    dist.destroy_process_group()
