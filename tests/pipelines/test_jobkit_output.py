"""Outputs: one writer, begun and continued under one configuration, complete or absent; and how a job ends."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pydantic import Field
from rich.console import Console

from model.errors import JobError, UserError
from pipelines.jobkit import JobConfig, OutputFile, OutputFolder, Progress, hash_inputs
from pipelines.jobkit.lock import STALE_S, Writer
from pipelines.jobkit.progress import duration_text

JOB = Path(__file__).with_name("stand_in_job.py")


class Config(JobConfig):
    """Nothing but steps."""

    steps: int = Field(3, ge=1, description="steps")


def folder_output(target: Path | str, *, steps: int = 3, job: str = "stand_in", **more: Any) -> OutputFolder:
    return OutputFolder(str(target), job=job, config=Config(steps=steps), **more)


def file_output(target: Path | str, *, steps: int = 3) -> OutputFile:
    return OutputFile(str(target), job="generate", config=Config(steps=steps))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def break_off(output: OutputFolder | OutputFile, work: Callable[[Any], None] = lambda output: None) -> None:
    with pytest.raises(KeyboardInterrupt), output:
        work(output)
        raise KeyboardInterrupt


def test_the_manifest_records_what_is_needed_to_repeat_the_run(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("{}\n")
    with folder_output(tmp_path / "o", inputs=hash_inputs([data])) as output:
        output.finish({"rows": 7}, seeds={"shuffle": 11})
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    assert manifest["config"]["steps"] == 3
    assert len(manifest["config_hash"]) == 16
    assert manifest["inputs"] == {str(data): "sha256:ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"}
    assert manifest["packages"]["ray"]
    assert manifest["seeds"] == {"seed": 0, "shuffle": 11}
    assert manifest["figures"] == {"rows": 7}
    assert manifest["wall_time_s"] >= 0
    assert names(tmp_path / "o") == {"manifest.json"}


def test_a_finished_output_is_recognised_and_not_redone(tmp_path: Path) -> None:
    with folder_output(tmp_path) as output:
        output.finish({"rows": 7})
    with folder_output(tmp_path) as output:
        assert output.finished is not None
        assert output.finished["figures"] == {"rows": 7}


def test_an_interrupted_output_is_continued_and_its_wall_time_adds_up(tmp_path: Path) -> None:
    break_off(folder_output(tmp_path), lambda output: time.sleep(0.2))
    with folder_output(tmp_path) as output:
        assert output.resumed
        assert output.finished is None
        assert output.finish({})["wall_time_s"] >= 0.2


@pytest.mark.parametrize("ending", ["interrupted", "finished"])
def test_another_configuration_on_the_same_output_is_refused_naming_the_key(tmp_path: Path, ending: str) -> None:
    if ending == "finished":
        with folder_output(tmp_path) as output:
            output.finish({})
    else:
        break_off(folder_output(tmp_path))
    with (
        pytest.raises(UserError, match="was begun with steps 3, this run has 4: give another --output, or remove"),
        folder_output(tmp_path, steps=4),
    ):
        pytest.fail("the output was opened")


def test_another_job_on_the_same_output_is_refused(tmp_path: Path) -> None:
    break_off(folder_output(tmp_path))
    with (
        pytest.raises(UserError, match="holds the output of stand_in, not of adapt"),
        folder_output(tmp_path, job="adapt"),
    ):
        pytest.fail("the output was opened")


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"a.jsonl": "sha256:2"}, "a.jsonl has changed since"),
        ({}, "a.jsonl has changed since"),
        ({"a.jsonl": "sha256:1", "b.jsonl": "sha256:3"}, "was begun without the input b.jsonl"),
    ],
)
def test_changed_inputs_are_refused(tmp_path: Path, after: dict[str, str], message: str) -> None:
    break_off(folder_output(tmp_path, inputs={"a.jsonl": "sha256:1"}))
    with pytest.raises(UserError, match=message), folder_output(tmp_path, inputs=after):
        pytest.fail("the output was opened")


def test_a_second_writer_is_refused_while_the_first_works_and_welcome_after(tmp_path: Path) -> None:
    with folder_output(tmp_path) as first:
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()}"), folder_output(tmp_path):
            pytest.fail("the output was opened twice")
        first.finish({})
    with folder_output(tmp_path) as second:
        assert second.finished is not None


def write_lock(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".lock").write_text(json.dumps(asdict(replace(Writer.here(), token="other", **changes))))


def test_a_lock_of_a_dead_process_of_this_host_is_stale_at_once(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_lock(tmp_path, pid=dead.pid)
    with folder_output(tmp_path) as output:
        output.finish({})


def test_a_reused_pid_does_not_keep_a_lock_alive(tmp_path: Path) -> None:
    write_lock(tmp_path, started=Writer.here().started - 100)
    with folder_output(tmp_path) as output:
        output.finish({})


def test_a_lock_of_another_host_holds_until_its_sign_of_life_is_old(tmp_path: Path) -> None:
    write_lock(tmp_path, host="elsewhere", pid=1, beat=time.time() - STALE_S / 2)
    with pytest.raises(UserError, match="is being written by process 1 on elsewhere"), folder_output(tmp_path):
        pytest.fail("the output was opened")
    write_lock(tmp_path, host="elsewhere", pid=1, beat=time.time() - STALE_S - 1)
    with folder_output(tmp_path) as output:
        output.finish({})


def test_a_writer_that_lost_its_lock_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="was taken over by process"), folder_output(tmp_path) as output:
        write_lock(tmp_path)
        with output.stage("model") as path:
            path.mkdir()
    assert not output.has("model")
    assert names(tmp_path) == {".lock", ".begun.json"}


def test_a_staged_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    with folder_output(tmp_path) as output:
        for text in ("old", "new"):
            with output.stage("checkpoints/step_1") as path:
                path.mkdir()
                (path / text).write_text(text)
                assert output.has("checkpoints/step_1") is (text == "new")
        output.finish({})
    assert names(tmp_path / "checkpoints") == {"step_1"}
    assert names(tmp_path / "checkpoints" / "step_1") == {"new"}


def test_a_stage_that_fails_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    def work(output: OutputFolder) -> None:
        with output.stage("stats.json") as path:
            path.write_text("old")
        with output.stage("stats.json") as path:
            path.write_text("half")
            raise KeyboardInterrupt

    break_off(folder_output(tmp_path), work)
    assert (tmp_path / "stats.json").read_text() == "old"
    assert names(tmp_path) == {"stats.json", ".begun.json"}


def test_a_remote_output_is_uploaded_and_trusted_only_when_complete() -> None:
    store = fsspec.filesystem("memory")
    with folder_output("memory://bucket/run") as output:
        with output.stage("model") as path:
            path.mkdir()
            (path / "config.json").write_text("{}")
        with output.stage("stats.json") as path:
            path.write_text("1")
        assert output.has("model")
        assert output.uri("model") == "memory:///bucket/run/model"
        store.pipe_file("/bucket/run/.model.partial/config.json", b"{}")
        assert not output.has("model")
        store.rm("/bucket/run/.model.partial", recursive=True)
        output.finish({})
    found = set(store.find("/bucket/run"))
    assert found == {f"/bucket/run/{name}" for name in ("manifest.json", "model/config.json", "stats.json")}
    with pytest.raises(UserError, match="must be a local path"):
        _ = output.path


def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="is not a folder"), folder_output(target):
            pytest.fail("the output was opened")
    with pytest.raises(UserError, match="cannot be opened"):
        folder_output("nosuchscheme://x")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    output = folder_output(tmp_path / "run")
    monkeypatch.setattr(output.filesystem, "makedirs", refuse)
    with pytest.raises(UserError, match=f"cannot be written: {os.strerror(number).lower()}"), output:
        pytest.fail("the output was opened")


def test_a_job_that_forgets_to_finish_is_a_defect_and_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"without finish\(\)"), folder_output(tmp_path):
        pass


def test_an_output_file_keeps_its_partial_lines_and_hides_its_helpers(tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    break_off(file_output(target), lambda output: output.partial_path.write_text("1\n"))
    assert names(tmp_path) == {".answers.jsonl.partial", ".answers.jsonl.begun.json"}
    with file_output(target) as output:
        assert output.resumed
        with output.partial_path.open("a") as file:
            file.write("2\n")
        output.publish()
        output.finish({"answers": 2})
    assert target.read_text() == "1\n2\n"
    assert names(tmp_path) == {"answers.jsonl", "answers.jsonl.manifest.json"}


def test_a_removed_output_file_is_made_again_in_spite_of_its_manifest(tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    for steps in (3, 4):
        with file_output(target, steps=steps) as output:
            assert output.finished is None
            output.publish(b"1\n")
            output.finish({})
        target.unlink()


def test_a_changed_configuration_names_the_files_to_remove(tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    break_off(file_output(target), lambda output: output.partial_path.write_text("1\n"))
    with pytest.raises(UserError) as caught, file_output(target, steps=4):
        pytest.fail("the output was opened")
    assert f"or remove {tmp_path}/.answers.jsonl.begun.json and {tmp_path}/.answers.jsonl.partial" in str(caught.value)


def start_job(output: Path) -> subprocess.Popen[str]:
    """The stand-in job, seen to have counted its first step."""
    command = [sys.executable, str(JOB), "--output", str(output), "--pause_s", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (output / "steps.txt").exists() or not (output / "steps.txt").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def run_job(output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(JOB), "--output", str(output), "--pause_s", "0"], capture_output=True, text=True
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_job_stopped_by_a_signal_goes_on_with_the_same_command(tmp_path: Path, number: int, code: int) -> None:
    process = start_job(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    if number != signal.SIGKILL:
        assert errors.splitlines()[-1] == "stand_in: interrupted; run the same command again to go on."
        assert names(tmp_path) == {".begun.json", "steps.txt"}
    assert run_job(tmp_path).returncode == 0
    assert (tmp_path / "steps.txt").read_text() == "".join(f"{step}\n" for step in range(100))
    assert names(tmp_path) == {"manifest.json", "steps.txt", "result.txt"}


def test_a_job_started_twice_on_one_output_is_bad_usage(tmp_path: Path) -> None:
    first = start_job(tmp_path)
    second = run_job(tmp_path)
    first.terminate()
    first.communicate(timeout=30)
    assert second.returncode == 2
    assert second.stderr.startswith(f"stand_in: {tmp_path} is being written by process {first.pid} on ")
    assert second.stderr.count("\n") == 1


def test_a_full_disk_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").symlink_to("/dev/full")
    done = run_job(tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "stand_in: No space left: free some and run the same command again to go on.",
    )
    assert names(tmp_path) == {".begun.json", "steps.txt"}


def test_progress_away_from_a_terminal_is_a_few_plain_lines() -> None:
    stream = io.StringIO()
    with Progress("adapt", total=50, unit="steps", console=Console(file=stream)) as progress:
        for _ in range(50):
            progress.advance(loss=1.23456)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("adapt: 1/50 steps, loss 1.235, ")
    assert lines[-1] == "adapt: 50/50 steps, loss 1.235"
    assert len(lines) == 2


def test_progress_on_a_terminal_is_one_bar_with_its_figures() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with Progress("adapt", total=2, unit="steps", console=console) as progress:
        progress.advance(2, loss=1.5)
    assert "2/2" in stream.getvalue()
    assert "loss 1.5" in stream.getvalue()


def test_the_time_left_is_reckoned_from_this_run_only() -> None:
    progress = Progress("adapt", total=100, unit="steps", already=90, console=Console(file=io.StringIO()))
    assert progress.seconds_left() is None
    time.sleep(0.05)
    progress.update(95)
    left = progress.seconds_left()
    assert left is not None
    assert 0.04 < left < 5.0
    assert [duration_text(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
