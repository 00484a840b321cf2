"""The curves of a run on disk, in three forms that never disagree: JSON lines, TensorBoard's event files, samples.

    metrics.jsonl    a line a step
    samples.jsonl    what the model wrote at each evaluation
    tensorboard/     the same figures and samples for TensorBoard; made anew from the lines whenever a run goes on

All of it ends where the checkpoint does from which a run goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from tensorboardX import SummaryWriter

from actors.training.noise import level_name
from actors.training.run_files import METRICS, Fence, LinesLog, StepRecord

SAMPLES = "samples.jsonl"
EVENTS = "tensorboard"
SCALARS = (
    "loss",
    "ar_loss",
    "held_out_loss",
    "held_out_bound",
    "held_out_perplexity",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
)


class RunLog:
    """What rank 0 writes down. Other ranks have one too and never call it."""

    def __init__(self, output: str, fence: Fence) -> None:
        self._metrics = LinesLog(output, METRICS, fence)
        self._samples = LinesLog(output, SAMPLES, fence)
        self._events = EventFiles(output, fence)

    def cut(self, step: int) -> None:
        """Keep what belongs to the steps 1 .. step, the ones a checkpoint stands for."""
        metrics, samples = self._metrics.cut(step), self._samples.cut(step)
        self._events.restart()
        for line in metrics:
            self._events.add(line)
        for line in samples:
            self._events.add_sample(line)
        self._events.flush()

    def append(self, record: StepRecord) -> None:
        """A step is done."""
        line = record.line()
        self._metrics.append(line)
        self._events.add(line)
        self._events.flush()

    def append_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """What the model wrote at an evaluation: `step`, `sample` (its number), `prompt`, `text` and more."""
        for sample in samples:
            self._samples.append(sample)
            self._events.add_sample(sample)

    def publish(self) -> None:
        """Bring the stored files up to date; local files are already."""
        self._metrics.publish()
        self._samples.publish()
        self._events.publish()


class EventFiles:
    """TensorBoard's folder: local and written as it happens; on an object store put there at checkpoints."""

    def __init__(self, output: str, fence: Fence) -> None:
        self._filesystem, root = url_to_fs(output)
        self._place = f"{root.rstrip('/')}/{EVENTS}"
        self._local = "file" in self._filesystem.protocol
        self._fence = fence
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._folder = self._place
        self._writer: SummaryWriter | None = None

    def restart(self) -> None:
        """Remove what an earlier run wrote and begin anew."""
        self._fence.check()
        if self._filesystem.exists(self._place):
            self._filesystem.rm(self._place, recursive=True)
        if not self._local:
            self._scratch = tempfile.TemporaryDirectory(prefix="blockcast-")
            self._folder = self._scratch.name
        self._writer = SummaryWriter(self._folder, max_queue=1)

    def add(self, line: Mapping[str, Any]) -> None:
        """The figures of a line of metrics.jsonl."""
        assert self._writer is not None, "restart() comes first"
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"], line.get("time"))

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """A line of samples.jsonl, as text."""
        assert self._writer is not None, "restart() comes first"
        text = "\n\n".join(f"**{name}**\n\n{sample[name]}" for name in ("prompt", "text", "reference"))
        self._writer.add_text(f"sample/{sample['sample']}", text, sample["step"], sample.get("time"))

    def flush(self) -> None:
        """What was added can be read by others."""
        assert self._writer is not None, "restart() comes first"
        self._writer.flush()

    def publish(self) -> None:
        """Put the folder where it belongs, where that is not a local filesystem."""
        if self._local:
            return
        self._fence.check()
        self.flush()
        self._filesystem.makedirs(self._place, exist_ok=True)
        for path in Path(self._folder).iterdir():
            self._filesystem.put_file(str(path), f"{self._place}/{path.name}")


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as TensorBoard's scalars: nested figures by name, absent ones left out."""
    values = {name: line[name] for name in SCALARS if line.get(name) is not None}
    by_level = line.get("loss_by_noise") or ()
    values |= {f"loss_by_noise/{level_name(i)}": value for i, value in enumerate(by_level) if value is not None}
    return values | {f"time_share/{name}": share for name, share in line.get("time_shares", {}).items()}
