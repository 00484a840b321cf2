"""Files are read line by line: a bad line costs itself, and shards together give every line once."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import JobError, UserError
from pipelines.chats.lines import BATCH_LINES, BLANK, Line, batches, format_of, read_shard
from pipelines.chats.records import Rejected
from pipelines.chats.sources import InputFile, cut, find_files, train_split
from tests.fake_hub import fake_hub

LIMIT = 1 << 20


def lines_of(path: Path, *, shard_bytes: int = 1 << 30, limit: int = LIMIT) -> list[Line]:
    """All lines of a file, numbered through."""
    found: list[Line] = []
    for shard in cut(find_files([str(path)]), shard_bytes):
        offset = found[-1].number if found else 0
        found += [Line(line.number + offset, line.value) for line in read_shard(shard, limit)]
    return found


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab é\U0001f600", max_size=12), max_size=12),
    shard_bytes=st.integers(1, 60),
    last_newline=st.booleans(),
)
def test_shards_of_any_size_give_every_line_once_and_in_order(tmp_path_factory, texts, shard_bytes, last_newline):
    content = b"\n".join(json.dumps(text, ensure_ascii=False).encode() for text in texts)
    path = written(tmp_path_factory.mktemp("shards") / "x.jsonl", content + b"\n" * bool(texts and last_newline))
    found = lines_of(path, shard_bytes=shard_bytes)
    assert [(line.number, line.value) for line in found] == list(enumerate(texts, 1))


def test_a_bad_line_costs_only_itself(tmp_path):
    content = b'\xef\xbb\xbf{"a": 1}\n{"a": \n\n{"a": "\xff"}\n[1]\r\n{"a": 2}'
    found = lines_of(written(tmp_path / "x.jsonl", content))
    assert [line.number for line in found] == [1, 2, 3, 4, 5, 6]
    assert (found[0].value, found[2].value, found[4].value, found[5].value) == ({"a": 1}, BLANK, [1], {"a": 2})
    assert str(found[1].value).startswith("malformed JSON: Expecting value at character")
    assert str(found[3].value) == "broken UTF-8: byte 8 of the line is invalid start byte"


def test_json_that_no_parser_can_hold_is_rejected(tmp_path):
    content = b"[" * 200_000 + b"\n" + b"9" * 5000 + b"\n{}\n"
    first, second, third = lines_of(written(tmp_path / "x.jsonl", content))
    assert first.value.kind == second.value.kind == "malformed JSON"
    assert third.value == {}


def test_a_line_of_50_mb_is_skipped_without_being_held(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n{"text": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"a": 2}\n')
    tracemalloc.start()
    found = lines_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.bad for line in found] == [False, True, False]
    assert str(found[1].value) == "line too long: 50,000,013 bytes, --read.max_line_bytes is 1,048,576"
    assert peak < 8_000_000


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    path = written(tmp_path / "x.jsonl", b'"12345678"\n"123456789"\n"1"')
    assert [line.bad for line in lines_of(path, limit=10)] == [False, True, False]


def zstd(content: bytes) -> bytes:
    """Two frames, as tools that compress in parallel write them."""
    middle = len(content) // 2
    return b"".join(pa.compress(half, codec="zstd", asbytes=True) for half in (content[:middle], content[middle:]))


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd)]
)
def test_compressed_files_are_read_by_their_ending(tmp_path, ending, compress):
    path = written(tmp_path / f"x.jsonl{ending}", compress(b'{"a": 1}\n{"a": 2}\n'))
    assert [line.value for line in lines_of(path, shard_bytes=3)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_a_compressed_file_that_breaks_off_keeps_the_lines_before(tmp_path, ending, compress):
    lines = b"".join(
        json.dumps({"n": number, "x": f"{number * 7919:x}" * 40}).encode() + b"\n" for number in range(3000)
    )
    path = written(tmp_path / f"x.jsonl{ending}", compress(lines)[:-5000])
    found = lines_of(path)
    assert len(found) > 100
    assert [line.value["n"] for line in found[:-1]] == list(range(len(found) - 1))
    assert found[-1].value.kind == "file breaks off"


def test_a_file_that_is_not_what_its_ending_says_is_rejected_or_refused(tmp_path):
    assert lines_of(written(tmp_path / "x.jsonl.gz", b"plain"))[0].value.kind == "file breaks off"
    with pytest.raises(UserError, match=r"--data .*x.parquet is no Parquet file .*make it again, or leave"):
        lines_of(written(tmp_path / "x.parquet", b"plain"))
    (gone,) = find_files([str(tmp_path / "x.parquet")])
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(UserError, match=r"--data .*x.parquet cannot be read: No such file or directory"):
        list(cut([gone], 1))


def test_an_empty_file_has_no_lines(tmp_path):
    assert lines_of(written(tmp_path / "x.jsonl", b"")) == []
    assert lines_of(written(tmp_path / "x.json", b"")) == []


def test_a_json_file_may_be_one_array(tmp_path):
    path = written(tmp_path / "x.json", b' [\n {"a": 1},\n {"a": 2}\n]\n')
    assert [(line.number, line.value) for line in lines_of(path, shard_bytes=2)] == [(1, {"a": 1}), (2, {"a": 2})]
    (array,) = lines_of(written(tmp_path / "x.json.zst", zstd(b'[{"a": 1}]')))
    assert array.value == {"a": 1}
    assert lines_of(written(tmp_path / "y.json", b'[{"a": 1}, {]'))[0].value.kind == "malformed JSON"
    assert lines_of(written(tmp_path / "z.json", b'{"a": 1}\n{"a": 2}\n'))[1].value == {"a": 2}


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_parquet_rows_are_records(tmp_path, shard_bytes):
    rows = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=3)
    found = lines_of(tmp_path / "x.parquet", shard_bytes=shard_bytes)
    assert [(line.number, line.value) for line in found] == list(enumerate(rows, 1))


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_a_damaged_row_group_costs_its_rows_and_the_next_keeps_its_numbers(tmp_path, shard_bytes):
    rows = [{"text": f"{number:08}" * 20} for number in range(900)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    at = content.index(b"00000310" * 20) - 4
    content[at : at + 4] = b"\xff" * 4  # the length of that text
    path.write_bytes(content)
    lines = lines_of(path, shard_bytes=shard_bytes)
    assert [line.number for line in lines] == list(range(1, 901))
    lost = [index for index, line in enumerate(lines) if line.bad]
    assert lost == list(range(lost[0], 600)) and 300 <= lost[0] <= 310
    assert {line.value.kind for line in lines if line.bad} == {"damaged row group"}
    assert [line.value for line in lines if not line.bad] == rows[: lost[0]] + rows[600:]


def test_a_parquet_value_that_cannot_be_held_costs_its_row_and_other_columns_are_not_read(tmp_path):
    broken = pa.array([b"fine", b"\xff", b"good"]).view(pa.string())
    years = pa.array([0, 2**52, 0], pa.timestamp("ms"))
    pq.write_table(pa.table({"text": broken, "when": years}), tmp_path / "x.parquet")
    first, second, third = lines_of(tmp_path / "x.parquet")
    assert (first.value, third.value) == ({"text": "fine"}, {"text": "good"})
    assert str(second.value) == "broken UTF-8: byte 1 of a text is invalid start byte"
    pq.write_table(pa.table({"messages": years}), tmp_path / "y.parquet")
    assert [line.bad for line in lines_of(tmp_path / "y.parquet")] == [False, True, False]


def test_a_parquet_row_above_the_limit_is_rejected(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"text": "x" * 50}, {"text": "y"}]), tmp_path / "x.parquet")
    first, second = lines_of(tmp_path / "x.parquet", limit=20)
    assert first.value.kind == "line too long"
    assert second.value == {"text": "y"}


def test_batches_are_bounded_in_lines_and_bytes():
    sizes = [
        [line.size for line in batch] for batch in batches(Line(n, None, size) for n, size in enumerate([3 << 20] * 3))
    ]
    assert sizes == [[3 << 20]] * 3
    assert [len(batch) for batch in batches(Line(n, None, 1) for n in range(BATCH_LINES + 1))] == [BATCH_LINES, 1]


def test_the_format_is_found_behind_bad_lines(tmp_path):
    path = written(tmp_path / "x.jsonl", b"oops\n\n5\n" + b'{"prompt": "a", "completion": "b"}\n' * 3)
    file = find_files([str(path)])[0]
    assert format_of(file, LIMIT) == "prompt_completion"
    assert format_of(find_files([str(written(tmp_path / "y.jsonl", b'{"z": 1}\n'))])[0], LIMIT) is None


def test_sources_are_files_folders_and_globs_in_order(tmp_path):
    names = ("b.jsonl", "a.jsonl", "c.parquet.txt", "deep/d.json.gz", "_hidden.jsonl", ".x/e.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def found(*sources: str) -> list[str]:
        return [str(Path(file.uri).relative_to(tmp_path)) for file in find_files([f"{tmp_path}/{s}" for s in sources])]

    assert found("") == ["a.jsonl", "b.jsonl", "deep/d.json.gz"]
    assert found("b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]
    assert found("?.jsonl") == ["a.jsonl", "b.jsonl"]
    assert found("c.parquet.txt") == ["c.parquet.txt"]
    with pytest.raises(UserError, match=r"names .*a\.jsonl twice"):
        found("", "a.jsonl")


def test_a_uri_of_another_filesystem_is_read_the_same_way():
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/chats/x.jsonl", b'{"a": 1}\n{"a": 2}\n')
    (file,) = find_files(["memory://chats"])
    shards = cut([file], 9)
    assert file == InputFile("memory:///chats/x.jsonl", 18)
    assert [line.value for shard in shards for line in read_shard(shard, LIMIT)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.zst", "x.jsonl.gz"])
def test_a_file_behind_http_is_read_in_shards_with_bounded_lines(name):
    content = b'{"a": 1}\n' + b'"' + b"y" * 3000 + b'"\n' + b'{"a": 2}\n'
    packed = {".zst": zstd, ".gz": gzip.compress}.get(Path(name).suffix, bytes)(content)
    with fake_hub("owner/chats", {name: packed}) as hub:
        (file,) = find_files([f"{hub.url}/datasets/owner/chats/resolve/main/{name}"])
        found = [line.value for shard in cut([file], 100) for line in read_shard(shard, 1000)]
    assert [found[0], found[2]] == [{"a": 1}, {"a": 2}]
    assert found[1].kind == "line too long"


@pytest.mark.parametrize("source", ["nothing.jsonl", "none/*.jsonl", "empty_folder", "nosuch://x"])
def test_a_source_that_names_nothing_is_refused(tmp_path, source):
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(UserError, match="--data"):
        find_files([source if "://" in source else f"{tmp_path}/{source}"])


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(UserError, match="cannot be read: Too many levels of symbolic links"):
        find_files([str(tmp_path / "loop.jsonl")])


def test_a_server_that_does_not_answer_is_told_apart_from_a_file_that_is_not_there():
    with fake_hub("owner/chats", {}) as hub, pytest.raises(UserError, match="there is no such file"):
        find_files([f"{hub.url}/datasets/owner/chats/resolve/main/x.jsonl"])
    with pytest.raises(JobError, match=r"--data .*/x.jsonl cannot be read: Cannot connect to host"):
        find_files(["http://127.0.0.1:1/x.jsonl"])


def test_a_hub_dataset_that_cannot_be_asked_for_says_both_things(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, JobError), match="no file here"):
        find_files(["nobody/nothing"])


def test_a_hub_dataset_means_its_train_split_of_one_configuration():
    assert train_split("o/n", ["README.jsonl", "main/test-0.parquet", "main/train-0.parquet"]) == [
        "main/train-0.parquet"
    ]
    assert train_split("o/n", ["a.jsonl", "b.jsonl"]) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(UserError, match=r"several configurations \(main, socratic\).*hf://datasets/o/n/socratic"):
        train_split("o/n", ["main/train.parquet", "socratic/train.parquet"])
    with pytest.raises(UserError, match="holds no JSONL or Parquet"):
        train_split("o/n", [])


def test_rejections_keep_their_kind_apart_from_the_detail():
    assert (Rejected("kind", "why").kind, str(Rejected("kind", "why")), str(Rejected("kind"))) == (
        "kind",
        "kind: why",
        "kind",
    )
