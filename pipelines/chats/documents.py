"""Tokenized documents between reading and packing: one Parquet file a shard, with what was counted in its metadata.

A shard is read, rendered, tokenized and fitted in batches, so memory holds a batch and not the shard. Both of its files
appear by rename, the documents last: where they are, the shard is done, and a job that was interrupted does not read it
again. Which documents are held out depends on their content alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from model.backbone import load_tokenizer
from model.demo_base import demo_base_model
from pipelines.chats.lines import BLANK, Line, batches, format_of, read_shard
from pipelines.chats.over_long import Fitted, fit
from pipelines.chats.publishing import is_published, published
from pipelines.chats.records import Chat, Document, Rejected, parse
from pipelines.chats.rows import IGNORED
from pipelines.chats.sources import Shard
from pipelines.chats.template import ChatEncoder, Encoded

SUMMARY = b"summary"
SCHEMA = pa.schema(
    [
        pa.field("held_out", pa.bool_(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
    ]
)


@dataclass(frozen=True)
class Reading:
    """How documents are made. model: where the tokenizer is (None: the demo's base). held_out: share of the documents
    kept out, or 1.0 for a shard that is held out as a whole. context_length in tokens."""

    model: str | None
    format: str
    over_long: str
    context_length: int
    max_line_bytes: int
    held_out: float


@dataclass
class Counts:
    """What became of the chats of one split. documents: chats; pieces: what they were cut or unrolled into; split,
    truncated, unrolled: chats; dropped: pieces without a supervised token; unlearnt: answers without supervision."""

    documents: int = 0
    turns: int = 0
    unlearnt: int = 0
    pieces: int = 0
    unrolled: int = 0
    split: int = 0
    truncated: int = 0
    dropped: int = 0

    def add(self, other: Counts) -> None:
        """Take another's counts in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Summary:
    """What a shard gave. format: what its file was found to have (None: no known one). rejected: lines by kind."""

    format: str | None
    lines: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    train: Counts = field(default_factory=Counts)
    held_out: Counts = field(default_factory=Counts)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Summary:
        values = json.loads(text)
        train, held_out = Counts(**values.pop("train")), Counts(**values.pop("held_out"))
        return cls(**values, train=train, held_out=held_out)

    def reject(self, kinds: Iterable[str]) -> None:
        """Count rejected lines."""
        self.rejected = dict(sorted((Counter(self.rejected) + Counter(kinds)).items()))


@functools.lru_cache(maxsize=2)
def encoder_of(model: str | None) -> ChatEncoder:
    """The encoder of a model's tokenizer, made once a process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ChatEncoder(load_tokenizer(model if model is not None else demo_base_model()))


def documents_name(shard: Shard) -> str:
    return f"{shard.name}.documents.parquet"


def rejected_name(shard: Shard) -> str:
    return f"{shard.name}.rejected.jsonl"


def make_documents(shard: Shard, reading: Reading, folder: str) -> Summary:
    """Read a shard into `folder` (path or fsspec URI), unless that was done before. Raises UserError for a file that
    cannot be opened at all."""
    place = f"{folder}/{documents_name(shard)}"
    done = read_summary(place)
    if done is not None:
        return done
    found = reading.format if reading.format != "auto" else format_of(shard.file, reading.max_line_bytes)
    summary = Summary(found)
    with published(place) as documents, published(f"{folder}/{rejected_name(shard)}") as rejects:
        _write(documents, rejects, shard, reading, summary)
    return summary


def _write(documents: Path, rejects: Path, shard: Shard, reading: Reading, summary: Summary) -> None:
    with rejects.open("w", encoding="utf-8") as lines, pq.ParquetWriter(documents, SCHEMA, compression="zstd") as out:
        for table, rejected in _tables(shard, reading, summary):
            out.write_table(table)
            lines.writelines(json.dumps(one) + "\n" for one in rejected)
        out.add_key_value_metadata({SUMMARY: summary.to_json()})


def _tables(shard: Shard, reading: Reading, summary: Summary) -> Iterator[tuple[pa.Table, list[tuple[int, str]]]]:
    """The documents of a shard table by table, and the (line, reason) of what was rejected; counts as it goes."""
    for lines in batches(read_shard(shard, reading.max_line_bytes)):
        summary.lines = lines[-1].number
        pieces: list[tuple[bool, Encoded]] = []
        rejected: list[tuple[int, Rejected]] = []
        for number, made in _outcomes(lines, summary.format, reading):
            if isinstance(made, Rejected):
                rejected.append((number, made))
                continue
            held_out = _is_held_out(made.document, reading.held_out)
            (summary.held_out if held_out else summary.train).add(made.counts)
            pieces += [(held_out, piece) for piece in made.pieces]
        summary.reject(reason.kind for _, reason in rejected)
        yield _table(pieces), [(number, str(reason)) for number, reason in rejected]


@dataclass(frozen=True)
class _Made:
    """A document that passed: its pieces and its counts."""

    document: Document
    pieces: list[Encoded]
    counts: Counts


def _outcomes(lines: list[Line], format: str | None, reading: Reading) -> Iterator[tuple[int, _Made | Rejected]]:
    """What became of each line, in order; blank ones left out."""
    encoder = encoder_of(reading.model)
    parsed = [(line.number, _parsed(line, format)) for line in lines if line.value is not BLANK]
    encoded = iter(encoder.encode([document for _, document in parsed if not isinstance(document, Rejected)]))
    for number, document in parsed:
        yield number, document if isinstance(document, Rejected) else _made(document, next(encoded), reading)


def _made(document: Document, encoded: list[Encoded] | Rejected, reading: Reading) -> _Made | Rejected:
    if isinstance(encoded, Rejected):
        return encoded
    try:
        fitted = fit(encoded, reading.context_length, reading.over_long)
    except Rejected as error:
        return error
    return _Made(document, fitted.pieces, _counts(document, fitted, encoded))


def _parsed(line: Line, format: str | None) -> Document | Rejected:
    if line.bad:
        rejected: Rejected = line.value
        return rejected
    if format is None:
        return Rejected("unknown format", "no key of a known one: messages, conversations, instruction, prompt, text")
    try:
        return parse(line.value, format)
    except Rejected as error:
        return error


def _counts(document: Document, fitted: Fitted, encoded: list[Encoded]) -> Counts:
    return Counts(
        documents=1,
        turns=document.turns,
        unlearnt=sum(one.unlearnt for one in encoded),
        pieces=len(fitted.pieces),
        unrolled=int(len(encoded) > 1),
        split=int(fitted.split > 0),
        truncated=int(fitted.truncated > 0),
        dropped=fitted.dropped,
    )


def _table(pieces: list[tuple[bool, Encoded]]) -> pa.Table:
    documents = [piece for _, piece in pieces]
    ids = _joined([piece.input_ids for piece in documents], np.int32)
    supervised = _joined([piece.supervised for piece in documents], np.bool_)
    lengths = np.array([len(piece) for piece in documents], np.int32)
    offsets = pa.array(np.r_[0, np.cumsum(lengths)].astype(np.int32))
    learnt = [int(piece.supervised.sum()) for piece in documents]
    columns = (
        pa.array([held_out for held_out, _ in pieces], pa.bool_()),
        pa.array(lengths),
        pa.array(learnt, pa.int32()),
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(np.where(supervised, ids, IGNORED).astype(np.int32))),
    )
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _is_held_out(document: Document, share: float) -> bool:
    if share <= 0 or share >= 1:
        return share >= 1
    content = document.messages if isinstance(document, Chat) else document.text
    digest = hashlib.sha256(json.dumps(content).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def read_summary(place: str) -> Summary | None:
    """The summary in a documents file; None where it is not there, or was damaged."""
    if not is_published(place):
        return None
    filesystem, path = url_to_fs(place)
    with filesystem.open(path, "rb") as file:
        try:
            return Summary.from_json(pq.read_metadata(file).metadata[SUMMARY])
        except (pa.ArrowInvalid, KeyError):
            return None


def read_columns(place: str, columns: Iterable[str]) -> pa.Table:
    """Some columns of a documents file."""
    filesystem, path = url_to_fs(place)
    with filesystem.open(path, "rb") as file:
        return pq.read_table(file, columns=list(columns))


def read_documents(place: str, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(input_ids, labels) of the documents with these indices (in order, one may come again); holds a row group."""
    filesystem, path = url_to_fs(place)
    with filesystem.open(path, "rb") as file:
        parquet = pq.ParquetFile(file, pre_buffer=False)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        bounds = np.cumsum([0, *sizes])
        groups = np.searchsorted(bounds, wanted, side="right") - 1
        for group in np.unique(groups):
            table = parquet.read_row_group(int(group), columns=["input_ids", "labels"])
            yield from _lists(table.take(pa.array(wanted[groups == group] - bounds[group])))


def _lists(table: pa.Table) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    input_ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
    offsets = input_ids.offsets.to_numpy()
    values = input_ids.values.to_numpy(), labels.values.to_numpy()
    for start, end in pairwise(offsets.tolist()):
        yield values[0][start:end], values[1][start:end]
