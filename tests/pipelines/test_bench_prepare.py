"""bench prepare: both sides find the same tokens in the same chats, or the bench fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.errors import JobError
from pipelines.bench import start
from pipelines.benches.prepare.core import OURS, REFERENCE, Outcome, _check_same
from pipelines.benches.prepare.reference import MARKED, _group, _tokenize
from pipelines.chats.rows import IGNORED, RowFormat
from tests.pipelines.prepared import chat, write_lines


@pytest.mark.slow
def test_both_sides_find_the_same_tokens_and_the_job_scales_them(
    local_ray: None, tiny_model: Path, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "chats.jsonl", [chat(f"question {n}", f"answer {n} é " * 3) for n in range(60)])
    words = ["--model", tiny_model, "--data", data, "--rounds", 1, "--copies", 1, "--shard_bytes", 3000]
    words += ["--parts", "core", "scaling", "memory", "--stores", 1e-4, 3e-4]
    pack = ["--pack.block_size", 8, "--pack.context_length", 256]
    output = tmp_path / "prepare.json"
    assert start(["prepare", "--output", str(output), *map(str, [*words, *pack])]) == 0
    content = json.loads(output.read_text())
    table = content["table"]
    ours, theirs, *jobs, small, large = table
    assert (ours["form"], theirs["form"]) == (OURS, REFERENCE)
    assert ours["tokens"] == theirs["tokens"] == jobs[0]["tokens"] == jobs[1]["tokens"]
    assert ours["supervised"] == theirs["supervised"] > 0
    assert ours["fill"] > ours["real tokens"] > 0.5
    assert [line["workers"] for line in jobs] == [1, 2]
    assert all(line["CPU s"] > 0 and line["worker MiB"] > 0 for line in jobs)
    assert large["documents"] > small["documents"] > 0 < small["worker MiB"] and "wall s" not in small
    assert "driver's peak memory, at 0.0003 object stores over 0.0001" in content["ratios"]


def test_the_published_way_cuts_samples_and_pads_aligned_ones_with_a_block_too_many(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = MARKED
    samples = _tokenize({"messages": [chat("q", "a" * n)["messages"] for n in (1, 30)]}, tokenizer)
    learnt = [[i for i in labels if i != IGNORED] for labels in samples["labels"]]
    assert [tokenizer.decode(ids) for ids in learnt] == ["a<|im_end|>", "a" * 30 + "<|im_end|>"]
    form = RowFormat(8, 16, 99)
    one = {name: [[1] * 8, [2] * 9] for name in ("input_ids", "attention_mask", "labels")}
    rows = _group(one, form)["input_ids"]
    assert rows == [[1] * 8 + [99] * 8, [2] * 9 + [99] * 7]


def test_sides_that_did_not_read_the_same_fail_the_bench() -> None:
    with pytest.raises(JobError, match=r"found 5 tokens, 2 of them supervised, datasets.map 5 and 3: not the same"):
        _check_same("x", {OURS: Outcome(5, 2, 1), REFERENCE: Outcome(5, 3, 1)})
