"""What `--data` names, as files, and the files cut into shards that can be read apart from each other.

A source is a file, a folder (its data files, also in sub-folders), a glob, an fsspec URI of any of these, or the id of
a Hub dataset (`owner/name`: the files of its train split). Order is that of the sources, then that of the names, so the
same input gives the same documents in the same order however it is read. Plain JSONL is cut at fixed byte positions,
Parquet between row groups; a compressed file is one shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from model.errors import JobError, UserError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
HUB = "hf://datasets/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class InputFile:
    """A file of chats. uri: local path or fsspec URI. size in bytes. source: which word of --data names it, from 0."""

    uri: str
    size: int
    source: int = 0

    @property
    def compressed(self) -> bool:
        return self.uri.lower().endswith(COMPRESSIONS)

    @property
    def parquet(self) -> bool:
        return self.uri.lower().endswith(PARQUET)

    @property
    def json_document(self) -> bool:
        """Named .json: may be one array instead of lines."""
        return _bare(self.uri).endswith(".json")


@dataclass(frozen=True)
class Shard:
    """A part of a file: bytes [start, end) of JSONL (the lines that begin there), or row groups [start, end)."""

    file_index: int
    file: InputFile
    start: int
    end: int

    @property
    def name(self) -> str:
        """A file name for what is made of this shard."""
        return f"{self.file_index:05d}-{self.start:013d}"


def find_files(sources: Sequence[str]) -> list[InputFile]:
    """The data files of all sources, in order. Raises UserError for a source that names nothing, or a file twice."""
    files: list[InputFile] = []
    seen: set[str] = set()
    for number, source in enumerate(sources):
        for file in _find(source):
            if file.uri in seen:
                raise UserError(f"--data names {file.uri} twice: give every file once.")
            seen.add(file.uri)
            files.append(replace(file, source=number))
    return files


def _find(source: str) -> list[InputFile]:
    if _is_hub_id(source):
        return _find_hub(source)
    try:
        filesystem, path = url_to_fs(os.path.expanduser(source) if "://" not in source else source)
        found = _list(filesystem, path)
    except FileNotFoundError as error:
        if (cause := _unanswered(error)) is not None:
            raise JobError(f"--data {source} cannot be read: {cause}.") from None
        found = {}
    except (ValueError, ImportError) as error:
        raise UserError(f"--data {source} cannot be opened: {error}.") from None
    except PermissionError:
        raise UserError(f"--data {source} cannot be read: permission denied.") from None
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).splitlines()[0]
        raise (JobError if "://" in source else UserError)(f"--data {source} cannot be read: {reason}.") from None
    if not found:
        endings = f"{', '.join(JSON_LINES)} or {PARQUET}"
        raise UserError(f"--data {source}: there is no such file, or no {endings} file in it.")
    return [InputFile(_uri(filesystem, name), size) for name, size in sorted(found.items())]


def _unanswered(error: FileNotFoundError) -> str | None:
    """Why a server could not say whether there is a file, which fsspec takes for no; None where it could."""
    cause = error.__cause__
    of_http = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    if not of_http or getattr(cause, "status", None) in (404, 410):
        return None
    return (str(cause) or type(cause).__name__).splitlines()[0]


def _list(filesystem: Any, path: str) -> dict[str, int]:
    """Name and size of a file, of a folder's data files, or of what a glob matches."""
    if any(mark in path for mark in "*?[") and not filesystem.exists(path):
        found = filesystem.glob(path, detail=True)
        return {name: info["size"] for name, info in found.items() if info["type"] == "file"}
    info = filesystem.info(path)
    if info["type"] == "file":
        return {path: info["size"]}
    found = filesystem.find(path, detail=True)
    return {name: info["size"] for name, info in found.items() if _is_data(name[len(path) :])}


def _bare(name: str) -> str:
    """The name in small letters, without a compression's ending."""
    name = name.lower()
    return next((name.removesuffix(ending) for ending in COMPRESSIONS if name.endswith(ending)), name)


def _is_data(name: str) -> bool:
    hidden = any(part.startswith((".", "_")) for part in name.split("/") if part)
    return not hidden and _bare(name).endswith((*JSON_LINES, PARQUET))


def _uri(filesystem: Any, name: str) -> str:
    return name if "file" in filesystem.protocol else filesystem.unstrip_protocol(name)


def _is_hub_id(source: str) -> bool:
    return bool(_HUB_ID.fullmatch(source)) and not os.path.exists(source)


def _find_hub(dataset: str) -> list[InputFile]:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        filesystem, path = url_to_fs(HUB + dataset)
        found = {name: info["size"] for name, info in filesystem.find(path, detail=True).items() if _is_data(name)}
    except FileNotFoundError:
        raise UserError(
            f"--data {dataset} is no file here and no dataset on the Hub (private ones need HF_TOKEN)."
        ) from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise JobError(f"--data {dataset} is no file here, and the Hub could not be asked: {first}") from None
    names = train_split(dataset, sorted(name[len(path) + 1 :] for name in found))
    return [InputFile(f"{HUB}{dataset}/{name}", found[f"{path}/{name}"]) for name in names]


def train_split(dataset: str, names: Sequence[str]) -> list[str]:
    """The files of a Hub dataset's train split: those with `train` in their name, or all when none has.

    Raises UserError when there are none, or when they belong to several configurations (folders).
    """
    chosen = [name for name in names if "train" in name.lower()] or list(names)
    folders = sorted({name.split("/")[0] if "/" in name else "" for name in chosen})
    if not chosen:
        raise UserError(f"--data {dataset}: the dataset on the Hub holds no JSONL or Parquet file.")
    if len(folders) > 1:
        raise UserError(
            f"--data {dataset} has several configurations ({', '.join(folder or '.' for folder in folders)}): "
            f"name one, as in --data {HUB}{dataset}/{folders[-1]}."
        )
    return chosen


def cut(files: Sequence[InputFile], shard_bytes: int) -> list[Shard]:
    """All files in shards of about `shard_bytes`, in order."""
    return [Shard(i, file, start, end) for i, file in enumerate(files) for start, end in _ranges(file, shard_bytes)]


def _ranges(file: InputFile, shard_bytes: int) -> Iterator[tuple[int, int]]:
    if file.parquet:
        yield from _row_group_ranges(file, shard_bytes)
    elif file.compressed or file.json_document:
        yield 0, max(file.size, 1)
    else:
        for start in range(0, max(file.size, 1), shard_bytes):
            yield start, min(start + shard_bytes, max(file.size, 1))


def _row_group_ranges(file: InputFile, shard_bytes: int) -> Iterator[tuple[int, int]]:
    with open_parquet(file) as parquet:
        start, total = 0, 0
        for group in range(parquet.num_row_groups):
            total += parquet.metadata.row_group(group).total_byte_size
            if total >= shard_bytes:
                yield start, group + 1
                start, total = group + 1, 0
        if start < parquet.num_row_groups:
            yield start, parquet.num_row_groups


def open_parquet(file: InputFile) -> pq.ParquetFile:
    """Raises UserError for a file that is not Parquet."""
    filesystem, path = url_to_fs(file.uri)
    try:
        return pq.ParquetFile(filesystem.open(path, "rb"), pre_buffer=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # not Arrow's own
            raise UserError(f"--data {file.uri} cannot be read: {error.strerror}.") from None
        reason = str(error).splitlines()[0].rstrip(". ")
        raise UserError(
            f"--data {file.uri} is no Parquet file that can be read ({reason}): make it again, or leave it out."
        ) from None
