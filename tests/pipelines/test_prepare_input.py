"""Bad input costs itself or ends the job in one sentence; so does a cluster that cannot do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.errors import JobError, UserError
from pipelines.chats.documents import Counts, Reading, Summary
from pipelines.chats.nodes import check_seen, wait_for_cpus
from pipelines.chats.rejects import check_rejected
from pipelines.chats.rows import RowFormat
from pipelines.chats.sources import InputFile, Shard
from pipelines.chats.stages import Lengths, ReadTask
from pipelines.jobkit import main
from pipelines.prepare import MixtureConfig, Packing, PrepareConfig, plan, run
from tests.pipelines.prepared import chat, sentence, write_lines

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


def test_as_many_bad_lines_as_are_allowed_are_allowed():
    good_and_bad = Summary("messages", lines=3, rejected={"empty chat": 2}, train=Counts(documents=1))
    check_rejected([good_and_bad], 2, [], "rejected.jsonl")
    with pytest.raises(UserError, match=r"2 lines were rejected \(2 empty chat\), more than --read.max_rejected 1"):
        check_rejected([good_and_bad], 1, [], "rejected.jsonl")


def test_a_missing_file_is_exit_2_and_leaves_no_output(prepare, tmp_path, capfd):
    result = prepare("--data", str(tmp_path / "none.jsonl"))
    assert result.code == 2
    assert "there is no such file" in sentence(capfd.readouterr().err)
    assert not result.output.exists()


def test_a_link_in_a_folder_that_leads_nowhere_is_exit_2_and_leaves_no_output(tmp_path, capsys):
    write_lines(tmp_path / "in\x1b[2J.jsonl", [chat("q", "a")])
    (tmp_path / "z\x1b[2J.jsonl").symlink_to("nowhere")
    words = ["--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main("prepare", PrepareConfig, run, plan, words) == 2
    told = sentence(capsys.readouterr().err)
    assert r"z\x1b[2J.jsonl cannot be read: No such file or directory (a link that leads nowhere)" in told
    assert not (tmp_path / "out").exists()


def test_a_mixture_takes_no_document_that_is_held_out_and_at_least_one():
    shards = [Shard(number, InputFile(f"{number}.jsonl", 1, number), 0, 1) for number in (0, 1)]
    tasks = [ReadTask(shard, Reading(None, "auto", "split", 128, 1, 0.0)) for shard in shards]
    lengths = Lengths(np.array([False, True, True, False]), np.full(4, 9), np.full(4, 9), np.array([0, 2, 4]))

    def members(**mixture: Any) -> np.ndarray:
        told = MixtureConfig(weights=(1, 1), **mixture)
        config = PrepareConfig(data=("0.jsonl", "1.jsonl"), mixture=told)
        return Packing(config, None, tasks, lengths, RowFormat(8, 128, 3)).training_members()[0]

    assert members().tolist() == [0, 3]
    for mixture in ({"tokens": 9}, {"repeat": 0.5}):
        with pytest.raises(UserError, match=r"takes no document: raise --mixture.tokens or --mixture.repeat"):
            members(**mixture)


def test_a_block_size_that_differs_from_the_checkpoints_is_refused(prepare, tmp_path, tiny_adapted_model, capfd):
    data = write_lines(tmp_path / "x.jsonl", [chat("q", "a")])
    result = prepare("--data", str(data), model=tiny_adapted_model, block=16)
    assert result.code == 2
    assert "was adapted with block_size 8, not 16: set --pack.block_size 8" in sentence(capfd.readouterr().err)
    assert prepare("--data", str(data), model=tiny_adapted_model, block=8).stats["mask_token_id"] == 3


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
