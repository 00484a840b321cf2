"""Real chats through the real Qwen2.5 tokenizer."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipelines.chats.documents import encoder_of
from pipelines.chats.lines import format_of, read_shard
from pipelines.chats.pack import plan_rows
from pipelines.chats.records import parse
from pipelines.chats.sources import cut, find_files
from tests.pipelines.prepared import documents_of, supervised_text


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
    assert result.stats["fill"] > 0.97 and result.stats["token_fill"] > 0.85


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
@pytest.mark.parametrize(
    ("pattern", "token_fill"), [("gsm8k/train.jsonl", 0.92), ("gpteacher/*.jsonl.gz", 0.89)], ids=["gsm8k", "gpteacher"]
)
def test_rows_of_2048_are_full(shared, qwen, at_length, pattern, token_fill):
    """At least 99% with the padding of blocks; a part of the data already, all of it with --at-length."""
    encoder = encoder_of(str(qwen))
    documents = []
    for file in find_files([f"{shared}/data/{pattern}"]):
        (shard,) = cut([file], 1 << 40)
        found = format_of(file, 1 << 20)
        lines = read_shard(shard, 1 << 20)
        documents += [parse(line.value, str(found)) for line in (lines if at_length else islice(lines, 1000))]
    lengths = np.array([len(one) for encoded in encoder.encode(documents) for one in encoded])
    plan = plan_rows(lengths, block_size=32, context_length=2048, seed=0)
    blocks = -(-lengths // 32) * 32
    assert blocks.sum() / (plan.row_count * 2048) >= 0.99
    assert lengths.sum() / (plan.row_count * 2048) == pytest.approx(token_fill, abs=0.015)
