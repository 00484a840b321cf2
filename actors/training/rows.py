"""Packed rows on disk: their schema, random access to them, and which rows a step takes.

Which rows are read is arithmetic and nothing else: (seed, epoch) give a permutation of all rows, the step gives a
stretch of it, the rank and the number of ranks give a share of the stretch. So a run that stops at any step goes on
with the rows it would have seen, and no reader keeps a state. Row groups are decoded on demand and kept in a bounded
cache, so memory does not grow with the number of rows.

Letters: B rows, L row length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fsspec.core import url_to_fs

from model.errors import UserError
from model.layout import RowBatch

COLUMNS = ("input_ids", "labels", "document_ids", "position_ids")
ROW_SCHEMA = pa.schema([pa.field(name, pa.list_(pa.int32()), nullable=False) for name in COLUMNS])
CACHE_BYTES = 256 * 1024 * 1024
PREPARE = "make rows with pipelines/prepare.py"


@dataclass(frozen=True)
class RowFormat:
    """What a reader must know about packed rows: sizes in tokens, and the id that pads them."""

    block_size: int
    context_length: int
    mask_token_id: int

    @property
    def schema(self) -> pa.Schema:
        """The schema of packed rows with these facts in its metadata."""
        return ROW_SCHEMA.with_metadata({name: str(value) for name, value in asdict(self).items()})

    @classmethod
    def of_schema(cls, schema: pa.Schema, where: str) -> Self:
        """The facts in a schema's metadata. Raises UserError naming `where` when they are not packed rows."""
        metadata = schema.metadata or {}
        try:
            known = cls(*(int(metadata[name.encode()]) for name in cls.__dataclass_fields__))
        except (KeyError, ValueError):
            raise UserError(f"{where} does not hold packed rows (block_size is not recorded): {PREPARE}.") from None
        for name in COLUMNS:
            if name not in schema.names or not pa.types.is_list(schema.field(name).type):
                raise UserError(f"{where} does not hold packed rows (no list column {name}): {PREPARE}.")
        return known

    def padded(self, length: int) -> int:
        """A length in tokens, filled up to whole blocks."""
        return -(-length // self.block_size) * self.block_size


@dataclass(frozen=True)
class _Group:
    """A row group of a file and the global index of its first row."""

    path: str
    number: int
    first: int
    rows: int


class PackedRows:
    """Random access to the packed rows of a folder (path or fsspec URI), in the order of its `part-*.parquet` files."""

    def __init__(self, folder: str, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.folder = folder
        self._filesystem, root = url_to_fs(folder)
        self.paths: list[str] = sorted(self._filesystem.glob(f"{root.rstrip('/')}/part-*.parquet"))
        if not self.paths:
            raise UserError(f"{folder} holds no packed rows (part-*.parquet): {PREPARE}.")
        self.format, self._groups = self._survey()
        self._firsts = np.array([group.first for group in self._groups])
        self._length = sum(group.rows for group in self._groups)
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._cache_bytes = cache_bytes
        if not self._length:
            raise UserError(f"{folder} holds no rows: {PREPARE}.")

    @property
    def inputs(self) -> list[str]:
        """URIs of the files that tell these rows from others: prepare's manifest where there is one, else the rows."""
        manifest = f"{self.paths[0].rpartition('/')[0]}/manifest.json"
        paths = [manifest] if self._filesystem.exists(manifest) else self.paths
        return [str(self._filesystem.unstrip_protocol(path)) for path in paths]

    def _survey(self) -> tuple[RowFormat, list[_Group]]:
        """The rows' format and the row groups of all files, from their footers."""
        formats: dict[RowFormat, str] = {}
        groups: list[_Group] = []
        first = 0
        for path in self.paths:
            footer, schema = self._footer(path)
            formats.setdefault(RowFormat.of_schema(schema, path), path)
            for number in range(footer.num_row_groups):
                rows = footer.row_group(number).num_rows
                groups.append(_Group(path, number, first, rows))
                first += rows
        if len(formats) > 1:
            one, other = list(formats.values())[:2]
            raise UserError(f"{one} and {other} were packed differently: {PREPARE} in one run.")
        return next(iter(formats)), groups

    def _footer(self, path: str) -> tuple[Any, pa.Schema]:
        try:
            with self._filesystem.open(path, "rb") as file:
                parquet = pq.ParquetFile(file)
                return parquet.metadata, parquet.schema_arrow
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} is not a whole Parquet file ({str(error).splitlines()[0]}): {PREPARE}.") from None

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: Sequence[int]) -> RowBatch:
        """Rows by global index (0 .. len - 1, at least one) as int64 tensors [B, L]."""
        where = np.searchsorted(self._firsts, indices, side="right") - 1
        picked = [self._group(g)[:, i - self._groups[g].first] for g, i in zip(where.tolist(), indices, strict=True)]
        stacked = torch.from_numpy(np.stack(picked, 1)).long()
        return RowBatch(*stacked)

    def _group(self, number: int) -> np.ndarray:
        """A row group as int32 [columns, rows, L], from the cache or from disk."""
        if number not in self._cache:
            self._cache[number] = self._read(self._groups[number])
            while len(self._cache) > 1 and sum(x.nbytes for x in self._cache.values()) > self._cache_bytes:
                self._cache.popitem(last=False)
        self._cache.move_to_end(number)
        return self._cache[number]

    def _read(self, group: _Group) -> np.ndarray:
        with self._filesystem.open(group.path, "rb") as file:
            table = pq.ParquetFile(file).read_row_group(group.number, columns=list(COLUMNS))
        length = self.format.context_length
        columns = []
        for name in COLUMNS:
            values = table.column(name).combine_chunks().flatten().to_numpy()
            if len(values) != group.rows * length:
                raise UserError(f"{group.path}: {name} is not {length} tokens in every row: {PREPARE}.")
            columns.append(values.reshape(group.rows, length))
        return np.stack(columns).astype(np.int32, copy=False)


# Which rows a step takes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A row in a pass over the data: its global index, which is its sample id, and the 0-based epoch."""

    row: int
    epoch: int


@dataclass(frozen=True)
class RowOrder:
    """The order in which a run sees `rows` rows, `rows_per_step` at a time; an epoch's end falls anywhere in a step."""

    rows: int
    rows_per_step: int
    seed: int

    def samples(self, step: int) -> list[Sample]:
        """The global batch of a 0-based step."""
        begin = step * self.rows_per_step
        places = (divmod(place, self.rows) for place in range(begin, begin + self.rows_per_step))
        return [Sample(int(permutation(self.rows, self.seed, epoch)[at]), epoch) for epoch, at in places]


@lru_cache(maxsize=2)
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """All numbers below `count` shuffled by (seed, epoch): sorted by a hash, so no library's shuffle matters."""
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) ^ key), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 to uint64, one to one."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def share(samples: Sequence[Sample], rank: int, ranks: int, micro_rows: int) -> list[list[Sample]]:
    """A rank's micro-batches of a global batch: a contiguous share, cut into at most `micro_rows` rows each.

    Every rank gets the same number of them, because every rank must take part in every collective; where rows do not
    divide evenly some are shorter or empty.
    """
    begin, end = (len(samples) * edge // ranks for edge in (rank, rank + 1))
    mine = samples[begin:end]
    count = micro_steps(len(samples), ranks, micro_rows)
    return [list(mine[i * micro_rows : (i + 1) * micro_rows]) for i in range(count)]


def micro_steps(rows_per_step: int, ranks: int, micro_rows: int) -> int:
    """Forwards a rank runs in a step."""
    most = -(-rows_per_step // ranks)
    return -(-most // micro_rows)


def holds_rows(folder: str) -> bool:
    """Whether a folder is packed rows rather than chats: it has part files and the first one says how it was packed."""
    filesystem, root = url_to_fs(folder)
    paths = sorted(filesystem.glob(f"{root.rstrip('/')}/part-*.parquet"))
    if not paths:
        return False
    with filesystem.open(paths[0], "rb") as file:
        try:
            return b"block_size" in (pq.read_schema(file).metadata or {})
        except pa.ArrowInvalid:
            return False
