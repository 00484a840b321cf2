"""Training runs in forked processes, killed at chosen points: what Ray would do to workers, without the cost of a Ray.

    python -m tests.faults.kill_points PLAN.json

PLAN.json: {"settings": {...}, "runs": [{"output": "out", "workers": 1, "kill": ["micro_step", 4]}]}, where settings
differ from those of the settings' test; a run may have "settings" of its own. A run ends by SIGKILL at its point (or
well, without one) and the next one on the same output goes on. A line of JSON a run tells how its processes ended.
Everything is imported once, before the first fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fsspec.core import url_to_fs

from actors.training.board import Failure
from actors.training.checkpoints import CheckpointStore, Identity
from actors.training.ranks import Ranks
from actors.training.run_files import Fence
from actors.training.settings import EvaluationSettings, TrainSettings, TwoTowerSettings
from actors.training.trainer import Link, Trainer
from actors.training.watchdog import Beat
from actors.training.zero import build_extension
from model.adapters import LoraSettings
from model.backbone import load_backbone
from model.errors import JobError, UserError
from tests.actors.training.test_train_settings import settings

KILLED = -signal.SIGKILL
TOKEN = "test"


class Mute(Link):
    """A worker's line to a driver that is not there."""

    def __init__(self) -> None:
        super().__init__(None, rank=1)

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr)

    def beat(self, beat: Beat) -> None:
        """Nobody listens."""

    def fail(self, failure: Failure) -> None:
        print(failure.message, file=sys.stderr)


def kill_at(owner: Any, name: str, count: int, *, after: bool = False) -> None:
    """Let this process die when it is about to call owner.name for the count-th time, or has just called it."""
    once: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = once(*arguments, **named)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def sabotage(trainer: Trainer, point: str, count: int) -> None:
    """Arrange the death at a point, the count-th time that it is passed."""
    store = trainer.store
    places: dict[str, tuple[Any, str, bool]] = {
        "micro_step": (trainer.engine, "backward", True),
        "metrics": (trainer.log, "append", True),
        "between shards": (trainer.engine.checkpoint_engine, "save", True),
        "between uploads": (store._filesystem, "put_file", True),
        "before the marker": (store, "_publish", False),
        "before the name": (Path, "rename", False),
        "after the name": (Path, "rename", True),
        "marker of an old one gone": (store._filesystem, "rm_file", True),
        "before the model": (trainer, "_finish", False),
    }
    owner, name, after = places[point]
    kill_at(owner, name, count, after=after)


def worker(told: TrainSettings, rank: int, world: int, meeting: str, kill: list[Any] | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    trainer = Trainer(told, Ranks.join(rank, world, rank), Mute(), TOKEN)
    if kill is not None and rank == world - 1:
        sabotage(trainer, *kill)
    trainer.run()


def forked(action: Callable[[], None]) -> int:
    """A child that runs `action`: exit code 0, or 1 after an exception."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except (JobError, UserError) as error:
        print(error, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(told: TrainSettings, kill: list[Any] | None) -> list[int]:
    """Exit codes by rank; when one rank has died the others are killed, as Ray does."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        world = told.workers
        pids = [forked(lambda rank=rank: worker(told, rank, world, meeting, kill)) for rank in range(world)]  # type: ignore[misc]
        codes: dict[int, int] = {}
        while len(codes) < world:
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                for other in set(pids) - set(codes):
                    os.kill(other, signal.SIGKILL)
        return [codes[pid] for pid in pids]


def warm_up(model: str) -> None:
    """Import and compile what every run needs."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # PyTorch's compiler comes with it

    build_extension()
    load_backbone(Path(model))


def told_of(values: dict[str, Any]) -> TrainSettings:
    """Settings from JSON."""
    lora, changed = values.get("lora"), dict(values)
    if lora:
        changed["lora"] = LoraSettings(**{**lora, "targets": tuple(lora["targets"])})
    for name, kind in (("two_tower", TwoTowerSettings), ("evaluation", EvaluationSettings)):
        if name in values:
            changed[name] = kind(**values[name])
    return settings(**changed)


def main(plan: dict[str, Any]) -> None:
    told = {**plan["settings"], "identity": Identity("run")}
    warm_up(told["model"])
    for one in plan["runs"]:
        output = one["output"]
        filesystem, root = url_to_fs(output)
        filesystem.makedirs(root, exist_ok=True)
        Fence(output, TOKEN).raise_up()
        values = {**told, **one.get("settings", {}), "output": output, "workers": one["workers"]}
        codes = run(told_of(values), one.get("kill"))
        newest = max((commit.step for commit in CheckpointStore(output, keep=1).committed()), default=0)
        print(json.dumps({"codes": codes, "newest": newest}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
