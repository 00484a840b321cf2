"""What a run leaves behind step by step (metrics.jsonl), and how it knows that the output is still its own (.run).

A worker may outlive its driver by some seconds. The driver of the next run puts a new token into `.run` before it
starts workers, so the old worker finds out before it publishes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from model.errors import JobError

METRICS = "metrics.jsonl"
TOKEN = ".run"


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. step: 1-based; loss: nats per supervised token, the mean of the global batch; with two
    towers per masked one, of which there are scored_tokens.

    seconds: the step took, its evaluation not included; time: when it ended, seconds since 1970. loss_by_noise: the
    mean loss at each noise level (see `actors.training.noise`). ar_loss: the next-token part, unweighted, in nats
    per supervised token, where it is a part of the loss. time_shares: where the seconds went, by phase, the mean
    over the workers (see `actors.training.clock`). mfu: share of the stated peak of the GPUs (see
    `actors.training.flops`). held_out_loss, held_out_bound, held_out_perplexity: of the step's evaluation (see
    `actors.training.evaluation`). skipped: the sample ids for whose sake the step changed nothing; it has neither loss
    nor grad_norm then. What else is None has no place in the line.
    """

    step: int
    loss: float | None
    supervised_tokens: int
    batch_hash: str
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float
    seconds: float | None = None
    time: float | None = None
    loss_by_noise: list[float | None] | None = None
    ar_loss: float | None = None
    time_shares: dict[str, float] | None = None
    mfu: float | None = None
    scored_tokens: int | None = None
    held_out_loss: float | None = None
    held_out_bound: float | None = None
    held_out_perplexity: float | None = None
    skipped: list[int] | None = None

    def line(self) -> dict[str, Any]:
        always = ("loss", "grad_norm")
        return {name: value for name, value in asdict(self).items() if value is not None or name in always}


class Fence:
    """Whether the run with this token still owns the output."""

    def __init__(self, output: str, token: str) -> None:
        self._filesystem, root = url_to_fs(output)
        self._place, self._token = f"{root.rstrip('/')}/{TOKEN}", token

    def raise_up(self) -> None:
        """The driver's part: from now on no other run publishes here."""
        self._filesystem.pipe_file(self._place, self._token.encode())

    def take_down(self) -> None:
        if self._filesystem.exists(self._place):
            self._filesystem.rm_file(self._place)

    def check(self) -> None:
        """Raises JobError when another run has begun here, or this one was told to end."""
        try:
            holder = self._filesystem.cat_file(self._place).decode()
        except FileNotFoundError:
            holder = ""
        if holder != self._token:
            raise JobError(f"{self._place.rpartition('/')[0]} was taken over by another run: this one stops.")


class LinesLog:
    """A file of JSON lines, each with its step: flushed at once; on an object store, which cannot append, put there at
    checkpoints. A local file appears with its first line."""

    def __init__(self, output: str, name: str, fence: Fence) -> None:
        self._filesystem, root = url_to_fs(output)
        self._place = f"{root.rstrip('/')}/{name}"
        self._local = "file" in self._filesystem.protocol
        self._fence = fence
        self._lines: list[str] = []

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Keep the lines of steps 1 .. step, the ones a checkpoint stands for; returns them."""
        kept = read_metrics(self._filesystem, self._place, step)
        self._lines = [_text(line) for line in kept]
        if kept or self._filesystem.exists(self._place):
            self.publish(force=True)
        return kept

    def append(self, values: Mapping[str, Any]) -> None:
        """values: `step` and what belongs to it."""
        self._fence.check()
        line = _text(values)
        self._lines.append(line)
        if self._local:
            with open(self._place, "a", encoding="utf-8") as file:
                file.write(line)

    def publish(self, *, force: bool = False) -> None:
        """Bring the stored file up to date; local files are already."""
        if not force and (self._local or not self._lines):
            return
        self._fence.check()
        content = "".join(self._lines).encode()
        if not self._local:
            self._filesystem.pipe_file(self._place, content)
            return
        partial = Path(self._place).with_name(f".{Path(self._place).name}.partial")
        partial.write_bytes(content)
        os.replace(partial, self._place)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def read_metrics(filesystem: Any, place: str, last: int | None = None) -> list[dict[str, Any]]:
    """The lines of steps 1 .. last (None: all) of a LinesLog; one that was cut short by a kill ends the reading."""
    try:
        lines = filesystem.cat_file(place).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if last is not None and record["step"] > last:
            break
        records.append(record)
    return records
