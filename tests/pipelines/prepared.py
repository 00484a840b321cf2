"""What the tests of prepare share: what a run left behind, and its rows taken apart again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

IGNORED, TAIL = -100, -1


@dataclass(frozen=True)
class Prepared:
    """What a run of the job left behind."""

    code: int
    output: Path

    @property
    def stats(self) -> dict[str, Any]:
        return json.loads((self.output / "stats.json").read_text())

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.output / "manifest.json").read_text())

    @property
    def rejected(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "rejected.jsonl").read_text().splitlines()]

    def rows(self, folder: str = "") -> pa.Table:
        return pa.concat_tables(pq.read_table(path) for path in sorted((self.output / folder).glob("part-*.parquet")))

    def bytes(self) -> dict[str, bytes]:
        """Every file that must not depend on how the job ran."""
        files = (path for path in self.output.rglob("*") if path.is_file() and path.name != "manifest.json")
        return {str(path.relative_to(self.output)): path.read_bytes() for path in files}


@dataclass(frozen=True)
class PackedDocument:
    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]


def documents_of(rows: pa.Table) -> dict[int, PackedDocument]:
    """The documents in the rows by their id, padding included."""
    found: dict[int, PackedDocument] = {}
    for row in rows.to_pylist():
        ids = np.array(row["document_ids"])
        for index in np.unique(ids[ids != TAIL]).tolist():
            at = np.flatnonzero(ids == index).tolist()
            assert index not in found, "a document is in two rows"
            found[index] = PackedDocument(
                *([row[name][i] for i in at] for name in ("input_ids", "labels", "position_ids"))
            )
    return found


def supervised_text(tokenizer: PreTrainedTokenizerBase, document: PackedDocument) -> list[str]:
    """The text of each run of labels; a label is the token it stands at."""
    assert all(label in (IGNORED, token) for label, token in zip(document.labels, document.input_ids, strict=True))
    edges = np.flatnonzero(np.diff(np.r_[0, np.array(document.labels) != IGNORED, 0]))
    return [tokenizer.decode(document.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


Prepare = Callable[..., Prepared]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, lines: list[Any]) -> Path:
    raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def sentence(err: str) -> str:
    """The one sentence of a failed job."""
    lines = [line for line in err.splitlines() if line.startswith("prepare: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]
