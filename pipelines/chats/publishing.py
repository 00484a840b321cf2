"""Files that appear whole or not at all, on any filesystem, with their checksums.

On a local (or mounted) filesystem a file is written under a hidden name beside its place and renamed. Elsewhere it is
written to a local scratch file, uploaded under the hidden name and moved; a store without renames copies first and
removes the source last, so a name counts once its hidden neighbour is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs

from pipelines.jobkit.output import hidden, move, upload

PARTIAL = "partial"
CHUNK_BYTES = 1 << 22


@contextlib.contextmanager
def published(place: str) -> Iterator[Path]:
    """A local path to write; when the block ends well its content appears at `place` in one step, else nothing does."""
    filesystem, path = url_to_fs(place)
    if _is_local(filesystem):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(hidden(path, f"{os.getpid()}.{PARTIAL}"))
        try:
            yield partial
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
        staged = Path(scratch) / "content"
        yield staged
        upload(filesystem, staged, hidden(path, PARTIAL))
        move(filesystem, hidden(path, PARTIAL), path)


def is_published(place: str) -> bool:
    """Whether the file is there, whole."""
    filesystem, path = url_to_fs(place)
    if not filesystem.exists(path):
        return False
    return _is_local(filesystem) or not filesystem.exists(hidden(path, PARTIAL))


def checksum(place: str) -> str:
    """`sha256:<hex>` of a file's bytes."""
    filesystem, path = url_to_fs(place)
    digest = hashlib.sha256()
    with _opened(filesystem, path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def remove_partials(folder: str) -> None:
    """Remove what killed writers left in a folder (not in its sub-folders)."""
    filesystem, path = url_to_fs(folder)
    if not filesystem.exists(path):
        return
    for place in filesystem.ls(path, detail=False):
        name = place.rstrip("/").rpartition("/")[2]
        if name.startswith(".") and name.endswith(f".{PARTIAL}"):
            filesystem.rm(place, recursive=True)


def _opened(filesystem: Any, path: str) -> IO[bytes]:
    stream: IO[bytes] = filesystem.open(path, "rb")
    return stream


def _is_local(filesystem: Any) -> bool:
    return "file" in filesystem.protocol
