"""Where a job's results go: one writer at a time, begun and continued under one configuration, complete or absent.

    with OutputFolder(config.output, job="prepare", config=config, inputs=hashes) as output:
        if output.finished is not None:
            return output.finished["figures"]
        with output.stage("stats.json") as path:      # a temporary path; takes its name when the block ends well
            path.write_text(...)
        output.finish(figures)                        # writes the manifest, the last thing to appear

A local output is written in place. On any other fsspec filesystem `stage` hands out a local temporary path and uploads
it; a store without renames copies first and removes the source last, so `has` trusts a name once its source is gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsspec.core import url_to_fs
from pydantic import BaseModel

from model.errors import JobError, UserError
from pipelines.jobkit.identity import changed_keys, git_revision, hash_of, identity_of, package_versions
from pipelines.jobkit.lock import Lock, write_whole

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Output:
    """What folders and files have in common; use OutputFolder or OutputFile.

    target: path or fsspec URI. config: the job's resolved configuration. inputs: hashes of what the job reads, by name.
    """

    def __init__(self, target: str, *, job: str, config: BaseModel, inputs: Mapping[str, str] | None = None) -> None:
        self.target, self.job, self.config = target, job, config
        self.inputs = dict(inputs or {})
        self.filesystem, self._root = _open_target(target)
        self.local = "file" in self.filesystem.protocol
        self.finished: dict[str, Any] | None = None
        self.resumed = False
        self._begun = time.time()
        self._earlier_s = 0.0
        self._lock: Lock | None = None
        self._forgotten = False

    def _place(self, name: str) -> str:
        raise NotImplementedError

    @property
    def _folder(self) -> str:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._make_folder()
        lock = Lock(self.filesystem, self._place("lock"), self.target, local=self.local)
        lock.acquire()
        self._lock = lock
        try:
            self._begin()
        except BaseException:
            lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        try:
            if self.finished is None and error is None:
                raise RuntimeError(f"{self.job} left {self.target} without finish(): it would look unfinished for ever")
            if self.finished is None and not self._forgotten:
                self._keep_wall_time()
        finally:
            self._lock.release()

    def _keep_wall_time(self) -> None:
        """Best effort on the way out of a failure, which a full disk or a lost lock may have caused."""
        with contextlib.suppress(OSError, JobError):
            self.check()
            self._write_record()

    def _make_folder(self) -> None:
        try:
            self.filesystem.makedirs(self._folder, exist_ok=True)
            if self.local and not os.access(self._folder, os.W_OK):
                raise PermissionError
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"--output {self.target} is not a folder: name another place.") from None
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            why = (error.strerror or "permission denied").lower()
            raise UserError(f"--output {self.target} cannot be written: {why}.") from None

    def _begin(self) -> None:
        """Continue an earlier run of the same configuration and inputs, or start; refuse anything else."""
        manifest, record = self._read_json("manifest"), self._read_json("record")
        if not self._complete():
            manifest = None
        before = record or manifest
        if before is not None:
            self._refuse_other(before)
            self.resumed = True
            self._earlier_s = float(before.get("wall_time_s", 0.0))
        if manifest is not None and record is None:
            self.finished = manifest
            return
        self._write_record()

    def _complete(self) -> bool:
        """Whether what a manifest vouches for is still there."""
        return True

    def _traces(self) -> list[str]:
        """What a user removes to start afresh."""
        return [self.target]

    def _refuse_other(self, before: Mapping[str, Any]) -> None:
        advice = f"give another --output, or remove {' and '.join(self._traces())} to start afresh."
        if before.get("job") != self.job:
            raise UserError(f"{self.target} holds the output of {before.get('job')}, not of {self.job}: {advice}")
        changed = changed_keys(before.get("identity", {}), identity_of(self.config))
        if changed:
            key, old, new = changed[0]
            more = f" and {len(changed) - 1} more keys differ" if len(changed) > 1 else ""
            raise UserError(f"{self.target} was begun with {key} {old!r}, this run has {new!r}{more}: {advice}")
        for name, old_hash in before.get("inputs", {}).items():
            if self.inputs.get(name) != old_hash:
                raise UserError(f"{name} has changed since {self.target} was begun: {advice}")
        added = [name for name in self.inputs if name not in before.get("inputs", {})]
        if added:
            raise UserError(f"{self.target} was begun without the input {added[0]}: {advice}")

    def _record(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "config_hash": hash_of(identity_of(self.config)),
            "identity": identity_of(self.config),
            "inputs": self.inputs,
            "wall_time_s": self._earlier_s + time.time() - self._begun,
        }

    def _write_record(self) -> None:
        self._write_json("record", self._record())

    def finish(
        self,
        figures: Mapping[str, Any],
        *,
        seeds: Mapping[str, int] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Write the manifest: the output is complete. Returns it. seeds: beside the configuration's own seed; files:
        checksums of what was written, by name."""
        self.check()
        seed = dict(self.config).get("seed")
        manifest = {
            **self._record(),
            "config": self.config.model_dump(mode="json"),
            "git_revision": git_revision(),
            "packages": package_versions(),
            "seeds": {**({"seed": seed} if seed is not None else {}), **(seeds or {})},
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "figures": dict(figures),
            **({"files": dict(sorted(files.items()))} if files else {}),
        }
        self._write_json("manifest", manifest)
        self.filesystem.rm_file(self._place("record"))
        self.finished = manifest
        return manifest

    def forget(self) -> None:
        """For bad input: nothing that was begun is worth continuing, the next run may have any configuration."""
        self.filesystem.rm_file(self._place("record"))
        self._forgotten = True

    def check(self) -> None:
        """Raises JobError when another writer has taken this output over."""
        if self._lock is not None:
            self._lock.check()

    def _read_json(self, name: str) -> dict[str, Any] | None:
        place = self._place(name)
        try:
            content = json.loads(self.filesystem.cat_file(place))
        except FileNotFoundError:
            return None
        except ValueError:
            raise UserError(
                f"{place} is not valid JSON: it was not written by this job; name another --output."
            ) from None
        if not isinstance(content, dict):
            raise UserError(f"{place} is not a manifest: name another --output.")
        return content

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.filesystem, self._place(name), text, local=self.local)


def hidden(place: str, ending: str) -> str:
    """The hidden neighbour of a place: `a/b` and `partial` give `a/.b.partial`."""
    head, slash, tail = place.rpartition("/")
    return f"{head}{slash}.{tail}.{ending}"


def _open_target(target: str) -> tuple[Any, str]:
    try:
        filesystem, root = url_to_fs(target, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise UserError(f"--output {target} cannot be opened: {error}.") from None
    return filesystem, root


class OutputFolder(Output):
    """A folder of results with manifest.json in it, the last thing to appear."""

    NAMES = {"lock": ".lock", "record": ".begun.json", "manifest": "manifest.json"}  # noqa: RUF012 - a constant

    def _place(self, name: str) -> str:
        return f"{self._root}/{self.NAMES[name]}"

    @property
    def _folder(self) -> str:
        return self._root

    @property
    def path(self) -> Path:
        """The folder itself. Raises UserError where it is not on a local (or mounted) filesystem."""
        if not self.local:
            raise UserError(f"--output {self.target} must be a local path for {self.job}.")
        return Path(self._root)

    def place(self, name: str) -> str:
        """The path (on the output's filesystem) of a name in the folder."""
        return f"{self._root}/{name}"

    def uri(self, name: str = "") -> str:
        """The name as something any process on any node can open."""
        place = self.place(name) if name else self._root
        return place if self.local else str(self.filesystem.unstrip_protocol(place))

    def has(self, name: str) -> bool:
        """Whether the name is there, complete."""
        if not self.filesystem.exists(self.place(name)):
            return False
        return self.local or not self.filesystem.exists(hidden(self.place(name), "partial"))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        """A local path to write a file or a folder to, which takes its name when the block ends well.

        It replaces what was there under that name. When the block does not end well nothing is left of it.
        """
        partial = hidden(self.place(name), "partial")
        self._remove(partial)
        if self.local:
            Path(partial).parent.mkdir(parents=True, exist_ok=True)
            with _removed_on_failure(Path(partial)):
                yield Path(partial)
                self.check()
                _take_name(Path(partial), Path(self.place(name)))
            return
        with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
            staged = Path(scratch) / Path(name).name
            yield staged
            self.check()
            upload(self.filesystem, staged, partial)
            self._remove(self.place(name))
            move(self.filesystem, partial, self.place(name))

    def _remove(self, place: str) -> None:
        if self.filesystem.exists(place):
            self.filesystem.rm(place, recursive=True)


def upload(filesystem: Any, source: Path, place: str) -> None:
    """Put a local file, or every file of a local folder, at a place of a remote filesystem that holds nothing yet."""
    for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
        target = place if file == source else f"{place}/{file.relative_to(source).as_posix()}"
        if file.is_file():
            filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(file), target)


def move(filesystem: Any, source: str, place: str) -> None:
    """Copy a remote file, or every file below a folder, then remove the source: object stores know no rename.

    File by file, because a recursive `mv` of fsspec also copies the folders that an object store only seems to have.
    """
    for file in filesystem.find(source):
        target = place + file[len(source) :]
        filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        filesystem.cp_file(file, target)
    filesystem.rm(source, recursive=True)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _take_name(partial: Path, name: Path) -> None:
    """Rename into place; a folder that stands there is moved aside first, because rename cannot replace it."""
    if not (name.is_dir() and partial.is_dir()):
        os.replace(partial, name)
        return
    aside = Path(hidden(str(name), "old"))
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(name, aside)
    os.rename(partial, name)
    shutil.rmtree(aside)


class OutputFile(Output):
    """One file of results, `<file>.manifest.json` beside it; lines gather in `.<file>.partial`, kept across runs."""

    def __init__(self, target: str, *, job: str, config: BaseModel, inputs: Mapping[str, str] | None = None) -> None:
        super().__init__(target, job=job, config=config, inputs=inputs)
        if self.filesystem.isdir(self._root):
            raise UserError(f"--output {target} is a folder: {job} writes a file, name one.")

    def _place(self, name: str) -> str:
        if name == "manifest":
            return f"{self._root}.manifest.json"
        return hidden(self._root, {"lock": "lock", "record": "begun.json"}[name])

    @property
    def _folder(self) -> str:
        return self._root.rpartition("/")[0] or "."

    def _complete(self) -> bool:
        return bool(self.filesystem.isfile(self._root))

    def _traces(self) -> list[str]:
        places = [self._root, self._place("manifest"), self._place("record"), self.partial]
        return [place for place in places if self.filesystem.exists(place)]

    @property
    def partial(self) -> str:
        """Where unfinished content lies, on the output's filesystem: hidden, beside the file."""
        return hidden(self._root, "partial")

    @property
    def partial_path(self) -> Path:
        """The partial file to append to. Raises UserError where the output is not local."""
        if not self.local:
            raise UserError(f"--output {self.target} must be a local path for {self.job}.")
        return Path(self.partial)

    def forget_if_empty(self) -> None:
        """For bad input: `forget`, and the partial file too, unless there is something in it."""
        if self.filesystem.exists(self.partial):
            if self.filesystem.size(self.partial):
                return
            self.filesystem.rm_file(self.partial)
        self.forget()

    def publish(self, content: bytes | None = None) -> None:
        """Give the file its name: from `content`, or from what lies in the partial file."""
        self.check()
        if content is not None:
            self.filesystem.pipe_file(self.partial, content)
        if self.local:
            os.replace(self.partial, self._root)
        else:
            move(self.filesystem, self.partial, self._root)
