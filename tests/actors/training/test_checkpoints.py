"""Checkpoints are there or are not; metrics end where the checkpoint does; an output lost is not written to."""

from __future__ import annotations

import errno
import json
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from actors.training.checkpoints import COMMIT, CheckpointStore, Damaged, Identity, Write
from actors.training.ranks import Ranks, halves, whole
from actors.training.run_files import METRICS, Fence, LinesLog, StepRecord, read_metrics
from actors.training.storage import Patience
from model.errors import JobError, UserError
from model.layout import combine_hashes

ALONE = Ranks(rank=0, world=1, local_rank=0, group=None)
RUN = Identity("run", {"train.steps": 10, "train.learning_rate": 0.1})
HASTY = Patience(tries=3, pause_s=0.001)


def writer(size: int = 100) -> Write:
    """Writes two files as a rank's shards."""

    def write(folder: str) -> list[str]:
        Path(folder, "zero").mkdir()
        Path(folder, "zero", "shard_0.pt").write_bytes(b"x" * size)
        Path(folder, "other").write_bytes(b"y")
        return ["zero/shard_0.pt", "other"]

    return write


def save(store: CheckpointStore, step: int, *, write: Write | None = None, need: int = 0) -> None:
    store.save(step, RUN, ALONE, write or writer(), need)
    store.settle(ALONE, wait=True)


@pytest.fixture(params=["local", "object store"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out"


def test_a_committed_checkpoint_is_found_whole(output: str) -> None:
    store = CheckpointStore(output, keep=3)
    save(store, 5)
    commit = store.newest(RUN)
    assert commit is not None
    assert commit.step == 5
    assert {**commit.files, "checksums/rank_0.json": 0} == {
        "zero/shard_0.pt": 100,
        "other": 1,
        "checksums/rank_0.json": 0,
    }
    with store.opened(commit) as folder:
        assert Path(folder, "zero", "shard_0.pt").read_bytes() == b"x" * 100
        store.check(folder, commit, lambda name: True, ALONE)


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
    filesystem.pipe_file(
        f"{root}/checkpoints/step_2/{COMMIT}", b'{"step": 2, "workers": 1, "identity": "", "files": 3}'
    )
    assert [commit.step for commit in store.committed()] == [1]
    store.clear_partial()
    left = [name.rpartition("/")[2] for name in filesystem.ls(f"{root}/checkpoints", detail=False)]
    assert left == ["step_1"]


def put(output: str, name: str, content: bytes | None) -> None:
    """Change a file of the checkpoints; None: remove it."""
    filesystem, root = fsspec.core.url_to_fs(output)
    if content is None:
        filesystem.rm_file(f"{root}/checkpoints/{name}")
    else:
        filesystem.pipe_file(f"{root}/checkpoints/{name}", content)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("zero/shard_0.pt", b"short", "zero/shard_0.pt has 5 of 100 bytes"),
        ("zero/shard_0.pt", b"", "zero/shard_0.pt has 0 of 100 bytes"),
        ("other", None, "other is missing"),
        (COMMIT, b"{", "COMMIT.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_left_out_while_there_is_another(
    output: str, name: str, content: bytes | None, fault: str
) -> None:
    store = CheckpointStore(output, keep=5)
    for step in (1, 2):
        save(store, step)
    put(output, f"step_2/{name}", content)
    assert [str(damage) for damage in store.damaged()] == [f"{store.place(2)} is damaged: {fault}."]
    found = store.newest(RUN)
    assert found is not None and found.step == 1
    store.clear_partial()
    assert store.damaged() == [] and [commit.step for commit in store.committed()] == [1]
    put(output, f"step_1/{name}", content)
    with pytest.raises(
        JobError, match=rf"step_1 is damaged: {fault}\. There is no other to go on from: restore it, or"
    ):
        store.newest(RUN)


@pytest.mark.parametrize("name", ["zero/shard_0.pt", "other"])
def test_a_changed_byte_is_found_where_the_file_is_read(output: str, name: str) -> None:
    store = CheckpointStore(output, keep=5)
    save(store, 1)
    put(output, f"step_1/{name}", b"x" * 99 + b"y" if name != "other" else b"z")
    assert store.damaged() == [], "it has its size"
    commit = store.newest(RUN)
    assert commit is not None
    with store.opened(commit) as folder:
        store.check(folder, commit, lambda one: one != name, ALONE)
        with pytest.raises(Damaged, match=rf"step_1 is damaged: {name} is not what was written"):
            store.check(folder, commit, lambda one: True, ALONE)


def test_a_run_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Killed(BaseException):
        """What no handler sees, like SIGKILL."""

    def die(folder: str) -> list[str]:
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


def test_a_changed_key_is_refused_by_its_name_and_another_number_of_workers_is_not(output: str) -> None:
    store = CheckpointStore(output, keep=2)
    save(store, 5)
    with pytest.raises(UserError, match=r"step_5 was begun with train\.learning_rate 0\.1, this run has 0\.2: set it"):
        store.newest(Identity("other", {**RUN.values, "train.learning_rate": 0.2}))
    with pytest.raises(UserError, match="was begun with rows/part-0 None, this run has 'sha256:1'"):
        store.newest(Identity("other", {**RUN.values, "rows/part-0": "sha256:1"}))
    with pytest.raises(UserError, match="belongs to another configuration or other data"):
        store.newest(Identity("other", RUN.values))
    found = store.newest(RUN)
    assert found is not None and found.workers == 1


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


# Storage that fails ---------------------------------------------------------------------------------------------------


class Failing:
    """Raises its errors one after the other, one a call, and works when none is left."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_storage_is_tried_again_and_an_error_that_stays_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    twice = Failing(OSError(errno.EIO, "Input/output error"), TimeoutError("slow down"))
    assert HASTY(twice, "writing x") == "done"
    assert "adapt: writing x failed ([Errno 5] Input/output error); again in 0.001 s" in capsys.readouterr().err
    stays = Failing(*(OSError(errno.EIO, "Input/output error") for _ in range(9)))
    with pytest.raises(
        JobError, match=r"Writing x failed 3 times \(\[Errno 5\] Input/output error\): see to the storage"
    ):
        HASTY(stays, "writing x")
    assert stays.calls == 3


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file data/0")],
)
def test_a_disk_that_stays_full_is_named_and_one_that_is_freed_is_not_the_end(error: Exception) -> None:
    assert HASTY(Failing(error), "writing x") == "done"
    with pytest.raises(JobError, match=r"Writing x failed 3 times \(no space is left\): free some and run the same"):
        HASTY(Failing(*[error] * 9), "writing x")


def test_what_waiting_does_not_help_is_not_tried_again() -> None:
    denied, bug = Failing(PermissionError("Access Denied")), Failing(ValueError("a bug"))
    with pytest.raises(JobError, match=r"Writing x failed \(Access Denied\)"):
        HASTY(denied, "writing x")
    with pytest.raises(ValueError, match="a bug"):
        HASTY(bug, "writing x")
    assert (denied.calls, bug.calls) == (1, 1)


def test_a_save_that_fails_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fill(folder: str) -> list[str]:
        writer()(folder)
        raise JobError("no space")

    store = CheckpointStore(str(tmp_path), keep=2)
    with pytest.raises(JobError):
        save(store, 5, write=fill)
    assert list((tmp_path / "checkpoints").iterdir()) == []


class SlowStore(MemoryFileSystem):
    """An object store whose uploads wait for `gate`, after they have raised `errors`."""

    protocol = "slow"
    cachable = False
    gate = threading.Event()
    errors: list[Exception] = []  # noqa: RUF012

    def put_file(self, *arguments: Any, **named: Any) -> None:
        self.gate.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        super().put_file(*arguments, **named)


@pytest.fixture
def slow_output() -> str:
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.gate.clear()
    SlowStore.errors = []
    return f"slow://{uuid.uuid4().hex}/out"


def test_an_upload_goes_on_beside_the_training_and_the_marker_comes_last(slow_output: str) -> None:
    store = CheckpointStore(slow_output, keep=2, patient=HASTY)
    store.save(5, RUN, ALONE, writer(), 0)
    store.settle(ALONE)
    assert store.committed() == []
    SlowStore.gate.set()
    store.settle(ALONE, wait=True)
    assert [commit.step for commit in store.committed()] == [5]


def test_a_next_save_waits_for_the_upload_before_it(slow_output: str) -> None:
    store = CheckpointStore(slow_output, keep=2, patient=HASTY)
    store.save(5, RUN, ALONE, writer(), 0)
    SlowStore.gate.set()
    store.save(10, RUN, ALONE, writer(), 0)
    assert [commit.step for commit in store.committed()] == [5]
    store.settle(ALONE, wait=True)
    assert [commit.step for commit in store.committed()] == [5, 10]


def test_an_upload_that_keeps_failing_commits_nothing_and_one_that_recovers_does(slow_output: str) -> None:
    store = CheckpointStore(slow_output, keep=2, patient=HASTY)
    SlowStore.gate.set()
    SlowStore.errors = [ConnectionError("reset")] * 2
    save(store, 5)
    SlowStore.errors = [ConnectionError("reset")] * 9
    with pytest.raises(
        JobError, match=r"Uploading .*step_10/checksums/rank_0.json failed 3 times \(reset\): see to the storage"
    ):
        save(store, 10)
    assert [commit.step for commit in store.committed()] == [5]
    SlowStore.errors = []
    save(store, 15)
    filesystem, root = fsspec.core.url_to_fs(slow_output)
    names = sorted(name.rpartition("/")[2] for name in filesystem.ls(f"{root}/checkpoints", detail=False))
    assert names == ["step_15", "step_5"], "the files of step 10 are cleared away"


# Metrics and fence ----------------------------------------------------------------------------------------------------


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
