"""The prepare job: chats in, packed rows out, as the contract says."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipelines.jobkit import main
from pipelines.prepare import PrepareConfig, plan, run
from pipelines.tasks import generate
from tests.fake_hub import fake_hub
from tests.pipelines.prepared import TAIL, Prepared, chat, documents_of, supervised_text, write_lines
from tests.tiny import build_tiny_model


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
    assert stats["token_fill"] == round(stats["tokens"] / (rows.num_rows * 128), 4)
    in_blocks = sum(index != TAIL for row in rows["document_ids"].to_pylist() for index in row)
    assert stats["fill"] == round(in_blocks / (rows.num_rows * 128), 4)
    assert result.manifest["figures"] == stats
    written = {"stats.json", "report.html", "lengths.png", "rejected.jsonl", "part-00000.parquet"}
    assert {path.name for path in result.output.iterdir()} == {"manifest.json", *written}
    assert result.manifest["files"] == {name: sha256(result.output / name) for name in sorted(written)}


def sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_the_statistics_tell_the_files_apart(prepare, tmp_path):
    write_lines(tmp_path / "a.jsonl", [*(chat("q", "a" * n) for n in range(1, 21)), b"{broken", {"messages": []}])
    turns = [message for _ in range(2) for message in chat("q", "a" * 60)["messages"]]
    write_lines(tmp_path / "b.jsonl", [{"messages": turns}, {"messages": [{"role": "user", "content": "x"}]}])
    one, two = (
        prepare("--data", f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", "--held_out", "0.2").stats["files"].values()
    )
    prompt = len("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n") - len("|im_start|>") * 2 - len("|im_end|>")
    lengths = sorted(prompt + n + 2 for n in range(1, 21))
    assert one == {
        "format": "messages",
        "lines": 22,
        "documents": 20,
        "turns": 40,
        "pieces": 20,
        "tokens": sum(lengths),
        "supervised_tokens": sum(n + 1 for n in range(1, 21)),
        "supervised_share": round(sum(n + 1 for n in range(1, 21)) / sum(lengths), 4),
        "length": {"median": lengths[10], "p95": lengths[19], "longest": lengths[19]},
        "rejected": 2,
        "rejected_by_reason": {"empty chat": 1, "malformed JSON": 1},
    }
    assert (two["documents"], two["turns"], two["pieces"], two["supervised_tokens"]) == (1, 4, 2, 122)
    assert two["rejected_by_reason"] == {"no assistant turn": 1}


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
    assert set(result.manifest["files"]) == set(result.bytes())


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


def test_another_seed_orders_the_rows_otherwise_with_the_same_documents(prepare, tmp_path):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(40)])
    first, second = (prepare("--data", str(data), "--seed", seed, output=seed).rows() for seed in "01")
    assert first != second
    assert documents_of(first) == documents_of(second)


def test_the_plan_says_what_would_be_read_and_starts_nothing(tmp_path, capsys):
    data = write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    assert (
        main("prepare", PrepareConfig, run, plan, ["--data", str(data), "--output", str(tmp_path / "o"), "--dry-run"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "source: files" in shown and f"bytes: {data.stat().st_size}" in shown
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_the_job_runs_as_a_script_on_files_of_every_kind_and_a_hub_dataset(tmp_path, tiny_model, project):
    files = {f"data/train-{n}.jsonl": json.dumps(chat("hub", f"{n}")).encode() for n in range(2)}
    write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    pq.write_table(pa.Table.from_pylist([chat("parquet", "row")] * 3), tmp_path / "y.parquet")
    (tmp_path / "z.jsonl.zst").write_bytes(pa.compress(json.dumps(chat("z", "a")).encode(), codec="zstd", asbytes=True))
    data = ["x.jsonl", "y.parquet", "z.jsonl.zst", "owner/chats"]
    words = ["--model", str(tiny_model), "--pack.block_size", "8", "--pack.context_length", "64", "--data", *data]
    with fake_hub("owner/chats", files | {"data/test-0.jsonl": b"{}"}) as hub:
        done = subprocess.run(
            [sys.executable, str(project / "pipelines" / "prepare.py"), *words],
            cwd=tmp_path,
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    assert "7 documents with 14 turns" in done.stdout
    assert "Bearer hf_secret" in hub.tokens
    output = tmp_path / "out" / "prepare"
    assert not any(b"hf_secret" in path.read_bytes() for path in output.rglob("*") if path.is_file())
    assert [figures["documents"] for figures in Prepared(0, output).stats["files"].values()] == [1, 3, 1, 1, 1]
    inputs = list(Prepared(0, output).manifest["inputs"])
    assert inputs[0] == str(tmp_path / "x.jsonl") and inputs[3:] == [f"hf://datasets/owner/chats/{n}" for n in files]
