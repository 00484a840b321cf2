"""generate: prompts in, answers out in input order; what cannot run says so, and nothing done is done twice."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.answers import Answers
from model.errors import JobError, UserError
from pipelines.generate import GenerateConfig, run
from pipelines.jobkit import OutputFile
from pipelines.jobkit.cli import load_config, parse_arguments
from pipelines.prompt_files import Journal, prompt_ids, read_prompts

PROMPTS: list[dict[str, Any]] = [
    {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    {"prompt": "once upon", "max_tokens": 5, "temperature": 1.0},
    {"id": "ids", "prompt_token_ids": [11, 12, 13], "temperature": 0.9, "top_k": 5, "seed": 3},
    {"id": "ar", "prompt": "x", "diffusion": {"mode": "ar"}, "stop": None, "max_tokens": 3},
    {"id": "sampled", "prompt": "x", "max_tokens": 12, "temperature": 1.0},
]


def write(path: Path, prompts: list[Any]) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def answers(model: Path, prompts: Path, output: Path, *words: str) -> list[dict[str, Any]]:
    generate(model, prompts, output, *words)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def generate(model: Path, prompts: Path, output: Path, *words: str) -> dict[str, Any]:
    arguments = ["--model", str(model), "--prompts", str(prompts), "--output", str(output), *words]
    return run(load_config("generate", GenerateConfig, parse_arguments(arguments)))


@pytest.fixture(scope="module")
def first(tiny_adapted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("generate")
    return answers(tiny_adapted_model, write(folder / "prompts.jsonl", PROMPTS), folder / "answers.jsonl")


def test_answers_stand_in_input_order_with_usage_and_figures(first: list[dict[str, Any]]) -> None:
    assert [a["id"] for a in first] == ["chat", "1", "ids", "ar", "sampled"]
    for answer in first:
        assert set(answer) == {"id", "text", "token_ids", "finish_reason", "usage", "diffusion"}
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
        forwards = answer["diffusion"]["forwards"]
        assert set(forwards) == {"prefill", "denoise", "commit"}
        spent = forwards["denoise"] + forwards["commit"]
        assert answer["diffusion"]["tokens_per_forward"] == pytest.approx(len(answer["token_ids"]) / max(1, spent))
    assert len(first[1]["token_ids"]) <= 5
    assert first[3]["diffusion"]["forwards"]["denoise"] == 0


def test_an_answer_does_not_depend_on_line_order_neighbours_or_rows(
    first: list[dict[str, Any]], tiny_adapted_model: Path, tmp_path: Path
) -> None:
    named = [{"id": str(i), **p} for i, p in enumerate(PROMPTS)]
    turned = answers(
        tiny_adapted_model, write(tmp_path / "p.jsonl", named[::-1]), tmp_path / "a.jsonl", "--engine.max_rows", "1"
    )
    assert turned[::-1] == first
    alone = answers(tiny_adapted_model, write(tmp_path / "q.jsonl", named[4:]), tmp_path / "b.jsonl")
    assert alone == first[4:]


def test_log_probabilities_policies_and_penalties_may_be_asked_for_line_by_line(
    tiny_adapted_model: Path, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    prompts = [
        {**chat, "diffusion": {"policy": "entropy", "gamma": 0.2}, "presence_penalty": 1.0},
        {"prompt": "Hi", "max_tokens": 4, "logprobs": 0, "logit_bias": {"50": 100}, "diffusion": {"budget": 0.3}},
        {"prompt": "Hi", "diffusion": {"factor": 2}},
    ]
    words = ("--decode.policy", "frechet", "--decode.budget", "0.2", "--decode.refresh", "sub_block")
    with pytest.raises(JobError, match="1 of 3"):
        generate(tiny_adapted_model, write(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl", *words)
    first, second, third = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines())
    assert len(first["logprobs"]) == 6 and all(len(one["top"]) == 2 for one in first["logprobs"])
    assert [one["top"][0][0] for one in first["logprobs"]] == first["token_ids"], "greedy"
    assert second["token_ids"] == [50] * 4 and all(one["top"] == [] for one in second["logprobs"])
    assert all(one["logprob"] > -1e-6 for one in second["logprobs"])
    assert "diffusion.factor" in third["error"]


def test_the_jobs_seed_decides_where_a_prompt_brings_none(
    first: list[dict[str, Any]], tiny_adapted_model: Path, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", PROMPTS)
    other = answers(tiny_adapted_model, prompts, tmp_path / "a.jsonl", "--seed", "1")
    assert other[2] == first[2] and other[0] == first[0]
    assert other[4]["token_ids"] != first[4]["token_ids"]


def test_prompts_that_cannot_run_say_so_and_the_others_go_on(
    first: list[dict[str, Any]], tiny_adapted_model: Path, tmp_path: Path
) -> None:
    bad = [
        "{not json",
        "[1, 2]",
        '{"id": "half", "prompt": "a", "\\ud800": 1}',
        {"id": "empty"},
        {"id": "both", "prompt": "a", "messages": []},
        {"id": "long", "prompt": "a" * 600},
        {"id": "hot", "prompt": "a", "temperature": 9},
        {"id": "typo", "prompt": "a", "max_token": 5},
        {"id": "none", "messages": [{"role": "user", "content": None}]},
        {"id": 7, "prompt": "a", "n": 2},
        {"id": {"a": 1}, "prompt": "a"},
    ]
    prompts = write(tmp_path / "p.jsonl", [*bad, "", PROMPTS[0]])
    with pytest.raises(JobError, match="11 of 12 prompts"):
        generate(tiny_adapted_model, prompts, tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [
        "0",
        "1",
        "half",
        "empty",
        "both",
        "long",
        "hot",
        "typo",
        "none",
        "7",
        "10",
        "chat",
    ]
    assert all(set(line) == {"id", "error"} and "\n" not in line["error"] for line in lines[:-1])
    assert "max_tokens" in lines[7]["error"]
    assert lines[-1] == first[0]


def test_a_finished_output_is_left_alone(tiny_adapted_model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", PROMPTS)
    generate(tiny_adapted_model, prompts, tmp_path / "a.jsonl")
    before = (tmp_path / "a.jsonl").stat().st_mtime_ns
    figures = generate(tiny_adapted_model, prompts, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").stat().st_mtime_ns == before
    manifest = json.loads((tmp_path / "a.jsonl.manifest.json").read_text(encoding="utf-8"))
    assert manifest["figures"] == figures and manifest["seeds"] == {"seed": 0}
    assert figures["answers"] == 5 and figures["completion_tokens"] > 0


def test_a_run_that_was_cut_off_goes_on_and_repeats_nothing(
    first: list[dict[str, Any]], tiny_adapted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output = write(tmp_path / "p.jsonl", PROMPTS), tmp_path / "a.jsonl"
    asked: list[str] = []
    submit = Answers.submit

    def cut_after_two(self: Answers, prompt: Any, done: Any) -> None:
        asked.append(prompt.id)

        def count(answer: dict[str, Any]) -> None:
            done(answer)
            if len(asked) == 5 and sum(1 for _ in (tmp_path / ".a.jsonl.partial").open()) == 2:
                raise KeyboardInterrupt

        submit(self, prompt, count)

    monkeypatch.setattr(Answers, "submit", cut_after_two)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny_adapted_model, prompts, output)
    assert not output.exists()
    with (tmp_path / ".a.jsonl.partial").open("a", encoding="utf-8") as partial:
        partial.write('{"id": "ids", "te')  # torn by the kill
    asked.clear()
    monkeypatch.setattr(
        Answers, "submit", lambda self, prompt, done: (asked.append(prompt.id), submit(self, prompt, done))
    )
    assert answers(tiny_adapted_model, prompts, output) == first
    assert len(asked) == 3


def test_a_torn_line_is_cut_off_before_the_journal_goes_on(tmp_path: Path) -> None:
    output = OutputFile(str(tmp_path / "a.jsonl"), job="generate", config=GenerateConfig())
    with Journal(output) as journal:
        journal.add({"id": "b"})
        journal.add({"id": "bad", "error": "no"})
    with output.partial_path.open("a", encoding="utf-8") as partial:
        partial.write('{"id": "c", "te')
    with Journal(output) as journal:
        assert list(journal.done) == ["b"]
        journal.add({"id": "c"})
        journal.add({"id": "bad"})
    with Journal(output) as journal:
        assert set(journal.done) == {"b", "c", "bad"} and not journal.errors
        journal.add({"id": "a"})
        journal.publish(["a", "bad", "c", "b"])
    published = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in published] == ["a", "bad", "c", "b"]


def test_another_file_of_prompts_or_another_threshold_is_refused_for_the_same_output(
    tiny_adapted_model: Path, tmp_path: Path
) -> None:
    prompts, output = write(tmp_path / "p.jsonl", PROMPTS[:1]), tmp_path / "a.jsonl"
    generate(tiny_adapted_model, prompts, output)
    with pytest.raises(UserError, match=r"decode\.threshold"):
        generate(tiny_adapted_model, prompts, output, "--decode.threshold", "0.5")
    with pytest.raises(UserError, match="prompts"):
        generate(tiny_adapted_model, write(tmp_path / "p.jsonl", PROMPTS[1:]), output)


def test_bad_usage_is_one_sentence(tiny_model: Path, tiny_adapted_model: Path, tmp_path: Path) -> None:
    prompts, output = write(tmp_path / "p.jsonl", PROMPTS), tmp_path / "a.jsonl"
    double = write(tmp_path / "double.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    named_as_a_line = write(tmp_path / "line.jsonl", [{"id": "1", "prompt": "x"}, {"prompt": "y"}])
    empty = write(tmp_path / "empty.jsonl", [""])
    for model, file, words, match in [
        (tiny_adapted_model, double, (), "'a'"),
        (tiny_adapted_model, named_as_a_line, (), "'1'"),
        (tiny_adapted_model, empty, (), "no prompt"),
        (tiny_adapted_model, tmp_path / "absent.jsonl", (), "no such file"),
        (tiny_adapted_model, tmp_path, (), "folder"),
        (tiny_model, prompts, ("--decode.mode", "diffusion"), "not adapted"),
        (tiny_adapted_model, prompts, ("--decode.sub_block_size", "3"), "divide"),
        (tiny_adapted_model, prompts, ("--decode.policy", "treshold"), "threshold"),
        (tiny_adapted_model, prompts, ("--decode.gamma", "0.5"), "decode.gamma 0.5 has no effect"),
        (tiny_adapted_model, prompts, ("--decode.policy", "dimple", "--decode.gamma", "2"), "decode.gamma must be at"),
        (tiny_adapted_model, prompts, ("--decode.refresh", "never"), "decode.refresh"),
        (tiny_adapted_model, prompts, ("--data", str(prompts)), "--prompts"),
    ]:
        with pytest.raises(UserError, match=match):
            generate(model, file, output, *words)
        assert not output.exists()


def test_a_compressed_file_that_breaks_off_is_one_sentence(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl.gz"
    prompts.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:40])
    with pytest.raises(UserError, match="cannot be read: Compressed file ended"):
        prompt_ids(str(prompts))


def test_a_model_that_does_not_load_leaves_nothing_and_may_be_mended(tiny_adapted_model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", PROMPTS[:1])
    model, output = tmp_path / "model", tmp_path / "out" / "a.jsonl"
    shutil.copytree(tiny_adapted_model, model)
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no safetensors weights"):
        generate(model, prompts, output)
    assert not list(output.parent.iterdir())
    shutil.copy(tiny_adapted_model / "model.safetensors", model)
    assert len(answers(model, prompts, output)) == 1


def test_an_unadapted_model_answers_in_ar_mode(tiny_model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "x", "max_tokens": 4}])
    (answer,) = answers(tiny_model, prompts, tmp_path / "a.jsonl")
    assert answer["diffusion"]["forwards"]["denoise"] == 0


def test_odd_lines_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "한\u2028국"}\r\n\n{"prompt": "b"}'.encode() + b"\n\xff\xfe\n")
    prompts = list(read_prompts(str(path)))
    assert [(p.index, p.id, p.error is None) for p in prompts] == [(0, "0", True), (2, "2", True), (3, "3", False)]
    assert prompts[0].fields["prompt"] == "한\u2028국"
    assert prompt_ids(str(path)) == ["0", "2", "3"]


@pytest.mark.slow
def test_it_runs_as_a_script_from_another_directory_and_goes_on_after_sigterm(
    project: Path, tiny_adapted_model: Path, tmp_path: Path
) -> None:
    long = [{"id": f"p{i}", "prompt": "x", "max_tokens": 120, "temperature": 1.0} for i in range(24)]
    write(tmp_path / "p.jsonl", long)
    output = tmp_path / "a.jsonl"
    words = [
        "--model",
        str(tiny_adapted_model),
        "--prompts",
        "p.jsonl",
        "--output",
        "a.jsonl",
        "--engine.max_rows",
        "2",
    ]
    command = [sys.executable, str(project / "pipelines" / "generate.py"), *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".a.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 143 and "again" in complaint and "Traceback" not in complaint
    assert not output.exists() and partial.exists()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "answers are there already" in done.stderr
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [p["id"] for p in long]
    assert not partial.exists()


@pytest.mark.slow
def test_ray_workers_give_the_same_answers_and_survive_a_killed_worker(
    first: list[dict[str, Any]],
    local_ray: None,
    tiny_adapted_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelines import generate as job

    start = job._start_workers

    def start_and_kill_one(*arguments: Any) -> list[Any]:
        import ray

        workers = start(*arguments)
        ray.kill(workers[0], no_restart=False)
        return workers

    monkeypatch.setattr(job, "_start_workers", start_and_kill_one)
    prompts = write(tmp_path / "p.jsonl", PROMPTS)
    assert answers(tiny_adapted_model, prompts, tmp_path / "a.jsonl", "--ray.workers", "2") == first


@pytest.mark.slow
def test_workers_that_the_cluster_cannot_give_are_a_sentence(
    local_ray: None, tiny_adapted_model: Path, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "p.jsonl", PROMPTS)
    words = ("--ray.workers", "1", "--ray.cpus_per_worker", "64", "--cluster.wait_s", "1")
    with pytest.raises(JobError, match="0 of 1 workers"):
        generate(tiny_adapted_model, prompts, tmp_path / "a.jsonl", *words)
    assert not os.path.exists(tmp_path / "a.jsonl")


def test_a_line_larger_than_a_request_may_be_is_an_error_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a " * (9 * 2**20)}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    large, fine = read_prompts(str(path))
    assert large.error == "line 0 is larger than 16777216 bytes" and fine.error is None
