"""The curves on disk: lines, event files as TensorBoard reads them, samples; all end where the checkpoint does."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actors.training.clock import OTHER, PHASES
from actors.training.noise import LEVELS
from actors.training.run_files import METRICS, Fence, StepRecord, read_metrics
from actors.training.run_log import EVENTS, SAMPLES, RunLog
from model.errors import JobError


@pytest.fixture(params=["local", "object store"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out"


def started(output: str, step: int = 0) -> RunLog:
    filesystem, root = fsspec.core.url_to_fs(output)
    filesystem.makedirs(root, exist_ok=True)
    fence = Fence(output, "mine")
    fence.raise_up()
    log = RunLog(output, fence)
    log.cut(step)
    return log


def write(log: RunLog, steps: range) -> None:
    """A line a step, and one sample at every even step."""
    for step in steps:
        record = StepRecord(
            step, 1.0 / step, 10, "00", 1e-3, 0.5, 100.0,
            seconds=0.5,
            time=1000.0 + step,
            loss_by_noise=[float(step), None, 3.0, 4.0, 5.0],
            ar_loss=7.0 / step,
            time_shares={**dict.fromkeys(PHASES, 0.1), OTHER: 0.5},
            held_out_loss=2.0 / step if step % 2 == 0 else None,
        )  # fmt: skip
        if step % 2 == 0:
            log.append_samples([sample(step)])
        log.append(record)


def sample(step: int) -> dict[str, Any]:
    return {"step": step, "sample": 0, "prompt": "Count", "text": f"text of {step}", "reference": "1 2"}


def events(output: str, scratch: Path) -> EventAccumulator:
    """What TensorBoard finds in the folder."""
    filesystem, root = fsspec.core.url_to_fs(output)
    for name in filesystem.ls(f"{root}/{EVENTS}", detail=False):
        scratch.mkdir(exist_ok=True)
        filesystem.get_file(name, str(scratch / name.rpartition("/")[2]))
    found = EventAccumulator(str(scratch))
    found.Reload()
    return found


def test_every_figure_of_a_line_is_a_scalar_of_tensorboard(output: str, tmp_path: Path) -> None:
    log = started(output)
    write(log, range(1, 5))
    log.publish()
    found = events(output, tmp_path / "read")
    names = {"loss", "ar_loss", "held_out_loss", "grad_norm", "learning_rate", "tokens_per_second"}
    names |= {f"time_share/{phase}" for phase in (*PHASES, OTHER)}
    levels = {f"loss_by_noise/{level}" for level in ("0-0.2", "0.4-0.6", "0.6-0.8", "0.8-1")}
    assert len(levels) == LEVELS - 1  # the level that was not met has no curve
    assert set(found.Tags()["scalars"]) == names | levels
    losses = found.Scalars("loss")
    assert [(one.step, one.wall_time) for one in losses] == [(n, 1000.0 + n) for n in range(1, 5)]
    assert [one.value for one in losses] == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 4])
    assert [one.step for one in found.Scalars("held_out_loss")] == [2, 4]


def test_all_curves_are_cut_back_to_the_checkpoint_and_go_on(output: str, tmp_path: Path) -> None:
    log = started(output)
    write(log, range(1, 6))
    log.publish()
    filesystem, root = fsspec.core.url_to_fs(output)
    for name in filesystem.ls(f"{root}/{EVENTS}", detail=False):
        filesystem.mv(name, f"{name}.earlier")  # event files are named by the second: the next one is another
    again = started(output, step=3)
    write(again, range(4, 7))
    again.publish()
    assert [one["step"] for one in read_metrics(filesystem, f"{root}/{METRICS}")] == [1, 2, 3, 4, 5, 6]
    assert [one["step"] for one in read_metrics(filesystem, f"{root}/{SAMPLES}")] == [2, 4, 6]
    found = events(output, tmp_path / "read")
    assert [one.step for one in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in found.Scalars("time_share/forward")] == [1, 2, 3, 4, 5, 6]
    texts = found.Tensors("sample/0/text_summary")
    assert [one.step for one in texts] == [2, 4, 6]
    assert b"text of 6" in texts[-1].tensor_proto.string_val[0]


def test_the_lines_say_nothing_of_what_was_not_measured(tmp_path: Path) -> None:
    log = started(str(tmp_path))
    log.append(StepRecord(1, 1.0, 10, "00", 1e-3, 0.5, 100.0))
    names = {"step", "loss", "supervised_tokens", "batch_hash", "learning_rate", "grad_norm", "tokens_per_second"}
    assert set(read_metrics(fsspec.filesystem("file"), str(tmp_path / METRICS))[0]) == names
    assert not (tmp_path / SAMPLES).exists()


def test_an_output_that_was_lost_gets_no_curves(tmp_path: Path) -> None:
    log = started(str(tmp_path))
    Fence(str(tmp_path), "another").raise_up()
    for attempt in (lambda: write(log, range(1, 2)), lambda: log.append_samples([sample(1)]), lambda: log.cut(0)):
        with pytest.raises(JobError, match="taken over"):
            attempt()
