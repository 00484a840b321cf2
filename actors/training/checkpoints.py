"""Checkpoints that are there or are not: written aside, checked, and only then given their name.

    checkpoints/step_40/    what DeepSpeed wrote for every rank, and COMMIT.json: the step, the number of workers, the
                            run's identity, every file with its size

On a local (or shared) filesystem all ranks write into `.step_40.partial`, rank 0 adds COMMIT.json and renames. On an
object store each rank uploads its files below the final name and COMMIT.json goes last. What has no COMMIT.json, or
lacks a file that it lists, is no checkpoint and is cleared away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fsspec.core import url_to_fs

from actors.training.ranks import Ranks
from model.errors import JobError, UserError

FOLDER = "checkpoints"
COMMIT = "COMMIT.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Commit:
    """The commit marker. files: size in bytes by name, relative to the checkpoint."""

    step: int
    workers: int
    identity: str
    files: dict[str, int]


class CheckpointStore:
    """The checkpoints of one output. guard: called before publishing; raises when the run has lost its output."""

    def __init__(self, output: str, *, keep: int, guard: Callable[[], None] = lambda: None) -> None:
        self._filesystem, root = url_to_fs(output)
        self.local = "file" in self._filesystem.protocol
        self.root = f"{root.rstrip('/')}/{FOLDER}"
        self._keep, self._guard = keep, guard

    def place(self, step: int) -> str:
        """Where the checkpoint of a step lies, on the store's filesystem."""
        return f"{self.root}/step_{step}"

    def committed(self) -> list[Commit]:
        """Every whole checkpoint, oldest first."""
        commits = [self._commit(name) for name in self._names("step_")]
        return sorted((c for c in commits if c is not None), key=lambda c: c.step)

    def newest(self, *, identity: str, workers: int) -> Commit | None:
        """The checkpoint to go on from. Raises UserError where it is another run's or of another number of workers."""
        commits = self.committed()
        if not commits:
            return None
        newest = commits[-1]
        where = self.place(newest.step)
        if newest.identity != identity:
            raise UserError(f"{where} belongs to another configuration or other data: give another --output.")
        if newest.workers != workers:
            raise UserError(
                f"{where} was written by {newest.workers} workers and this run has {workers}: "
                f"give --train.workers {newest.workers}, or another --output to start afresh."
            )
        return newest

    @contextlib.contextmanager
    def opened(self, commit: Commit) -> Iterator[str]:
        """A local folder with the checkpoint's files."""
        if self.local:
            yield self.place(commit.step)
            return
        with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
            for name in commit.files:
                target = Path(scratch, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._filesystem.get_file(f"{self.place(commit.step)}/{name}", str(target))
            yield scratch

    def save(self, step: int, identity: str, ranks: Ranks, write: Callable[[str], None], need: int) -> None:
        """Commit a checkpoint; every rank calls it.

        write: puts this rank's files into the local folder it is given. need: bytes of all ranks' files, about. Raises
        JobError when they do not fit, leaving nothing.
        """
        self._check_space(need)
        if ranks.first:
            self.clear_partial()
        ranks.barrier()
        with self._translated(step):
            with self._staging(step) as folder:
                write(folder)
                self._upload(Path(folder), step)
            ranks.barrier()
            if ranks.first:
                self._publish(step, identity, ranks.world)
        ranks.barrier()

    def clear_partial(self) -> None:
        """Remove what an interrupted run left behind: folders that are not whole checkpoints."""
        whole = {self.place(commit.step) for commit in self.committed()}
        for name in [*self._names(".step_"), *self._names("step_")]:
            if name not in whole:
                self._filesystem.rm(name, recursive=True)

    def _names(self, prefix: str) -> list[str]:
        try:
            found = [str(name).rstrip("/") for name in self._filesystem.ls(self.root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.rpartition("/")[2].startswith(prefix))

    def _commit(self, place: str) -> Commit | None:
        """The marker of a folder, None unless everything that it lists is there."""
        try:
            commit = Commit(**json.loads(self._filesystem.cat_file(f"{place}/{COMMIT}")))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None
        sizes = self._sizes(place)
        return commit if all(sizes.get(name) == size for name, size in commit.files.items()) else None

    def _sizes(self, place: str) -> dict[str, int]:
        found = self._filesystem.find(place, detail=True)
        return {name[len(place) + 1 :]: int(info["size"]) for name, info in found.items() if not name.endswith(COMMIT)}

    def _partial(self, step: int) -> str:
        return f"{self.root}/.step_{step}.partial"

    @contextlib.contextmanager
    def _staging(self, step: int) -> Iterator[str]:
        if self.local:
            Path(self._partial(step)).mkdir(parents=True, exist_ok=True)
            yield self._partial(step)
            return
        with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
            yield scratch

    def _upload(self, folder: Path, step: int) -> None:
        if self.local:
            return
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            self._filesystem.put_file(str(path), f"{self.place(step)}/{path.relative_to(folder).as_posix()}")

    def _publish(self, step: int, identity: str, workers: int) -> None:
        """COMMIT.json, the name, and then the oldest beyond `keep` go."""
        written = self._partial(step) if self.local else self.place(step)
        commit = Commit(step, workers, identity, self._sizes(written))
        self._guard()
        self._filesystem.pipe_file(f"{written}/{COMMIT}", json.dumps(asdict(commit), indent=1).encode())
        if self.local:
            Path(written).rename(self.place(step))
        for old in self.committed()[: -self._keep]:
            self._filesystem.rm_file(f"{self.place(old.step)}/{COMMIT}")
            self._filesystem.rm(self.place(old.step), recursive=True)

    def _check_space(self, need: int) -> None:
        if not self.local:
            return
        Path(self.root).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < need:
            raise JobError(
                f"No space for a checkpoint in {self.root}: it takes {_size(need)} and {_size(free)} are free; "
                "free some and run the same command again to go on."
            )

    @contextlib.contextmanager
    def _translated(self, step: int) -> Iterator[None]:
        """A disk that fills up in the middle, told in one sentence; torch tells of it in a RuntimeError of its own."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._remove_partial(step)
            if _disk_is_full(error):
                raise JobError(
                    f"The checkpoint of step {step} does not fit in {self.root}: "
                    "free some space and run the same command again to go on."
                ) from error
            raise

    def _remove_partial(self, step: int) -> None:
        if self.local:
            shutil.rmtree(self._partial(step), ignore_errors=True)


def _disk_is_full(error: Exception) -> bool:
    return (isinstance(error, OSError) and error.errno in DISK_FULL) or "PytorchStreamWriter" in str(error)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
