"""Real checkpoints whose files were damaged after they were committed: each ends, or goes on, with one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from actors.training.checkpoints import CheckpointStore, Commit, Damaged
from actors.training.consolidate import open_checkpoint
from actors.training.ranks import Ranks
from model.errors import UserError
from tests.training_runs import TrainingRun, adapt, arguments, read_metrics, timeless

pytestmark = pytest.mark.slow
ALONE = Ranks(rank=0, world=1, local_rank=0, group=None)
OPTIMIZER = "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODULE = "zero/zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.fixture
def output(uninterrupted: TrainingRun, tmp_path: Path) -> Path:
    """A run that was killed before it wrote its model: checkpoints of the steps 50 and 60, and the metrics."""
    output = tmp_path / "out"
    shutil.copytree(uninterrupted.output / "checkpoints", output / "checkpoints")
    shutil.copy(uninterrupted.output / "metrics.jsonl", output)
    return output


def step(output: Path, number: int) -> Path:
    return output / "checkpoints" / f"step_{number}"


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newest(output: Path) -> tuple[CheckpointStore, Commit]:
    store = CheckpointStore(str(output), keep=2)
    return store, store.committed()[-1]


def test_a_changed_bit_costs_the_steps_behind_the_checkpoint_before_and_nothing_else(
    output: Path,
    uninterrupted: TrainingRun,
    tiny_model: Path,
    training_rows: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is found by the worker, which reads the shard anyway; the run tells and goes on from step 50."""
    flip(step(output, 60) / OPTIMIZER)
    assert adapt(arguments(tiny_model, training_rows, output), output).code == 0
    errors = capsys.readouterr().err
    told = [line for line in errors.splitlines() if "is damaged" in line]
    assert told == [
        f"adapt: {step(output, 60)} is damaged: {OPTIMIZER} is not what was written (its checksum is another). "
        "The run goes on from the checkpoint before."
    ]
    assert "loading the checkpoint of step 50" in errors
    assert timeless(read_metrics(output)) == timeless(uninterrupted.metrics)
    models = [folder / "model" / "model.safetensors" for folder in (output, uninterrupted.output)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_where_every_checkpoint_is_damaged_the_job_ends_and_removes_nothing(
    output: Path, tiny_model: Path, training_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = step(output, 50) / OPTIMIZER
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2])
    (step(output, 60) / MODULE).unlink()
    assert adapt(arguments(tiny_model, training_rows, output), output).code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"adapt: {step(output, 50)} is damaged: {OPTIMIZER} has {size // 2:,} of {size:,} bytes.")
    assert last.endswith(f"restore it, or remove {output}/checkpoints to begin anew.")
    assert shard.exists() and step(output, 60).is_dir()


@pytest.mark.parametrize("name", [OPTIMIZER, MODULE, "model/config.json"])
def test_a_changed_bit_in_any_file_is_named_to_who_goes_on_and_to_who_exports(output: Path, name: str) -> None:
    flip(step(output, 60) / name)
    store, commit = newest(output)
    with store.opened(commit) as folder, pytest.raises(Damaged, match=f"step_60 is damaged: {name} is not what was"):
        store.check(folder, commit, lambda one: True, ALONE)
    with (
        open_checkpoint(str(step(output, 60))) as checkpoint,
        pytest.raises(UserError, match=rf"{name} is not what was written \(its checksum is another\): take another"),
    ):
        checkpoint.weights(torch.float32)


def test_shards_that_changed_places_are_named(output: Path) -> None:
    """Of the two steps: of one size, each whole in itself."""
    shards = [step(output, number) / OPTIMIZER for number in (50, 60)]
    contents = [shard.read_bytes() for shard in shards]
    assert len(contents[0]) == len(contents[1])
    for shard, content in zip(shards, reversed(contents), strict=True):
        shard.write_bytes(content)
    store, commit = newest(output)
    with store.opened(commit) as folder, pytest.raises(Damaged, match=f"{OPTIMIZER} is not what was written"):
        store.check(folder, commit, lambda one: True, ALONE)


def test_what_lacks_a_file_is_no_model_to_export(output: Path) -> None:
    (step(output, 60) / MODULE).unlink()
    with (
        pytest.raises(UserError, match=rf"step_60 is damaged: {MODULE} is missing\. Take another checkpoint\."),
        open_checkpoint(str(step(output, 60))),
    ):
        pass
