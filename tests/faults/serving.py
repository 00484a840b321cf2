"""The served application that the faults befall: two replicas of a tiny model with known answers, under load.

Every question's answer is its own: letters after a letter, so many of them, or draws at a high temperature with a seed.
They are learned once, from the quiet server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from pipelines.benches.serving.client import Target
from pipelines.benches.serving.load import Load, wait_for
from pipelines.benches.serving.questions import Question, learn
from pipelines.benches.serving.service import HOST, Service, free_port
from tests.api.successor import LETTERS, build_successor_model
from tests.faults.saboteur import Saboteur

MODEL = "successor"
REPLICAS = 2
SHARPNESS = 9.0  # greedy answers are still certain; at temperature 2 one token in ten or so is another
SHORT, LONG = 24, 360  # tokens
CLIENTS, PAUSE_S = 8, 0.02
DISK_BYTES = 128 * 2**20
SETTLE_S = 120.0


def serve_args(model: Path, **changes: Any) -> dict[str, Any]:
    """Two replicas on a quarter of a core each, and queues that the load does not fill."""
    args: dict[str, Any] = {
        "model": str(model),
        "served_name": MODEL,
        "min_replicas": REPLICAS,
        "max_replicas": REPLICAS,
        "cpus_per_replica": 0.25,
        "engine": {"max_rows": 4},
        "max_queue": 40,
        "drain_s": 30,
    }
    return {**args, **changes}


def make_questions() -> list[Question]:
    """Completions and chats, greedy and drawn, short and long; a nonce in each."""
    return [_question(number) for number in range(len(LETTERS))]


def _question(number: int) -> Question:
    letter = LETTERS[number]
    length = LONG if number % 2 == 0 else SHORT + number % 11
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": length, "temperature": 0, "seed": number}
    if number % 3 == 1:  # drawn: its seed is what tells it apart
        fields |= {"temperature": 2.0, "top_k": 4}
    if number % 5 == 2:
        messages = [{"role": "user", "content": f"nonce {number}"}, {"role": "assistant", "content": letter}]
        return Question("/v1/chat/completions", {**fields, "messages": messages})
    return Question("/v1/completions", {**fields, "prompt": f"nonce {number} {letter}"})


@dataclass
class Rig:
    """The running service, what it is asked, and what it stands on. redis, disk: None where the machine has none."""

    service: Service
    model: Path
    redis: subprocess.Popen[bytes] | None
    disk: Path | None
    questions: list[Question] = field(default_factory=list)
    rows: int = 4
    random: Random = field(default_factory=partial(Random, 0))
    gcs: list[subprocess.Popen[bytes]] = field(default_factory=list)  # that were started in place of killed ones

    @property
    def target(self) -> Target:
        return Target(self.service.url, fresh=True)

    def settle(self) -> None:
        """Wait until everything runs."""
        wait_for(lambda: self.service.whole(REPLICAS), "the service to be whole", SETTLE_S, poll_s=0.2)

    def end_gcs(self) -> None:
        for process in self.gcs:
            process.kill()
            process.wait()

    def load(self) -> Load:
        return Load(self.target, self.questions, clients=CLIENTS, pause_s=PAUSE_S)


@contextlib.contextmanager
def rig(scratch: Path) -> Iterator[Rig]:
    """Start everything, learn the answers, and end everything."""
    model = build_successor_model(scratch / "model", sharpness=SHARPNESS)
    with contextlib.ExitStack() as stack:
        redis_port = free_port()
        redis = stack.enter_context(running_redis(scratch, redis_port))
        disk = stack.enter_context(small_disk(DISK_BYTES))
        environment = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        if redis is not None:
            environment |= {"RAY_REDIS_ADDRESS": f"{HOST}:{redis_port}", "RAY_GCS_SERVER_PORT": str(free_port())}
        replica = f"{Saboteur.__module__}:{Saboteur.__qualname__}"
        service = Service(serve_args(model), environment, temp_dir=disk, replica=replica)
        ours = Rig(service, model, redis, disk)
        stack.callback(ours.end_gcs)  # after the service, which ends by it
        stack.enter_context(service)
        ours.settle()
        ours.questions = learn(ours.target, make_questions())
        yield ours


@contextlib.contextmanager
def running_redis(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes] | None]:
    """A Redis in memory on loopback, for Ray's control store; None where there is no redis-server."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    command = [binary, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path | None]:
    """A small filesystem of its own with a short path (Ray puts sockets there); None where it cannot be mounted."""
    place = Path(tempfile.mkdtemp(prefix="bc-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    can = os.geteuid() == 0 and shutil.which("mount") is not None
    if not can or subprocess.run(command, capture_output=True).returncode:
        place.rmdir()
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()
