"""A shard as numbered records. One bad line costs that line, never its file: it comes out as `Rejected`.

Lines are read as bytes and decoded strictly, so broken UTF-8 is found and named. A line above the limit is skipped
without being held in memory. Numbers count from 1 within the shard; whoever joins the shards of a file adds the lines
of the earlier ones.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from model.errors import UserError
from pipelines.chats.records import KEYS, Rejected, detect
from pipelines.chats.sources import InputFile, Shard, open_parquet

SKIP_BYTES = 1 << 20
ZSTANDARD = ".zst"
BOM = b"\xef\xbb\xbf"
SAMPLE_RECORDS = 64
SAMPLE_LINES = 10_000
BATCH_LINES = 256
BATCH_BYTES = 4 << 20
BLANK = object()


@dataclass(frozen=True)
class Line:
    """A record and where it stood: its number within the shard (a JSONL line, a Parquet row or an array's element)."""

    number: int
    value: Any  # a parsed JSON value, Rejected, or BLANK
    size: int = 0  # bytes or characters it took, about

    @property
    def bad(self) -> bool:
        return isinstance(self.value, Rejected)


def read_shard(shard: Shard, max_line_bytes: int) -> Iterator[Line]:
    """The lines of a shard, blank ones too (they count). Raises UserError where the file cannot be opened at all."""
    if shard.file.parquet:
        yield from _read_row_groups(shard, max_line_bytes)
        return
    array = shard.file.json_document and _is_array(shard.file)
    with open_bytes(shard.file) as stream:
        if array:
            yield from _read_array(stream)
        else:
            _seek_to_line(stream, shard)
            yield from _parse_lines(stream, shard, max_line_bytes)


def format_of(file: InputFile, max_line_bytes: int) -> str | None:
    """The format of a file, by its first records; None when none of them has a known one."""
    everything = Shard(0, file, 0, file.size if not file.parquet else open_parquet(file).num_row_groups)
    return detect(_sample(read_shard(everything, max_line_bytes)))


def _sample(lines: Iterable[Line]) -> Iterator[Any]:
    fitting = 0
    for seen, line in enumerate(lines):
        if not line.bad and line.value is not BLANK:
            yield line.value
            fitting += detect([line.value]) is not None
        if fitting >= SAMPLE_RECORDS or seen >= SAMPLE_LINES:
            return


def batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Consecutive lines in lists of at most BATCH_LINES and, beyond one line, BATCH_BYTES."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        if batch and (len(batch) >= BATCH_LINES or size + line.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += line.size
    if batch:
        yield batch


def open_bytes(file: InputFile) -> IO[bytes]:
    """The file's content, decompressed by its ending."""
    try:
        if file.uri.lower().endswith(ZSTANDARD):
            return _open_zstandard(file)
        stream: IO[bytes] = fsspec.open(file.uri, "rb", compression="infer").open()
        # A remote file of fsspec's knows no readline with a limit.
        return io.BufferedReader(stream, SKIP_BYTES) if isinstance(stream, AbstractBufferedFile) else stream
    except (ValueError, ImportError) as error:
        raise UserError(f"--data {file.uri} cannot be opened: {error}.") from None
    except OSError as error:
        raise UserError(f"--data {file.uri} cannot be read: {error.strerror or error}.") from None


def _open_zstandard(file: InputFile) -> IO[bytes]:
    """Through Arrow, which brings the codec; fsspec would need a package for it. A file that breaks off costs what a
    read would have held, so reads are small."""
    raw = pa.PythonFile(fsspec.open(file.uri, "rb").open(), mode="r")
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), io.DEFAULT_BUFFER_SIZE)


def _is_array(file: InputFile) -> bool:
    try:
        with open_bytes(file) as stream:
            head = stream.read(4096)
    except (EOFError, OSError, zlib.error, lzma.LZMAError):
        return False
    return head.removeprefix(BOM).lstrip()[:1] == b"["


def _read_array(stream: IO[bytes]) -> Iterator[Line]:
    """A .json file that is one array: its elements. It must be sound as a whole."""
    try:
        values = _parse(stream.read().removeprefix(BOM))
    except Rejected as error:
        yield Line(1, error)
        return
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        yield Line(1, Rejected("file breaks off", str(error)))
        return
    yield from (Line(number, value) for number, value in enumerate(values, 1))


def _seek_to_line(stream: IO[bytes], shard: Shard) -> None:
    """Go to the first line that begins in the shard: the byte before it, if any, ends another."""
    if shard.start > 0:
        stream.seek(shard.start - 1)
        _skip_line(stream)


def _parse_lines(stream: IO[bytes], shard: Shard, max_line_bytes: int) -> Iterator[Line]:
    number = 0
    while shard.file.compressed or stream.tell() < shard.end:
        number += 1
        try:
            raw, rest = _read_line(stream, max_line_bytes)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            yield Line(number, Rejected("file breaks off", str(error)))
            return
        if not raw:
            return
        if number == 1 and shard.start == 0:
            raw = raw.removeprefix(BOM)
        if rest:
            yield Line(number, _too_long(len(raw) + rest, max_line_bytes))
        elif raw.strip():
            yield Line(number, _parsed_or_rejected(raw), len(raw))
        else:
            yield Line(number, BLANK)


def _read_line(stream: IO[bytes], max_line_bytes: int) -> tuple[bytes, int]:
    """A line, and how many bytes of it were skipped because it is too long (0: it is whole)."""
    raw = stream.readline(max_line_bytes + 1)
    if len(raw) <= max_line_bytes or raw.endswith(b"\n"):
        return raw, 0
    return raw[:80], len(raw) - 80 + _skip_line(stream)


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while raw := stream.readline(SKIP_BYTES):
        skipped += len(raw)
        if raw.endswith(b"\n"):
            break
    return skipped


def _parsed_or_rejected(raw: bytes) -> Any:
    try:
        return _parse(raw)
    except Rejected as error:
        return error


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Rejected("broken UTF-8", f"byte {error.start + 1} of the line is {error.reason}") from None
    except json.JSONDecodeError as error:
        raise Rejected("malformed JSON", f"{error.msg} at character {error.pos + 1}") from None
    except (RecursionError, ValueError) as error:
        raise Rejected("malformed JSON", f"it cannot be held: {error}") from None


def _read_row_groups(shard: Shard, max_line_bytes: int) -> Iterator[Line]:
    """A damaged row group costs its rows from there on, the next ones are read."""
    number = 0
    with open_parquet(shard.file) as parquet:
        columns = [name for name in parquet.schema_arrow.names if name in KEYS] or None
        for group in range(shard.start, shard.end):
            end = number + parquet.metadata.row_group(group).num_rows
            try:
                for batch in parquet.iter_batches(BATCH_LINES, row_groups=[group], columns=columns):
                    for row in _rows(batch):
                        number += 1
                        size = _text_size(row)
                        yield Line(number, row if size <= max_line_bytes else _too_long(size, max_line_bytes), size)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
                reason = Rejected("damaged row group", str(error).splitlines()[0])
                yield from (Line(lost, reason) for lost in range(number + 1, end + 1))
            number = end


def _rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a batch. One that Python cannot hold (a text that is no UTF-8, a year 60000) costs itself."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError):
        rows = [_row_or_rejected(batch.slice(index, 1)) for index in range(batch.num_rows)]
    yield from rows


def _row_or_rejected(row: pa.RecordBatch) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Rejected("broken UTF-8", f"byte {error.start + 1} of a text is {error.reason}")
    except (ValueError, OverflowError) as error:
        return Rejected("wrong type", f"it cannot be held: {error}")


def _text_size(value: Any) -> int:
    """Characters of all texts in a nested value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(_text_size, value.values() if isinstance(value, dict) else value))
    return 0


def _too_long(size: int, limit: int) -> Rejected:
    return Rejected("line too long", f"{size:,} bytes, --read.max_line_bytes is {limit:,}")
