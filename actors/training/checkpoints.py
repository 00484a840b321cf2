"""Checkpoints that are there or are not: written aside, checked, and only then given their name.

    checkpoints/step_40/    what DeepSpeed wrote for every rank, each rank's note of its files' checksums, and
                            COMMIT.json: the step, the number of workers, the run's identity, every file with its size

On a local (or shared) filesystem all ranks write into `.step_40.partial`, rank 0 adds COMMIT.json and renames. On an
object store each rank uploads its files below the final name, in a thread while training goes on, and COMMIT.json goes
last, when every rank has said that its upload is done. What has no COMMIT.json is no checkpoint and is cleared away.
What has one and lacks a file that it lists, or holds it with another size or content, was damaged afterwards: a run
goes on from the checkpoint before, and says so; where there is none it does not begin anew by itself.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from actors.training.ranks import Ranks
from actors.training.storage import PATIENT, Patience, check_space
from actors.training.uploads import Upload
from model.checksums import differing, note_checksums, read_checksums
from model.errors import JobError, UserError

FOLDER = "checkpoints"
COMMIT = "COMMIT.json"
CHECKSUMS = "checksums"

Write = Callable[[str], Iterable[str]]


@dataclass(frozen=True)
class Identity:
    """What a run computes: its hash, and the keys and inputs it was made from, by name."""

    hash: str
    values: dict[str, Any] = field(default_factory=dict)

    def change(self, other: Identity) -> str | None:
        """How `other` differs, for a sentence: the first key with both values; None where they are the same run."""
        if self.hash == other.hash:
            return None
        for name in [*self.values, *other.values]:
            before, now = self.values.get(name), other.values.get(name)
            if before != now:
                return f"was begun with {name} {before!r}, this run has {now!r}"
        return "belongs to another configuration or other data"


@dataclass(frozen=True)
class Commit:
    """The commit marker. files: size in bytes by name, relative to the checkpoint; values: as in Identity."""

    step: int
    workers: int
    identity: str
    files: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending:
    """A checkpoint whose files are on their way."""

    step: int
    identity: Identity
    upload: Upload


class Damaged(JobError):
    """A checkpoint that was whole when it was committed and is no more. place: its folder; fault: which file, and what
    is wrong with it."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place} is damaged: {fault}.")
        self.place = place


class CheckpointStore:
    """The checkpoints of one output. guard: called before publishing; raises when the run has lost its output."""

    def __init__(
        self, output: str, *, keep: int, guard: Callable[[], None] = lambda: None, patient: Patience = PATIENT
    ) -> None:
        self._filesystem, root = url_to_fs(output)
        self.local = "file" in self._filesystem.protocol
        self.root = f"{root.rstrip('/')}/{FOLDER}"
        self._keep, self._guard, self.patient = keep, guard, patient
        self._pending: Pending | None = None

    def place(self, step: int) -> str:
        """Where the checkpoint of a step lies, on the store's filesystem."""
        return f"{self.root}/step_{step}"

    def committed(self) -> list[Commit]:
        """Every whole checkpoint, oldest first."""
        commits = self.patient(lambda: [self._commit(name) for name in self._names("step_")], f"reading {self.root}")
        return sorted((c for c in commits if c is not None), key=lambda c: c.step)

    def damaged(self) -> list[Damaged]:
        """The checkpoints that were committed and lack something now, in no order."""
        found = self.patient(lambda: [self._damage(name) for name in self._names("step_")], f"reading {self.root}")
        return [one for one in found if one is not None]

    def newest(self, identity: Identity) -> Commit | None:
        """The checkpoint to go on from. Raises UserError, naming the first difference, where it is another run's;
        JobError where there are checkpoints and all are damaged."""
        commits = self.committed()
        if not commits:
            for damage in self.damaged():
                raise self.hopeless(damage)
            return None
        newest = commits[-1]
        change = Identity(newest.identity, newest.values).change(identity)
        if change is not None:
            raise UserError(f"{self.place(newest.step)} {change}: set it back, or give another --output.")
        return newest

    def hopeless(self, damage: Damaged) -> JobError:
        """What is said where there is no whole checkpoint beside a damaged one."""
        return JobError(f"{damage} There is no other to go on from: restore it, or remove {self.root} to begin anew.")

    def discard(self, step: int) -> None:
        """Remove a checkpoint."""
        self.patient(partial(self._remove, self.place(step)), f"removing {self.place(step)}")

    @contextlib.contextmanager
    def opened(self, commit: Commit, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
        """A local folder with the checkpoint's files; from an object store only the `wanted` ones."""
        if self.local:
            yield self.place(commit.step)
            return
        with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
            for name in filter(wanted, commit.files):
                self._fetch(f"{self.place(commit.step)}/{name}", Path(scratch, name))
            yield scratch

    def _fetch(self, source: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.patient(lambda: self._filesystem.get_file(source, str(target)), f"reading {source}")

    def check(self, folder: str, commit: Commit, wanted: Callable[[str], bool], ranks: Ranks) -> None:
        """Compare the `wanted` files, in an opened folder, with what was noted when they were written.

        Every rank calls it, with the files that it is about to read. Raises Damaged, on all ranks, where any of them
        has one that differs.
        """
        listed = sorted(commit.files)
        mine = set(differing(noted(folder), Path(folder), filter(wanted, listed)))
        found = ranks.total([int(name in mine) for name in listed])
        bad = [name for name, count in zip(listed, found, strict=True) if count]
        if bad:
            raise Damaged(self.place(commit.step), f"{bad[0]} is not what was written (its checksum is another)")

    def save(self, step: int, identity: Identity, ranks: Ranks, write: Write, need: int) -> None:
        """Begin a checkpoint; every rank calls it. On a local filesystem it is committed when this returns; on an
        object store settle() commits it.

        write: puts this rank's files into the local folder it is given, and returns their names in it. need: bytes of
        all ranks' files, about. Raises JobError when they do not fit, leaving nothing.
        """
        self.settle(ranks, wait=True)
        if ranks.first:
            self.clear_partial()
        ranks.barrier()
        if self.local:
            self._save_here(step, identity, ranks, write, need)
        else:
            self._begin_upload(step, identity, ranks, write, need // ranks.world)

    def settle(self, ranks: Ranks, *, wait: bool = False) -> None:
        """Commit the checkpoint whose upload has ended on all ranks; every rank calls it. wait: until it has."""
        pending = self._pending
        if pending is None:
            return
        if not wait and ranks.total([int(pending.upload.done.is_set())])[0] < ranks.world:
            return
        self._pending = None
        pending.upload.finish()
        ranks.barrier()
        if ranks.first:
            self._publish(pending.step, pending.identity, ranks.world)
        ranks.barrier()

    def _save_here(self, step: int, identity: Identity, ranks: Ranks, write: Write, need: int) -> None:
        Path(self.root).mkdir(parents=True, exist_ok=True)
        check_space(self.root, need)
        folder = self._partial(step)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._write(write, folder, ranks.rank)
            ranks.barrier()
            if ranks.first:
                self._publish(step, identity, ranks.world)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        ranks.barrier()

    def _begin_upload(self, step: int, identity: Identity, ranks: Ranks, write: Write, need: int) -> None:
        scratch = tempfile.TemporaryDirectory(prefix="blockcast-", ignore_cleanup_errors=True)
        try:
            check_space(scratch.name, need)
            self._write(write, scratch.name, ranks.rank)
        except Exception:
            scratch.cleanup()
            raise
        upload = Upload(scratch, self._filesystem, self.place(step), self.patient)
        upload.start()
        self._pending = Pending(step, identity, upload)

    def _write(self, write: Write, folder: str, rank: int) -> None:
        """This rank's files and the note of their checksums."""
        names = write(folder)
        note = Path(folder, CHECKSUMS, f"rank_{rank}.json")
        note.parent.mkdir(exist_ok=True)
        self.patient(partial(note_checksums, note, Path(folder), names), f"writing {note}")

    def clear_partial(self) -> None:
        """Remove what is no whole checkpoint: what an interrupted run left behind, and what was damaged."""
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
            commit = self._marker(place)
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None
        return commit if self._fault(place, commit) is None else None

    def _damage(self, place: str) -> Damaged | None:
        """What is wrong with a folder that has a marker."""
        try:
            fault = self._fault(place, self._marker(place))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError):
            fault = f"{COMMIT} cannot be read"
        return None if fault is None else Damaged(place, fault)

    def _marker(self, place: str) -> Commit:
        """Raises FileNotFoundError, or ValueError or TypeError where it is no marker."""
        content = json.loads(self._filesystem.cat_file(f"{place}/{COMMIT}"))
        return Commit(**{**content, "files": dict(content["files"])})

    def _fault(self, place: str, commit: Commit) -> str | None:
        """The first file that is not as listed."""
        sizes = self._sizes(place)
        for name, size in sorted(commit.files.items()):
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != size:
                return f"{name} has {sizes[name]:,} of {size:,} bytes"
        return None

    def _sizes(self, place: str) -> dict[str, int]:
        found = self._filesystem.find(place, detail=True)
        return {name[len(place) + 1 :]: int(info["size"]) for name, info in found.items() if not name.endswith(COMMIT)}

    def _partial(self, step: int) -> str:
        return f"{self.root}/.step_{step}.partial"

    def _publish(self, step: int, identity: Identity, workers: int) -> None:
        """COMMIT.json, the name, and then the oldest beyond `keep` go."""
        written = self._partial(step) if self.local else self.place(step)
        commit = Commit(step, workers, identity.hash, self._sizes(written), identity.values)
        content = json.dumps(asdict(commit), indent=1).encode()
        self._guard()
        self.patient(
            lambda: self._filesystem.pipe_file(f"{written}/{COMMIT}", content), f"committing {self.place(step)}"
        )
        if self.local:
            Path(written).rename(self.place(step))
        for old in self.committed()[: -self._keep]:
            self.patient(partial(self._remove, self.place(old.step)), f"removing {self.place(old.step)}")

    def _remove(self, place: str) -> None:
        """The marker first: what is half removed is no checkpoint."""
        if self._filesystem.exists(f"{place}/{COMMIT}"):
            self._filesystem.rm_file(f"{place}/{COMMIT}")
        self._filesystem.rm(place, recursive=True)


def noted(folder: str | Path) -> dict[str, str]:
    """The checksums that all ranks noted, by the names of the files. Of a note that cannot be read nothing is known."""
    found: dict[str, str] = {}
    for note in Path(folder, CHECKSUMS).glob("*.json"):
        with contextlib.suppress(ValueError):
            found |= read_checksums(note)
    return found
