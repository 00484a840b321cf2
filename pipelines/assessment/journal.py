"""What an assessment has measured so far, one JSON line a measurement, flushed: an interrupted run goes on behind it.

A line torn by a kill is cut off when the journal is opened again. On a remote output the journal is a temporary file:
such a run starts again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.jobkit import OutputFolder

NAME = ".measured.jsonl"

Key = tuple[str | int, ...]


class Journal:
    """Measurements by key, such as ("loss", role) or ("round", label, number)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Key, dict[str, Any]] = {}
        self._load()

    def _load(self) -> None:
        if not self._path.exists():
            return
        whole = 0
        with self._path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                self._found[tuple(entry["key"])] = entry["value"]
                whole += len(line)
            file.truncate(whole)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return self._found[key]

    def find(self, key: Key) -> dict[str, Any] | None:
        """The measurement, or None."""
        return self._found.get(key)

    def put(self, key: Key, value: dict[str, Any]) -> None:
        """Keep a measurement."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}, ensure_ascii=False) + "\n")
        self._found[key] = value


@contextmanager
def open_journal(output: OutputFolder) -> Iterator[Journal]:
    """The output's journal; removed when the block ends well."""
    if not output.local:
        with tempfile.TemporaryDirectory(prefix="blockcast-") as scratch:
            yield Journal(Path(scratch) / NAME)
        return
    path = output.path / NAME
    yield Journal(path)
    path.unlink(missing_ok=True)
