"""The two Ray Data stages: shards to documents, and a packing plan to files of rows.

Each item is independent of the others, is written by rename and is skipped when it is already there, so the outcome is
the same for any number of workers and any history of interruptions. What the driver needs in between is small: a
length per document.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from fsspec.core import url_to_fs
from ray.data import DataContext, TaskPoolStrategy

from model.errors import UserError
from pipelines.chats.documents import (
    Reading,
    Summary,
    documents_name,
    make_documents,
    read_columns,
    read_documents,
)
from pipelines.chats.pack import Plan
from pipelines.chats.publishing import checksum, is_published, published
from pipelines.chats.rows import Placed, RowFormat, build_rows
from pipelines.chats.sources import Shard

ROW_GROUP = 256
READERS = 16


@dataclass(frozen=True)
class ReadTask:
    """A shard to be made into documents."""

    shard: Shard
    reading: Reading


@dataclass(frozen=True)
class Lengths:
    """One entry per document of all shards, in order: whether it is held out, its length and supervised tokens; and
    bounds [S + 1], where each shard's documents begin and end."""

    held_out: np.ndarray
    length: np.ndarray
    supervised: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A plan for some of the documents. members: their indices among all documents, in order."""

    members: np.ndarray
    plan: Plan
    bounds: np.ndarray
    documents: tuple[str, ...]  # the shards' documents files


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of a layout, to be one file."""

    first: int
    last: int
    place: str


def make_all_documents(tasks: Sequence[ReadTask], folder: str, workers: int | None) -> Iterator[tuple[int, Summary]]:
    """(index of the task, its summary) as they get ready. Raises UserError for a file that cannot be opened."""

    def make(index: int) -> dict[str, Any]:
        try:
            summary = make_documents(tasks[index].shard, tasks[index].reading, folder)
        except UserError as error:
            return {"index": index, "summary": b"", "error": str(error)}
        return {"index": index, "summary": summary.to_json(), "error": ""}

    for row in _each(make, len(tasks), workers):
        if row["error"]:
            raise UserError(row["error"])
        yield row["index"], Summary.from_json(row["summary"])


def read_lengths(places: Sequence[str]) -> Lengths:
    """The lengths of all documents, from the documents files of all shards."""
    names = ("held_out", "length", "supervised")
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda place: read_columns(place, names), places))
    held_out, length, supervised = (
        np.concatenate([table[name].to_numpy() for table in tables]) if tables else np.zeros(0) for name in names
    )
    return Lengths(held_out, length, supervised, np.cumsum([0, *(table.num_rows for table in tables)]))


def write_all_parts(
    parts: Sequence[Part], layout: Layout, form: RowFormat, workers: int | None
) -> Iterator[tuple[int, str]]:
    """Write the files of rows; yields (index, checksum) of each as it is there."""
    shared = ray.put(layout)

    def write(index: int) -> dict[str, Any]:
        return {"index": index, "checksum": write_part(parts[index], ray.get(shared), form)}

    for row in _each(write, len(parts), workers):
        yield row["index"], row["checksum"]


def write_part(part: Part, layout: Layout, form: RowFormat) -> str:
    """Lay the documents of rows [first, last) into rows and write them, unless that was done before; the checksum."""
    if not _is_written(part, form):
        rows = build_rows(_placed(part, layout), part.last - part.first, form)
        with published(part.place) as file:
            pq.write_table(rows, file, compression="zstd", row_group_size=ROW_GROUP)
    return checksum(part.place)


def _is_written(part: Part, form: RowFormat) -> bool:
    """Whether the file is there with its rows; one that a failing disk left in pieces is written again."""
    if not is_published(part.place):
        return False
    filesystem, path = url_to_fs(part.place)
    with filesystem.open(path, "rb") as file:
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
        except pa.ArrowInvalid:
            return False
        same_form = parquet.schema_arrow.metadata == form.schema.metadata
        return bool(same_form and parquet.metadata.num_rows == part.last - part.first)


def _placed(part: Part, layout: Layout) -> Iterator[Placed]:
    """The documents of a part, shard by shard."""
    chosen = layout.plan.documents_of(part.first, part.last)
    where = layout.members[chosen]
    chosen = chosen[np.argsort(where, kind="stable")]
    where = layout.members[chosen]
    shards = np.searchsorted(layout.bounds, where, side="right") - 1
    for shard in np.unique(shards):
        of_shard = shards == shard
        stored = read_documents(layout.documents[shard], where[of_shard] - layout.bounds[shard])
        for index, (input_ids, labels) in zip(chosen[of_shard].tolist(), stored, strict=True):
            yield Placed(
                index=index,
                row=int(layout.plan.rows[index]) - part.first,
                start=int(layout.plan.starts[index]),
                input_ids=input_ids,
                labels=labels,
            )


def documents_places(tasks: Sequence[ReadTask], folder: str) -> list[str]:
    """Where the documents of each shard are."""
    return [f"{folder}/{documents_name(task.shard)}" for task in tasks]


def _each(function: Callable[[int], dict[str, Any]], count: int, workers: int | None) -> Iterator[dict[str, Any]]:
    """function(0 .. count - 1), one Ray task each, at most `workers` at once; results in any order."""
    if count == 0:
        return
    _quiet()
    items = ray.data.from_items([{"item": index} for index in range(count)], override_num_blocks=count)
    pool = TaskPoolStrategy(None if workers is None else min(workers, count))
    done = items.map(lambda row: function(int(row["item"])), compute=pool, num_cpus=1)
    yield from done.iter_rows()


def _quiet() -> None:
    """The job has its own progress: Ray Data's bars and plans would write over it."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that bars are off
