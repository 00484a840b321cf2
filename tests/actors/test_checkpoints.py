"""Checkpoints are there or are not; metrics end where the checkpoint does; an output lost is not written to."""

from __future__ import annotations

import errno
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from actors.training.checkpoints import COMMIT, CheckpointStore
from actors.training.ranks import Ranks, halves, whole
from actors.training.run_files import METRICS, Fence, LinesLog, StepRecord, read_metrics
from model.errors import JobError, UserError
from model.layout import combine_hashes

ALONE = Ranks(rank=0, world=1, local_rank=0, group=None)


def writer(size: int = 100) -> Callable[[str], None]:
    """Writes two files as a rank's shards."""

    def write(folder: str) -> None:
        Path(folder, "zero").mkdir()
        Path(folder, "zero", "shard_0.pt").write_bytes(b"x" * size)
        Path(folder, "other").write_bytes(b"y")

    return write


def save(store: CheckpointStore, step: int, *, write: Callable[[str], None] | None = None, need: int = 0) -> None:
    store.save(step, "run", ALONE, write or writer(), need)


@pytest.fixture(params=["local", "object store"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out"


def test_a_committed_checkpoint_is_found_whole(output: str) -> None:
    store = CheckpointStore(output, keep=3)
    save(store, 5)
    commit = store.newest(identity="run", workers=1)
    assert commit is not None
    assert (commit.step, commit.files) == (5, {"zero/shard_0.pt": 100, "other": 1})
    with store.opened(commit) as folder:
        assert Path(folder, "zero", "shard_0.pt").read_bytes() == b"x" * 100


def test_only_the_newest_are_kept(output: str) -> None:
    store = CheckpointStore(output, keep=2)
    for step in (5, 10, 100):
        save(store, step)
    assert [commit.step for commit in store.committed()] == [10, 100]
    filesystem, root = fsspec.core.url_to_fs(output)
    assert sorted(name.rpartition("/")[2] for name in filesystem.ls(f"{root}/checkpoints", detail=False)) == [
        "step_10",
        "step_100",
    ]


def test_what_lacks_its_marker_or_a_file_is_no_checkpoint_and_is_cleared(output: str) -> None:
    store = CheckpointStore(output, keep=5)
    for step in (1, 2, 3):
        save(store, step)
    filesystem, root = fsspec.core.url_to_fs(output)
    filesystem.rm_file(f"{root}/checkpoints/step_3/{COMMIT}")
    filesystem.pipe_file(f"{root}/checkpoints/step_2/zero/shard_0.pt", b"short")
    assert [commit.step for commit in store.committed()] == [1]
    store.clear_partial()
    left = [name.rpartition("/")[2] for name in filesystem.ls(f"{root}/checkpoints", detail=False)]
    assert left == ["step_1"]


def test_a_run_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Killed(BaseException):
        """What no handler sees, like SIGKILL."""

    def die(folder: str) -> None:
        writer()(folder)
        raise Killed

    store = CheckpointStore(str(tmp_path), keep=2)
    save(store, 5)
    with pytest.raises(Killed):
        save(store, 10, write=die)
    assert [commit.step for commit in store.committed()] == [5]
    save(store, 10)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_10", "step_5"]


def test_a_checkpoint_that_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    with pytest.raises(JobError, match=r"No space for a checkpoint in .*: it takes 1000000000\.0 GB and .* are free"):
        save(store, 5, need=10**18)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file data/0")],
)
def test_a_disk_that_fills_up_in_the_middle_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, error: Exception
) -> None:
    def fill(folder: str) -> None:
        writer()(folder)
        raise error

    store = CheckpointStore(str(tmp_path), keep=2)
    with pytest.raises(JobError, match="The checkpoint of step 5 does not fit"):
        save(store, 5, write=fill)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_another_run_or_another_number_of_workers_is_refused_by_name(output: str) -> None:
    store = CheckpointStore(output, keep=2)
    save(store, 5)
    with pytest.raises(UserError, match="belongs to another configuration"):
        store.newest(identity="other", workers=1)
    with pytest.raises(UserError, match=r"written by 1 workers and this run has 4: give --train\.workers 1"):
        store.newest(identity="run", workers=4)


def test_a_run_that_lost_its_output_commits_nothing(output: str) -> None:
    fence = Fence(output, "mine")
    filesystem, root = fsspec.core.url_to_fs(output)
    filesystem.makedirs(root, exist_ok=True)
    fence.raise_up()
    store = CheckpointStore(output, keep=2, guard=fence.check)
    save(store, 5)
    Fence(output, "another").raise_up()
    with pytest.raises(JobError, match="taken over by another run"):
        save(store, 10)
    assert [commit.step for commit in store.committed()] == [5]


def record(step: int) -> dict[str, Any]:
    return StepRecord(step, 1.0 / step, 10, "00", 1e-3, 0.5, 100.0).line()


def test_metrics_are_cut_back_to_the_checkpoint_and_go_on_with_one_line_a_step(output: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(output)
    filesystem.makedirs(root, exist_ok=True)
    fence = Fence(output, "mine")
    fence.raise_up()
    log = LinesLog(output, METRICS, fence)
    log.cut(0)
    for step in range(1, 6):
        log.append(record(step))
    log.publish()
    filesystem.pipe_file(f"{root}/{METRICS}", filesystem.cat_file(f"{root}/{METRICS}") + b'{"step": 6, "lo')
    again = LinesLog(output, METRICS, fence)
    again.cut(3)
    again.append(record(4))
    again.publish()
    assert [one["step"] for one in read_metrics(filesystem, f"{root}/{METRICS}")] == [1, 2, 3, 4]


def test_a_local_metrics_line_can_be_read_at_once(tmp_path: Path) -> None:
    fence = Fence(str(tmp_path), "mine")
    fence.raise_up()
    LinesLog(str(tmp_path), METRICS, fence).append(record(1))
    assert json.loads((tmp_path / METRICS).read_text())["loss"] == 1.0
    fence.take_down()
    with pytest.raises(JobError, match="taken over"):
        LinesLog(str(tmp_path), METRICS, fence).append(record(2))


def test_hashes_of_parts_add_up_to_the_hash_of_the_whole_across_ranks() -> None:
    hashes = ["ffffffffffffffff", "8000000000000001", "123456789abcdef0"]
    high, low = (sum(half) for half in zip(*map(halves, hashes), strict=True))
    assert whole(high, low) == combine_hashes(hashes)
