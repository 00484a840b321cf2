"""A file appears whole or not at all, on a disk and on a store that only copies."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.chats import publishing
from pipelines.chats.documents import Reading, documents_name, make_documents
from pipelines.chats.pack import plan_rows
from pipelines.chats.publishing import checksum, is_published, published, remove_partials
from pipelines.chats.rows import RowFormat
from pipelines.chats.sources import cut, find_files
from pipelines.chats.stages import Layout, Part, read_lengths, write_part
from tests.pipelines.prepared import chat, write_lines


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of either kind."""
    return str(tmp_path / "out") if request.param == "disk" else f"memory://{tmp_path.name}/out"


def names(folder: str) -> list[str]:
    filesystem, path = fsspec.url_to_fs(folder)
    return sorted(name.rpartition("/")[2] for name in filesystem.find(path))


def test_a_file_appears_when_it_is_whole_and_its_checksum_is_that_of_its_bytes(folder):
    place = f"{folder}/a.bin"
    with published(place) as path:
        path.write_bytes(b"content")
        assert not is_published(place)
    assert is_published(place) and names(folder) == ["a.bin"]
    assert checksum(place) == f"sha256:{hashlib.sha256(b'content').hexdigest()}"


def test_the_checksum_is_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 3)
    (tmp_path / "a.bin").write_bytes(b"content")
    assert checksum(str(tmp_path / "a.bin")) == f"sha256:{hashlib.sha256(b'content').hexdigest()}"


def test_two_processes_that_write_one_file_do_not_write_into_each_other(tmp_path):
    """A task is done again while its first worker, taken for dead, still writes."""
    place = str(tmp_path / "a.bin")
    with published(place) as first:
        first.write_bytes(b"first")
        child = os.fork()
        if not child:
            with published(place) as second:
                second.write_bytes(b"second")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / "a.bin").read_bytes() == b"second" and first.read_bytes() == b"first"
    assert (tmp_path / "a.bin").read_bytes() == b"first"


def test_a_writer_that_fails_leaves_nothing(folder):
    with pytest.raises(RuntimeError), published(f"{folder}/a.bin") as path:
        path.write_bytes(b"half")
        raise RuntimeError
    assert names(folder) == [] and not is_published(f"{folder}/a.bin")


def test_a_copy_that_was_cut_short_on_a_store_does_not_count(tmp_path):
    place = f"memory://{tmp_path.name}/a.bin"
    filesystem, path = fsspec.url_to_fs(place)
    filesystem.pipe_file(path, b"ha")
    filesystem.pipe_file(path.replace("a.bin", ".a.bin.partial"), b"half")
    assert not is_published(place)
    remove_partials(f"memory://{tmp_path.name}")
    assert is_published(place)


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    for name in (".a.parquet.123.partial", ".lock", "a.parquet", "b.partial"):
        (tmp_path / name).write_bytes(b"x")
    remove_partials(str(tmp_path))
    remove_partials(str(tmp_path / "none"))
    assert names(str(tmp_path)) == [".lock", "a.parquet", "b.partial"]


def without_last_row(content: bytes) -> bytes:
    rows = pq.read_table(io.BytesIO(content))
    fewer = io.BytesIO()
    pq.write_table(rows.slice(0, rows.num_rows - 1), fewer)
    return fewer.getvalue()


def test_both_stages_write_to_a_store_what_they_write_to_a_disk(tmp_path, tiny_model):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(30)])
    reading = Reading(str(tiny_model), "messages", "split", 64, 1 << 20, 0.0)
    form = RowFormat(8, 64, 3)
    made: list[bytes] = []
    for folder in (str(tmp_path / "out"), f"memory://{tmp_path.name}"):
        shards = cut(find_files([str(data)]), 500)
        for shard in shards:
            summary = make_documents(shard, reading, folder)
            assert make_documents(shard, reading, folder) == summary
        places = tuple(f"{folder}/{documents_name(shard)}" for shard in shards)
        lengths = read_lengths(places)
        plan = plan_rows(lengths.length, block_size=8, context_length=64, seed=0)
        part = Part(0, plan.row_count, f"{folder}/part.parquet")
        layout = Layout(np.arange(30), plan, lengths.bounds, places)
        assert write_part(part, layout, form) == checksum(part.place) == write_part(part, layout, form)
        filesystem, path = fsspec.url_to_fs(part.place)
        made.append(filesystem.cat_file(path))
        filesystem.pipe_file(path, without_last_row(made[-1]))
        write_part(part, layout, form)
        assert filesystem.cat_file(path) == made[-1], "what is there was not the rows of this plan"
    assert made[0] == made[1] and pq.read_metadata(tmp_path / "out" / "part.parquet").num_rows == plan.row_count
