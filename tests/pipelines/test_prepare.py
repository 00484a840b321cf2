"""The prepare job: chats in, packed rows out, the same bytes however it is run, and a clear end for bad input."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model.errors import JobError, UserError
from pipelines import prepare as job
from pipelines.chats.nodes import check_seen, wait_for_cpus
from pipelines.jobkit import main
from pipelines.prepare import PrepareConfig, plan, run
from pipelines.tasks import generate
from tests.tiny import build_tiny_model

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


@pytest.fixture
def prepare(tmp_path: Path, tiny_model: Path, local_ray: None) -> Prepare:
    """Run the job in this process on the tiny model: small blocks and rows, two workers."""

    def call(*words: str, output: str = "out", model: Path = tiny_model, block: int = 8, row: int = 128) -> Prepared:
        place = tmp_path / output
        common = ["--model", str(model), "--output", str(place), "--workers", "2"]
        pack = ["--pack.block_size", str(block), "--pack.context_length", str(row)]
        return Prepared(main("prepare", PrepareConfig, run, plan, [*common, *pack, *words]), place)

    return call


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, lines: list[Any]) -> Path:
    raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def test_chats_become_rows_as_the_contract_says(prepare, tmp_path, tiny_model):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"q{n}", "a" * n) for n in range(1, 30)])
    result = prepare("--data", str(data))
    assert result.code == 0
    rows = result.rows()
    assert rows.schema.metadata == {b"block_size": b"8", b"context_length": b"128", b"mask_token_id": b"267"}
    assert {len(row) for name in rows.column_names for row in rows[name].to_pylist()} == {128}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    documents = documents_of(rows)
    assert sorted(documents) == list(range(29))
    for index, document in documents.items():
        assert supervised_text(tokenizer, document) == ["a" * (index + 1) + "<|im_end|>"]
        assert document.position_ids == list(range(len(document.position_ids)))
        assert len(document.input_ids) % 8 == 0
    stats = result.stats
    assert (stats["documents"], stats["turns"], stats["rows"], stats["rejected"]) == (29, 58, rows.num_rows, 0)
    mask = stats["mask_token_id"]
    assert stats["tokens"] == sum(token != mask for row in rows["input_ids"].to_pylist() for token in row)
    assert stats["supervised_tokens"] == sum(n + 1 for n in range(1, 30))
    assert stats["supervised_share"] == round(stats["supervised_tokens"] / stats["tokens"], 4)
    assert stats["fill"] == round(stats["tokens"] / (rows.num_rows * 128), 4)
    assert stats["files"][str(data)] == {"format": "messages", "lines": 29, "documents": 29, "rejected": 0}
    assert json.loads((result.output / "manifest.json").read_text())["figures"] == stats
    assert {path.name for path in result.output.iterdir()} == {
        "manifest.json", "stats.json", "rejected.jsonl", "part-00000.parquet",
    }  # fmt: skip


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_workers_and_any_shards(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "ROWS_PER_PART", 3)
    first = [chat(f"question {n}", f"answer {n} " * (n % 7 + 1)) for n in range(60)]
    write_lines(tmp_path / "a.jsonl", [*first[:20], b"{broken", *first[20:40]])
    write_lines(tmp_path / "b.jsonl", [*first[40:], b"", b"also broken"])
    data = ["--data", str(tmp_path / "*.jsonl"), "--held_out", "0.2"]
    one = prepare(*data, "--workers", "1", output="one")
    two = prepare(*data, "--workers", "2", output="two")
    many = prepare(*data, "--read.shard_bytes", "300", output="many")
    assert one.code == two.code == many.code == 0
    assert len(one.bytes()) > 6
    assert one.bytes() == two.bytes() == many.bytes()
    assert [(Path(line["file"]).name, line["line"]) for line in many.rejected] == [("a.jsonl", 21), ("b.jsonl", 22)]


def test_held_out_documents_are_chosen_by_content_and_in_no_training_row(prepare, tmp_path, tiny_model):
    chats = [chat(f"question {n}", f"answer {n}") for n in range(100)]
    data = write_lines(tmp_path / "x.jsonl", chats)
    result = prepare("--data", str(data), "--held_out", "0.3")
    turned = prepare(
        "--data", str(write_lines(tmp_path / "y.jsonl", chats[::-1])), "--held_out", "0.3", output="turned"
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def answers(prepared: Prepared, folder: str) -> set[str]:
        documents = documents_of(prepared.rows(folder)).values()
        return {text for document in documents for text in supervised_text(tokenizer, document)}

    train, held_out = answers(result, ""), answers(result, "held_out")
    assert not train & held_out and len(train | held_out) == 100
    assert 15 <= len(held_out) <= 45
    assert (answers(turned, ""), answers(turned, "held_out")) == (train, held_out)
    assert result.stats["held_out"]["documents"] == len(held_out)


def test_without_data_the_generated_tasks_are_prepared(prepare, tmp_path, tiny_model):
    result = prepare("--tasks.count", "40", "--tasks.held_out", "10", "--tasks.seed", "3", row=512)
    assert result.code == 0
    tasks = list(generate("train", 40, seed=3))
    lines = (result.output / "tasks" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [task.chat() for task in tasks]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    documents = documents_of(result.rows())
    for index, task in enumerate(tasks):
        assert supervised_text(tokenizer, documents[index]) == [f"{task.answer}<|im_end|>"]
    assert result.stats["held_out"]["documents"] == 10
    assert result.rows("held_out").num_rows == result.stats["held_out"]["rows"]


BAD_LINES: list[tuple[Any, str]] = [
    (b'{"messages": [', "malformed JSON: "),
    (b'"text"', "not an object: "),
    ({"messages": []}, "empty chat: "),
    ({"messages": [{"role": "user", "content": "alone"}]}, "no assistant turn: "),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "wrong role: message 1 has the role 'wizard'"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]}, "no content: message 2"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "broken UTF-8: byte 44"),
    (b'{"messages": "' + b"x" * 50_000_000 + b'"}', "line too long: 50,000,017 bytes"),
    ({"prompt": "other", "completion": "format"}, "missing key: there is no 'messages'"),
]


def test_every_bad_line_is_rejected_with_its_reason_and_nothing_valid_is_lost(prepare, tmp_path, capfd):
    lines: list[Any] = []
    for number, (line, _) in enumerate(BAD_LINES):
        lines += [chat(f"q{number}", "fine"), line]
    data = write_lines(tmp_path / "x.jsonl", lines)
    result = prepare("--data", str(data))
    assert result.code == 0
    assert result.stats["documents"] == len(BAD_LINES)
    assert result.stats["rejected"] == len(BAD_LINES) == sum(result.stats["rejected_by_reason"].values())
    for number, (found, (_, reason)) in enumerate(zip(result.rejected, BAD_LINES, strict=True)):
        assert found["file"] == str(data) and found["line"] == 2 * number + 2
        assert found["reason"].startswith(reason)
    out = capfd.readouterr()
    assert f"Rejected: {len(BAD_LINES)} lines" in out.out and "Traceback" not in out.err


def sentence(err: str) -> str:
    """The one sentence of a failed job."""
    lines = [line for line in err.splitlines() if line.startswith("prepare: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


@pytest.mark.parametrize(
    ("lines", "words", "expected"),
    [
        ([], [], "No valid chat is left in {data}: there are no lines."),
        ([b"", b""], [], "No valid chat is left in {data}: there are no lines."),
        ([b"{", {"messages": []}], [], "all lines were rejected (1 empty chat, 1 malformed JSON)"),
        ([{"who": "knows"}], [], "all lines were rejected (1 unknown format)"),
        ([{"messages": []}] * 3, [], "all lines were rejected (3 empty chat)"),
        (
            [chat("q", "a"), b"{", b"{"],
            ["--read.max_rejected", "1"],
            "2 lines were rejected (2 malformed JSON), more than",
        ),
        ([chat("q", "a")], ["--held_out", "0.999999"], "Every document was held out"),
        ([chat("q", "a" * 200)], ["--read.over_long", "reject"], "all lines were rejected (1 over-long)"),
    ],
    ids=[
        "empty",
        "blank",
        "malformed",
        "unknown_format",
        "empty_chats",
        "too_many_rejected",
        "all_held_out",
        "over_long",
    ],
)
def test_input_without_valid_chats_is_one_sentence_and_exit_2(prepare, tmp_path, capfd, lines, words, expected):
    data = write_lines(tmp_path / "x.jsonl", lines)
    result = prepare("--data", str(data), *words)
    assert result.code == 2
    assert expected.format(data=data) in sentence(capfd.readouterr().err)
    assert {path.name for path in result.output.iterdir()} == {"rejected.jsonl"}
    write_lines(data, [chat("q", "a")])
    assert prepare("--data", str(data)).code == 0, "the same output can be used once the input is mended"


def test_a_missing_file_is_exit_2_and_leaves_no_output(prepare, tmp_path, capfd):
    result = prepare("--data", str(tmp_path / "none.jsonl"))
    assert result.code == 2
    assert "there is no such file" in sentence(capfd.readouterr().err)
    assert not result.output.exists()


def test_a_block_size_that_differs_from_the_checkpoints_is_refused(prepare, tmp_path, tiny_adapted_model, capfd):
    data = write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    result = prepare("--data", str(data), model=tiny_adapted_model, block=16)
    assert result.code == 2
    assert "was adapted with block_size 8, not 16: set --pack.block_size 8" in sentence(capfd.readouterr().err)
    assert prepare("--data", str(data), model=tiny_adapted_model, block=8).stats["mask_token_id"] == 3


@pytest.mark.parametrize(
    ("policy", "documents", "figures"),
    [
        ("split", 3, {"split": 1, "truncated": 0, "dropped": 0, "documents": 2, "rejected": 0}),
        ("truncate", 2, {"split": 0, "truncated": 1, "dropped": 0, "documents": 2, "rejected": 0}),
        ("reject", 1, {"split": 0, "truncated": 0, "dropped": 0, "documents": 1, "rejected": 1}),
    ],
)
def test_a_document_longer_than_a_row_is_split_cut_or_rejected_and_counted(
    prepare, tmp_path, tiny_model, policy, documents, figures
):
    turns = [message for n in range(2) for message in chat(f"question {n}", f"answer {n} " * 5)["messages"]]
    data = write_lines(tmp_path / "x.jsonl", [{"messages": turns}, chat("q", "short")])
    result = prepare("--data", str(data), "--read.over_long", policy)
    packed = documents_of(result.rows())
    assert len(packed) == documents
    assert {name: result.stats[name] for name in figures} == figures
    if policy == "split":
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        texts = [text for index in sorted(packed) for text in supervised_text(tokenizer, packed[index])]
        assert texts == [f"answer {n} " * 5 + "<|im_end|>" for n in range(2)] + ["short<|im_end|>"]
        assert tokenizer.decode(packed[1].input_ids).startswith("<|im_start|>user\nquestion 1<|im_end|>")


def test_a_tokenizer_without_a_template_gets_the_plain_one_and_the_job_says_so(prepare, tmp_path, capfd):
    model = build_tiny_model(tmp_path / "plain", chat_template=None)
    result = prepare("--data", str(write_lines(tmp_path / "x.jsonl", [chat("q", "a")])), model=model)
    assert result.code == 0
    assert "has no chat template: the plain one of model/chat_template.py is used" in capfd.readouterr().err
    text = AutoTokenizer.from_pretrained(model).decode(documents_of(result.rows())[0].input_ids)
    assert text.startswith("<|im_start|>User:\nq\n\nAssistant:\na<|im_end|>\n\n")


@pytest.mark.slow
def test_an_interrupted_job_goes_on_where_it_was_and_ends_the_same(prepare, tmp_path, monkeypatch, capfd):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(40)])
    words = ["--data", str(data), "--read.shard_bytes", "1000"]
    whole = prepare(*words, output="whole")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job, "write_all_parts", interrupted)
        assert prepare(*words).code == 130
    assert "run the same command again" in capfd.readouterr().err
    made = sorted((tmp_path / "out" / ".documents").glob("*.documents.parquet"))
    assert len(made) > 2 and not list((tmp_path / "out").glob("part-*"))
    made[0].unlink()
    times = {path: path.stat().st_mtime_ns for path in made[1:]}

    def checked(*arguments: Any) -> Any:
        assert made[0].exists() and times == {path: path.stat().st_mtime_ns for path in made[1:]}
        return write_all_parts(*arguments)

    write_all_parts = job.write_all_parts
    monkeypatch.setattr(job, "write_all_parts", checked)
    result = prepare(*words)
    assert result.code == 0
    assert result.bytes() == whole.bytes()
    capfd.readouterr()
    assert prepare(*words).code == 0
    assert "is finished: nothing to do" in capfd.readouterr().out


def test_another_seed_orders_the_rows_otherwise_with_the_same_documents(prepare, tmp_path):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(40)])
    first, second = (prepare("--data", str(data), "--seed", seed, output=seed).rows() for seed in "01")
    assert first != second
    assert documents_of(first) == documents_of(second)


def test_an_output_on_another_filesystem_holds_the_same(prepare, tmp_path):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(10)])
    here = prepare("--data", str(data))
    there = f"file://{tmp_path}/there"
    assert prepare("--data", f"file://{data}", "--output", there).code == 0
    assert Prepared(0, tmp_path / "there").rows() == here.rows()


def test_the_plan_says_what_would_be_read_and_starts_nothing(tmp_path, capsys):
    data = write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    assert (
        main("prepare", PrepareConfig, run, plan, ["--data", str(data), "--output", str(tmp_path / "o"), "--dry-run"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "source: files" in shown and f"bytes: {data.stat().st_size}" in shown
    assert not (tmp_path / "o").exists()


def test_a_path_that_a_node_does_not_see_is_refused_by_name(local_ray, tmp_path):
    check_seen([("--data", str(tmp_path)), ("--output", "s3://bucket/rows"), ("--model", "owner/name")])
    with pytest.raises(UserError, match=r"--data /nowhere/x.jsonl is not seen by 1 of 1 nodes"):
        check_seen([("--output", str(tmp_path)), ("--data", "/nowhere/x.jsonl")])


def test_a_cluster_without_cpus_is_waited_for_and_then_given_up(local_ray, monkeypatch, capsys):
    wait_for_cpus(0.0)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 1.0})
    with pytest.raises(JobError, match=r"No node with a CPU joined within 0\.1 s"):
        wait_for_cpus(0.1)
    assert "have 0 of 1" in capsys.readouterr().err


# Real data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def qwen(shared: Path) -> Path:
    """The real Qwen2.5 tokenizer: a folder with no config.json."""
    return shared / "data" / "tokenizers" / "qwen2_5"


@pytest.mark.slow
def test_gsm8k_with_the_qwen_tokenizer(prepare, shared, tmp_path, qwen):
    source = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:150]
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("\n".join(source))
    result = prepare("--data", str(data), model=qwen, block=32, row=512)
    assert result.code == 0
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    documents = documents_of(result.rows())
    for index, line in enumerate(source):
        record = json.loads(line)
        assert supervised_text(tokenizer, documents[index]) == [f"{record['answer']}<|im_end|>"]
        assert record["question"] in tokenizer.decode(documents[index].input_ids)
    assert result.stats["mask_token_id"] == 151665
    assert result.stats["fill"] > 0.85


@pytest.mark.slow
def test_gpteacher_of_all_parts_compressed_with_the_qwen_tokenizer(prepare, shared, tmp_path, qwen):
    total = 0
    for name in ("codegen", "roleplay", "toolformer"):
        with (
            gzip.open(shared / "data" / "gpteacher" / f"{name}.jsonl.gz") as file,
            gzip.open(tmp_path / f"{name}.jsonl.gz", "wb") as out,
        ):
            lines = list(islice(file, 100))
            out.writelines(lines)
            total += len(lines)
    result = prepare("--data", str(tmp_path), model=qwen, block=32, row=256, output="../out")
    assert result.code == 0
    stats = result.stats
    assert stats["documents"] + stats["rejected"] == total == 300
    assert stats["split"] > 0 and 0.2 < stats["supervised_share"] < 0.95
    assert len(documents_of(result.rows())) == stats["pieces"]
    assert {file["format"] for file in stats["files"].values()} == {"messages"}


@pytest.mark.slow
def test_the_job_runs_as_a_script_from_another_directory(tmp_path, tiny_model, project):
    data = write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    words = ["--model", str(tiny_model), "--data", "x.jsonl", "--pack.block_size", "8", "--pack.context_length", "64"]
    done = subprocess.run(
        [sys.executable, str(project / "pipelines" / "prepare.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "1 documents with 2 turns" in done.stdout
    output = tmp_path / "out" / "prepare"
    assert documents_of(Prepared(0, output).rows())[0].labels.count(IGNORED) < 64
    assert str(data) in json.loads((output / "manifest.json").read_text())["inputs"]
    shutil.rmtree(output)


def test_a_full_disk_ends_in_one_sentence(prepare, tmp_path, monkeypatch, capfd):
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device", "part-00000.parquet")

    monkeypatch.setattr(job, "write_all_parts", full)
    result = prepare("--data", str(write_lines(tmp_path / "x.jsonl", [chat("q", "a")])))
    assert result.code == 1
    assert "No space left for part-00000.parquet" in sentence(capfd.readouterr().err)
    assert not list(result.output.glob("part-*"))
