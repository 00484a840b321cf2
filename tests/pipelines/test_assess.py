"""assess: the table says what the raw answers say, everyone is asked the same, and bad input ends in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from actors.training.rows import RowFormat
from model.backbone import load_backbone
from model.corruption import IGNORED
from model.errors import UserError
from model.objective import held_out_loss, make_objective
from pipelines.assess import AssessConfig, plan, run
from pipelines.assessment.contenders import find_subjects, make_contenders
from pipelines.assessment.figures import wilson
from pipelines.assessment.held_out import each_row, pack_tasks
from pipelines.assessment.journal import Journal
from pipelines.assessment.measuring import Settings, measure
from pipelines.assessment.questions import task_questions
from pipelines.chats.rows import Placed, build_rows
from pipelines.jobkit import DecodeSection, main
from pipelines.tasks import generate
from tests.tiny import tiny_tokenizer

COUNT = 10
LABELS = ["base, AR", "adapted, AR", "adapted, blocks 0.9", "adapted, blocks 0.02"]
BLOCK, MASK = 8, 3  # of the tiny adapted model


@dataclass(frozen=True)
class Assessed:
    """What a run left in its output folder."""

    folder: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def answers(self, label: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("answers.jsonl") if line["contender"] == label]

    @property
    def figures(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return manifest["figures"]

    @property
    def report(self) -> str:
        return (self.folder / "report.md").read_text(encoding="utf-8")

    def table(self) -> dict[str, list[str]]:
        """The cells of the report's first table by contender."""
        rows = [line.strip("| ").split(" | ") for line in self.report.splitlines() if line.startswith("| ")]
        return {row[0]: row[1:] for row in rows[2 : 2 + len(LABELS)]}


def assess(output: Path, *words: object) -> int:
    argv = ["--output", str(output), "--max_tokens", "12", *map(str, words)]
    return main("assess", AssessConfig, run, plan, argv=argv)


@pytest.fixture(scope="module")
def assessed(tiny_model: Path, tiny_adapted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Assessed:
    folder = tmp_path_factory.mktemp("assess") / "out"
    words = ["--base", tiny_model, "--model", tiny_adapted_model, "--thresholds", 0.9, 0.02]
    small = ["--tasks.count", COUNT, "--held_out.tasks", 6, "--engine.max_rows", 2]
    assert assess(folder, *words, *small) == 0
    return Assessed(folder)


def write(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------- what comes out
def test_the_table_says_what_the_raw_answers_say(assessed: Assessed) -> None:
    assert list(assessed.table()) == LABELS
    for label, figures in zip(LABELS, assessed.figures["contenders"], strict=True):
        answers = assessed.answers(label)
        seconds = sum(line["seconds"] for line in assessed.lines("rounds.jsonl") if line["contender"] == label)
        tokens = sum(len(answer["token_ids"]) for answer in answers)
        forwards = [answer["diffusion"]["forwards"] for answer in answers]
        correct = sum(answer["correct"] for answer in answers)
        assert figures["accuracy"] == correct / COUNT
        assert figures["tokens_per_second"] == pytest.approx(tokens / seconds)
        assert figures["tokens_per_forward"] == pytest.approx(
            tokens / sum(f["denoise"] + f["commit"] for f in forwards)
        )
        cells = assessed.table()[label]
        assert cells[0] == f"{correct / COUNT:.1%} ({correct}/{COUNT})"
        assert cells[2] == f"{tokens / seconds:.1f}"
        assert cells[4] == f"{figures['tokens_per_forward']:.2f}"


def test_accuracy_by_kind_counts_the_judged_answers_of_the_kind(assessed: Assessed) -> None:
    for label, figures in zip(LABELS, assessed.figures["contenders"], strict=True):
        by_kind: dict[str, list[bool]] = {}
        for answer in assessed.answers(label):
            by_kind.setdefault(answer["kind"], []).append(answer["correct"])
        assert figures["accuracy_by_kind"] == {kind: sum(right) / len(right) for kind, right in by_kind.items()}


def test_every_contender_answers_the_same_held_out_tasks_and_is_judged_by_their_checks(assessed: Assessed) -> None:
    tasks = {task.id: task for task in generate("held_out", COUNT, 0)}
    for label in LABELS:
        answers = assessed.answers(label)
        assert [answer["id"] for answer in answers] == list(tasks)
        assert all(answer["correct"] == tasks[answer["id"]].check(answer["text"]) for answer in answers)
        assert all(len(answer["token_ids"]) <= 12 for answer in answers)


def test_only_the_contenders_that_write_blocks_have_denoising_forwards(assessed: Assessed) -> None:
    for label in LABELS:
        denoised = sum(answer["diffusion"]["forwards"]["denoise"] for answer in assessed.answers(label))
        assert (denoised > 0) == ("blocks" in label)
    bold, careful = (assessed.figures["contenders"][i]["tokens_per_forward"] for i in (3, 2))
    assert bold > careful


def test_the_report_says_what_its_numbers_do_not_show_and_the_plot_is_a_picture(assessed: Assessed) -> None:
    assert "What these numbers do not show" in assessed.report
    assert f"{COUNT} judged questions" in assessed.report
    assert "this sample does not rank them" in assessed.report  # random weights: nobody is right
    assert "not general ability" in assessed.report
    assert str(assessed.folder.parent) not in assessed.report
    assert (assessed.folder / "accuracy_speed.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in assessed.folder.iterdir()} == {
        "accuracy_speed.png", "answers.jsonl", "manifest.json", "report.md", "rounds.jsonl"
    }  # fmt: skip


def test_a_finished_assessment_is_not_measured_again(
    assessed: Assessed, tiny_model: Path, tiny_adapted_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (assessed.folder / "rounds.jsonl").stat().st_mtime_ns
    words = ["--base", tiny_model, "--model", tiny_adapted_model, "--thresholds", 0.9, 0.02]
    assert assess(assessed.folder, *words, "--tasks.count", COUNT, "--held_out.tasks", 6, "--engine.max_rows", 2) == 0
    assert "is finished" in capsys.readouterr().out
    assert (assessed.folder / "rounds.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(("correct", "low", "high"), [(0, 0.0, 0.2775), (8, 0.4902, 0.9433), (10, 0.7225, 1.0)])
def test_the_interval_is_wilsons(correct: int, low: float, high: float) -> None:
    assert wilson(correct, 10) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_holds_its_share_where_none_or_all_are_right() -> None:
    """The plot draws their distances, and refuses a negative one."""
    for count in range(1, 200):
        for correct in (0, count):
            low, high = wilson(correct, count)
            assert 0 <= low <= correct / count <= high <= 1


# ------------------------------------------------------------------------------------------------- own prompts
def test_own_prompts_are_judged_where_they_bring_an_answer(
    assessed: Assessed, tiny_adapted_model: Path, tmp_path: Path
) -> None:
    asked = {task.id: task for task in generate("held_out", COUNT, 0)}
    known = [(asked[answer["id"]], answer["text"]) for answer in assessed.answers("adapted, AR")]
    prompts = [{"id": task.id, "messages": task.messages, "answer": f" {text}\n"} for task, text in known]
    prompts[0]["answer"], prompts[0]["kind"] = "never", "hard"
    del prompts[1]["answer"]
    words = ["--prompts", write(tmp_path / "own.jsonl", prompts), "--held_out.tasks", 0, "--decode.mode", "ar"]
    assert assess(tmp_path / "out", "--model", tiny_adapted_model, *words) == 0
    own = Assessed(tmp_path / "out")
    assert [line["correct"] for line in own.answers("adapted, AR")] == [False, None, *[True] * (COUNT - 2)]
    (figures,) = own.figures["contenders"]
    assert (figures["correct"], figures["judged"], figures["questions"]) == (COUNT - 2, COUNT - 1, COUNT)
    assert figures["accuracy_by_kind"] == {"hard": 0.0, "prompts": 1.0}
    assert figures["held_out_masked_loss"] is None
    assert "the prompts of own.jsonl" in own.report


# ------------------------------------------------------------------------------------------------- held-out loss
def test_the_loss_of_prepared_rows_is_the_held_out_loss_of_those_rows(tiny_adapted_model: Path, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_adapted_model)
    form = RowFormat(BLOCK, 256, MASK)
    rows = pack_tasks(list(generate("held_out", 9, 5)), backbone.tokenizer, form)
    placed = [
        Placed(i, i, 0, rows.input_ids[i].numpy(), rows.labels[i].numpy()) for i in range(rows.input_ids.shape[0])
    ]
    (tmp_path / "rows" / "held_out").mkdir(parents=True)
    table = build_rows(placed, len(placed), form)
    pq.write_table(table, tmp_path / "rows" / "held_out" / "part-00000.parquet")
    small = ["--tasks.count", 2, "--decode.mode", "ar", "--seed", 4]
    assert assess(tmp_path / "out", "--model", tiny_adapted_model, "--data", tmp_path / "rows", *small) == 0
    alone = [type(rows)(x.input_ids, x.labels, x.input_ids * 0, torch.arange(256)[None]) for x in each_row(rows)]
    options = {"block_size": BLOCK, "mask_token_id": MASK, "seed": 4, "layers": backbone.layers}
    (figures,) = Assessed(tmp_path / "out").figures["contenders"]
    for name, key in (("block_diffusion", "held_out_masked_loss"), ("next_token", "held_out_next_token_loss")):
        expected = held_out_loss(backbone.model, make_objective(name, **options), alone)
        assert figures[key] == pytest.approx(expected, rel=1e-6)


def test_packed_tasks_hold_every_answer_once_and_supervise_nothing_else() -> None:
    tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
    tasks = list(generate("held_out", 12, 1))
    rows = pack_tasks(tasks, tokenizer, RowFormat(BLOCK, 512, MASK))
    taught = [
        tokenizer.decode(labels[(documents == document) & (labels != IGNORED)])
        for labels, documents in zip(rows.labels, rows.document_ids, strict=True)
        for document in documents.unique()
        if document >= 0
    ]
    assert sorted(taught) == sorted(f"{task.answer}<|im_end|>" for task in tasks)


def test_before_and_after_differ_by_the_weights_alone(assessed: Assessed) -> None:
    """The tiny base and the tiny adapted model have the same weights, so only the mask token's row tells them apart."""
    base, adapted = assessed.figures["held_out"]["base"], assessed.figures["held_out"]["adapted"]
    assert base["next_token"] == pytest.approx(adapted["next_token"], abs=0.05)
    assert base["supervised_tokens"] == adapted["supervised_tokens"] > 100
    assert base["masked"] != adapted["masked"]


def test_in_lossless_mode_the_adapted_model_competes_with_its_ar_mode_and_answers_the_same(
    tiny_adapted_model: Path, tmp_path: Path
) -> None:
    subjects = find_subjects(str(tiny_adapted_model), None, None)
    contenders = make_contenders(subjects, DecodeSection(mode="lossless"), None)
    assert [(c.label, c.decode.mode) for c in contenders] == [("adapted, AR", "ar"), ("adapted, lossless", "lossless")]
    measure(
        contenders, task_questions(3, 0, 8), Settings("float32", "cpu", max_rows=2, seed=0), Journal(tmp_path / "j")
    )
    lines = [json.loads(line)["value"]["answers"] for line in (tmp_path / "j").read_text().splitlines()]
    ar, lossless = ([answer["token_ids"] for answer in answers] for answers in lines)
    assert ar == lossless
    with pytest.raises(UserError, match=r"--thresholds has no effect with --decode\.mode lossless"):
        make_contenders(subjects, DecodeSection(mode="lossless"), [0.9])


# ------------------------------------------------------------------------------------------------- going on
def test_an_interrupted_assessment_measures_only_what_is_missing(tiny_adapted_model: Path, tmp_path: Path) -> None:
    contenders = make_contenders(find_subjects(str(tiny_adapted_model), None, None), DecodeSection(), None)
    questions = task_questions(10, 0, 8)
    settings = Settings("float32", "cpu", max_rows=1, seed=0)
    path = tmp_path / "journal"
    measure(contenders, questions, settings, Journal(path))
    whole = path.read_text().splitlines(keepends=True)
    assert len(whole) == 4  # two rounds of eight and two, two contenders
    path.write_text(whole[0] + whole[2] + whole[1][:40])  # one lost, one torn by a kill
    measure(contenders, questions, settings, Journal(path))
    again = path.read_text().splitlines(keepends=True)
    assert again[:2] == [whole[0], whole[2]]
    assert len(again) == len(whole)
    strip = lambda lines: {json.dumps([e["key"], e["value"]["answers"]]) for e in map(json.loads, lines)}  # noqa: E731
    assert strip(again) == strip(whole)


# ------------------------------------------------------------------------------------------------- bad input
BAD = {
    "no model": ([], "--model is required"),
    "no such folder": (["--model", "/no/such/model"], "no such folder"),
    "no such base": (["--model", "ADAPTED", "--base", "/no/such/base"], "no such folder"),
    "thresholds of an AR model": (["--model", "PLAIN", "--thresholds", "0.9"], "was not adapted"),
    "blocks of an AR model": (["--model", "PLAIN", "--decode.mode", "diffusion"], "was not adapted"),
    "threshold above one": (["--model", "ADAPTED", "--thresholds", "1.5"], "above 0 and at most 1"),
    "a threshold twice": (["--model", "ADAPTED", "--thresholds", "0.9", "0.9"], "twice"),
    "thresholds and AR": (["--model", "ADAPTED", "--decode.mode", "ar", "--thresholds", "1"], "no effect"),
    "thresholds of no threshold policy": (
        ["--model", "ADAPTED", "--decode.policy", "sequential", "--thresholds", "1"],
        "needs --decode.policy threshold",
    ),
    "a sub-block that does not divide": (["--model", "ADAPTED", "--decode.sub_block_size", "3"], "does not divide"),
    "rows not of blocks": (["--model", "ADAPTED", "--held_out.context_length", "100"], "not a multiple"),
    "another block size": (["--model", "ADAPTED", "--held_out.block_size", "16"], "adapted with block_size 8"),
    "no packed rows": (["--model", "ADAPTED", "--data", "/no/such/rows"], "packed rows"),
    "a misspelt key": (["--model", "ADAPTED", "--threshold", "0.9"], "did you mean --decode.threshold"),
    "no such prompts": (["--model", "ADAPTED", "--prompts", "/no/such/prompts.jsonl"], "no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(
    case: str, tiny_model: Path, tiny_adapted_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = BAD[case]
    models = {"PLAIN": str(tiny_model), "ADAPTED": str(tiny_adapted_model)}
    assert assess(tmp_path / "out", *(models.get(word, word) for word in words)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not list(tmp_path.rglob("report.md"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x", "diffusion": {"mode": "ar"}}, "chosen by the contenders"),
        ({"prompt": "x", "answer": 3}, "answer must be a string"),
        ({"prompt": "x", "colour": "red"}, "colour"),
        ({"prompt": "x", "max_tokens": 5000}, "context"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused_by_its_id(
    line: dict[str, Any], message: str, tiny_adapted_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "own.jsonl", [{"prompt": "fine"}, {"id": "odd", **line}])
    words = ["--model", tiny_adapted_model, "--prompts", prompts, "--held_out.tasks", 0]
    assert assess(tmp_path / "out", *words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert "'odd'" in error


def test_an_ar_model_is_assessed_in_ar_mode_unless_blocks_are_asked_for(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert assess(tmp_path / "out", "--model", tiny_model, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "- model, AR" in shown
    assert "blocks" not in shown.partition("plan:")[2]


@pytest.mark.slow
def test_assess_runs_as_a_script_from_another_directory(
    project: Path, tiny_adapted_model: Path, tmp_path: Path
) -> None:
    words = ["--model", tiny_adapted_model, "--tasks.count", 2, "--max_tokens", 4, "--held_out.tasks", 2]
    command = [sys.executable, project / "pipelines" / "assess.py", *words, "--output", "out"]
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "adapted, blocks 0.9" in done.stdout
    assert (tmp_path / "out" / "report.md").is_file()
