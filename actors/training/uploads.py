"""A rank's files on their way to an object store, in a thread, while training goes on."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from actors.training.storage import Patience


class Upload(threading.Thread):
    """Copies what lies in `scratch` below `place`. `done` is waited for, then `finish` tells how it went."""

    def __init__(self, scratch: tempfile.TemporaryDirectory[str], filesystem: Any, place: str, patient: Patience):
        super().__init__(name="checkpoint-upload", daemon=True)
        self._scratch, self._filesystem, self._place, self._patient = scratch, filesystem, place, patient
        self._error: Exception | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            for path in sorted(p for p in Path(self._scratch.name).rglob("*") if p.is_file()):
                self._put(path)
        except Exception as error:  # raised again by finish, in the thread that trains
            self._error = error
        finally:
            self.done.set()

    def _put(self, path: Path) -> None:
        target = f"{self._place}/{path.relative_to(self._scratch.name).as_posix()}"

        def put() -> None:
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)  # hdfs and sftp have real folders
            self._filesystem.put_file(str(path), target)

        self._patient(put, f"uploading {target}")

    def finish(self) -> None:
        """Wait for the end and clear the local files. Raises what the upload came to grief by."""
        self.done.wait()
        self._scratch.cleanup()
        if self._error is not None:
            raise self._error
