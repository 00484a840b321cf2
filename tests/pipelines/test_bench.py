"""bench: the forms that are compared compute the same, the JSON is as promised, and a ratio is taken within a round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from model.backbone import load_backbone
from model.corruption import IGNORED, draw_noise, row_generator
from model.errors import JobError
from pipelines.bench import start
from pipelines.benches import memory, reference, train_memory
from pipelines.benches.timing import Times, take_turns
from pipelines.benches.train_step import Shape, Step, check_equal
from tests import oracles
from tests.model.rows import MASK, random_rows

SEED = 0
KEYS = {"bench", "machine", "runs", "table", "ratios"}
MACHINE_KEYS = {"cpu", "instructions", "threads", "torch", "dtype"}


def bench(name: str, output: Path, *words: object) -> dict[str, Any]:
    """Run a bench and return its JSON, which has the promised shape."""
    assert start([name, "--output", str(output), *map(str, words)]) == 0
    content: dict[str, Any] = json.loads(output.read_text())
    assert content.keys() >= KEYS
    assert content["machine"].keys() >= MACHINE_KEYS
    assert content["bench"] == name
    assert content["table"]
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in content["ratios"].values())
    return content


TRAIN = [
    "--dtype", "float32", "--length", 128, "--block_size", 16, "--rows", 2, "--rounds", 2, "--layers", 0, 1,
    "--memory", "false", "--shares", "false",
]  # fmt: skip


@pytest.fixture(scope="module")
def train_result(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "train.json"
    bench("train", output, "--model", tiny_model, *TRAIN)
    return output


# ------------------------------------------------------------------------------------------------- train
def test_the_forms_of_the_training_step_have_equal_loss_and_gradient_norm(train_result: Path) -> None:
    content = json.loads(train_result.read_text())
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in content["table"]:
        cases.setdefault((line["rows"], line["layers"]), []).append(line)
    assert set(cases) == {(rows, layers) for rows in ("full", "tasks") for layers in (2, 1)}
    for lines in cases.values():
        assert [line["form"] for line in lines] == ["reference", "three streams", "trained"]
        reference_line, *ours = lines
        for line in ours:
            assert line["loss"] == pytest.approx(reference_line["loss"], rel=1e-5)
            assert line["gradient norm"] == pytest.approx(reference_line["gradient norm"], rel=1e-4)


def test_three_streams_run_three_tokens_for_the_references_four_and_training_fewer(train_result: Path) -> None:
    tokens = {
        (line["rows"], line["form"]): line["network tokens"] for line in json.loads(train_result.read_text())["table"]
    }
    for rows in ("full", "tasks"):
        assert tokens[rows, "reference"] == 4 * 2 * 128
        assert tokens[rows, "three streams"] == 3 * 2 * 128
        assert tokens[rows, "trained"] < tokens[rows, "three streams"]
    assert tokens["tasks", "trained"] < tokens["full", "trained"]


def test_a_step_that_computes_something_else_fails_the_bench() -> None:
    expected = Step(loss=2.0, gradient_norm=3.0, tokens=8)
    check_equal("case", "form", Step(2.00001, 3.0001, 6), expected, "float32")
    for wrong in (Step(2.00004, 3.0, 6), Step(2.0, 3.1, 6), Step(float("nan"), 3.0, 6)):
        with pytest.raises(JobError, match="not the same step"):
            check_equal("case", "form", wrong, expected, "float32")


@pytest.mark.parametrize("rows_in_a_step", [1, 3])
def test_the_reference_form_is_the_published_loss_written_out(tiny_model: Path, rows_in_a_step: int) -> None:
    model = load_backbone(tiny_model, dtype=torch.float64).model
    rows = random_rows(SEED, rows=rows_in_a_step)
    heads = (rows.position_ids == 0) & (rows.labels != IGNORED)
    assert heads[:, 1:].any()  # first tokens of documents, which nothing predicts
    noise = (draw_noise(rows.input_ids.shape[1], 8, row_generator(SEED, i, 0))[1] for i in range(rows_in_a_step))
    mask = torch.stack(list(noise))
    gradients = []
    losses = [
        reference.reference_loss(model, rows, mask, MASK, 8),
        oracles.reference_loss(model, rows, mask, MASK, 8, streams=2),
    ]
    for loss in losses:
        model.zero_grad()
        loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-11)
    assert float((gradients[0] - gradients[1]).abs().max()) <= 1e-6 * float(gradients[1].abs().max())


@pytest.mark.slow
# ------------------------------------------------------------------------------------------------- attention
def test_attention_is_measured_by_length_with_peak_memory(tmp_path: Path) -> None:
    content = bench(
        "attention", tmp_path / "a.json", "--lengths", 64, 128, "--rounds", 2, "--flex", "false", "--dtype", "float32"
    )
    forms = ["structured", "dense 3L", "dense 2 x 2L"]
    assert [(line["L"], line["form"]) for line in content["table"]] == [(n, f) for n in (64, 128) for f in forms]
    assert all(line["forward ms"] > 0 and line["peak MiB, both"] >= 0 for line in content["table"])
    masks = {(line["L"], line["form"]): line["mask MiB"] for line in content["table"]}
    assert masks[128, "structured"] == 0
    assert masks[128, "dense 3L"] == 4 * masks[64, "dense 3L"] == 4 * (3 * 64) ** 2 * 4 / 2**20
    assert set(content["ratios"]) == {f"structured over {f}, L {n}" for f in forms[1:] for n in (64, 128)}


@pytest.mark.slow
def test_flex_takes_part_forward_only_where_it_has_no_backward(tmp_path: Path) -> None:
    content = bench("attention", tmp_path / "a.json", "--lengths", 128, "--rounds", 1, "--dtype", "float32")
    flex = content["table"][-1]
    assert flex["form"] == "flex"
    assert flex["forward ms"] > 0
    assert (flex["forward + backward ms"] is None) == (not torch.cuda.is_available())


def test_peak_memory_counts_what_a_call_held_at_once() -> None:
    def form() -> None:
        first = torch.ones(16 << 20)  # 64 MiB
        second = first + 1
        del first, second
        torch.ones(16 << 20)

    peaks = [memory.peak_bytes(form, "cpu") / 2**20 for _ in range(3)]  # other threads of this process only add
    assert 120 <= min(peaks) <= 170, "two at once, not three in all"


def killed(*_: object) -> None:
    """In the place of a measurement for which memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_form_that_needs_more_memory_than_there_is_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_memory, "_measure", killed)
    with pytest.raises(JobError, match=r"'reference' \(4 x 2048\) was killed, .*fewer --layers or --rows"):
        train_memory.peak_of("", Shape("full", 2048, 4, 6, 32, "float32", 0), "reference", 1)


# ------------------------------------------------------------------------------------------------- decode
def test_decoding_is_measured_by_query_length_and_by_answers(tiny_adapted_model: Path, tmp_path: Path) -> None:
    small = ["--cached", 32, "--queries", 1, 4, 8, "--batches", 1, 2, "--rounds", 1, "--rounds_each", 2]
    answers = ["--answer", 16, "--steps", 8, 2, "--tasks", 2, "--max_tokens", 8]
    content = bench(
        "decode", tmp_path / "d.json", "--model", tiny_adapted_model, "--dtype", "float32", *small, *answers
    )
    lines = {(line["part"], line["batch"], line["decoder"]): line for line in content["table"]}
    assert [decoder for part, batch, decoder in lines if (part, batch) == ("round", 2)] == [
        "1 token", "4 tokens", "8 tokens"
    ]  # fmt: skip
    assert lines["round", 1, "1 token"]["break-even"] == 1
    for batch in (1, 2):
        fixed = {name: lines["fixed length", batch, name] for name in ("AR", "blocks, 8 steps", "blocks, 2 steps")}
        assert all(line["tokens"] == 16 * batch for line in fixed.values())
        assert fixed["blocks, 2 steps"]["per forward"] > 2 > fixed["blocks, 8 steps"]["per forward"]
        assert ("tasks", batch, "blocks, threshold 0.9") in lines
    assert "break-even tokens per forward, 4-token rounds, batch 2" in content["ratios"]


def test_a_model_that_was_not_adapted_is_measured_and_called_so(tiny_model: Path, tmp_path: Path) -> None:
    small = ["--cached", 32, "--queries", 1, 4, "--batches", 1, "--rounds", 1, "--answer", 8, "--dtype", "float32"]
    content = bench("decode", tmp_path / "d.json", "--model", tiny_model, *small)
    assert "not adapted: how fast, not how good" in content["note"]
    assert {line["part"] for line in content["table"]} == {"round", "fixed length"}


# ------------------------------------------------------------------------------------------------- timing and results
def test_forms_take_turns_and_begin_in_turn() -> None:
    calls: list[str] = []
    times = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, 3, warm_up=0)  # type: ignore[misc]
    assert "".join(calls) == "abcbcacab"
    assert all(len(seconds) == 3 for seconds in times.seconds.values())


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    times = Times({"slow": [2.0, 30.0, 8.0], "fast": [1.0, 10.0, 2.0]})  # the machine was slow in round two
    assert times.ratio("slow", "fast") == 3.0
    assert times.median("slow") == 8.0


def test_the_page_of_results_holds_machine_date_and_every_ratio(train_result: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    assert start(["report", "--data", str(train_result.parent / "*.json"), "--output", str(page)]) == 0
    content, text = json.loads(train_result.read_text()), page.read_text()
    assert content["date"] == time.strftime("%Y-%m-%d")
    name = train_result.stem
    for expected in (f"](#{name})", f"## {name}", content["date"], content["machine"]["cpu"], *content["ratios"]):
        assert expected in text
    assert str(train_result.parent) not in text + train_result.read_text()


def test_a_finished_bench_shows_its_table_again(
    train_result: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(word) for word in (*TRAIN, "--model", tiny_model)]
    assert start(["train", "--output", str(train_result), *words]) == 0
    assert "remove it to measure again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage"),
        (["trian"], "did you mean 'train'"),
        (["train", "--length", "100"], "not a multiple"),
        (["train", "--layers", "99", "--model", "MODEL"], "has 2 layers"),
        (["train", "--data", "x"], "leave --data out"),
        (["train", "--model", "/no/such/model"], "no such folder"),
        (["attention", "--kv_heads", "2"], "does not divide"),
        (["attention", "--lengths", "100"], "not a multiple"),
        (["decode", "--cached", "100"], "not a multiple"),
        (["decode", "--round", "3"], "did you mean --rounds"),
        (["report"], "--data is required"),
        (["report", "--data", "/no/such.json"], "not the JSON of a bench"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(
    words: list[str], message: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tiny_model) if word == "MODEL" else word for word in words]
    output = ["--output", str(tmp_path / "out.json")] if words else []
    assert start([*given, *output]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_bench_runs_as_a_script_from_another_directory(
    project: Path, tiny_model: Path, tmp_path: Path, at_length: bool
) -> None:
    """Peak memory takes a process for each form, half a minute: only at length."""
    words = ["--length", 64, "--block_size", 16, "--rows", 1, "--rounds", 1, "--layers", 0, "--shares", "false"]
    words += ["--memory", at_length]
    command = [sys.executable, project / "pipelines" / "bench.py", "train", "--model", tiny_model, *words]
    command += ["--output", "train.json"]
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "train.json").read_text())
    assert content["bench"] == "train"
    if not at_length:
        return
    peaks = {(line["rows"], line["form"]): line.get("peak MiB") for line in content["table"]}
    for rows in ("full", "tasks"):
        assert 0 < peaks[rows, "trained"] < peaks[rows, "reference"]
        assert peaks[rows, "three streams"] is None
