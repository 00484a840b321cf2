"""The same bytes however prepare is run, interrupted or killed; nothing is done twice."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines import prepare as job
from pipelines.chats.publishing import checksum
from tests.pipelines.prepared import Prepared, chat, sentence, write_lines


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_workers_and_any_shards(prepare, tmp_path):
    first = [chat(f"question {n}", f"answer {n} " * (n % 7 + 1)) for n in range(60)]
    write_lines(tmp_path / "a.jsonl", [*first[:20], b"{broken", *first[20:40]])
    write_lines(tmp_path / "b.jsonl", [*first[40:], b"", b"also broken"])
    data = ["--data", str(tmp_path / "*.jsonl"), "--held_out", "0.2", "--rows_per_file", "3"]
    one = prepare(*data, "--workers", "1", output="one")
    two = prepare(*data, "--workers", "2", output="two")
    many = prepare(*data, "--read.shard_bytes", "300", output="many")
    assert one.code == two.code == many.code == 0
    assert len(one.bytes()) > 6
    assert one.bytes() == two.bytes() == many.bytes()
    assert [(Path(line["file"]).name, line["line"]) for line in many.rejected] == [("a.jsonl", 21), ("b.jsonl", 22)]


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


def test_an_output_on_another_filesystem_holds_the_same(prepare, tmp_path):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(10)])
    here = prepare("--data", str(data))
    there = f"file://{tmp_path}/there"
    assert prepare("--data", f"file://{data}", "--output", there).code == 0
    assert Prepared(0, tmp_path / "there").rows() == here.rows()


def test_a_full_disk_ends_in_one_sentence(prepare, tmp_path, monkeypatch, capfd):
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device", "part-00000.parquet")

    monkeypatch.setattr(job, "write_all_parts", full)
    result = prepare("--data", str(write_lines(tmp_path / "x.jsonl", [chat("q", "a")])))
    assert result.code == 1
    assert "No space left for part-00000.parquet" in sentence(capfd.readouterr().err)
    assert not list(result.output.glob("part-*"))


def test_a_file_of_rows_that_a_failing_disk_cut_short_is_written_again(prepare, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(20)])
    words = ["--data", str(data), "--rows_per_file", "2"]
    whole = prepare(*words, output="whole")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job, "write_reports", interrupted)
        assert prepare(*words).code == 130
    part = tmp_path / "out" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    assert prepare(*words).bytes() == whole.bytes()


# Kills ----------------------------------------------------------------------------------------------------------------


def wait_for(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.002)


def kill_job(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the job; then its Ray, which would end by itself a little later."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def inodes(paths: Iterable[Path]) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in paths}


@pytest.mark.slow
@pytest.mark.faults
def test_a_job_killed_while_it_packs_goes_on_without_doing_or_writing_anything_twice(
    prepare, project, tmp_path, tiny_model, monkeypatch
):
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n} " * 9) for n in range(300)])
    words = ["--data", str(data), "--read.shard_bytes", "8000", "--rows_per_file", "1"]
    whole = prepare(*words, output="whole")
    expected = len(list(whole.output.glob("part-*")))
    output = tmp_path / "out"
    pack = ["--pack.block_size", "8", "--pack.context_length", "128"]
    common = ["--model", str(tiny_model), "--output", str(output), "--workers", "1", *pack]

    process = subprocess.Popen([sys.executable, str(project / "pipelines" / "prepare.py"), *common, *words])
    try:
        wait_for(lambda: len(list(output.glob("part-*"))) >= 3, "the first files of rows")
    finally:
        kill_job(process)
    before = inodes([*output.glob("part-*"), *(output / ".documents").glob("*.parquet")])
    parts = sum(path.name.startswith("part-") for path in before)
    assert 3 <= parts < expected and len(before) - parts > 2, "it was killed in between"
    assert not (output / "manifest.json").exists()

    def kept(*_: Any) -> None:
        """In place of clearing up."""

    monkeypatch.setattr(job, "_clear", kept)
    result = prepare(*words)
    assert result.code == 0
    assert {path: inode for path, inode in inodes(before).items() if path.exists()} == before
    monkeypatch.undo()
    assert prepare(*words).code == 0  # finished: it only clears up
    assert result.bytes() == whole.bytes()
    assert result.manifest["files"] == whole.manifest["files"]


@pytest.mark.slow
@pytest.mark.faults
def test_workers_killed_in_the_middle_of_a_shard_and_of_a_file_change_no_byte(prepare, tmp_path):
    """Their tasks are done again: nothing is missing, double or half written, and the manifest tells the truth."""
    data = write_lines(tmp_path / "x.jsonl", [chat(f"question {n}", f"answer {n} " * 9) for n in range(1500)])
    words = ["--data", str(data), "--read.shard_bytes", "20000", "--rows_per_file", "20"]
    whole = prepare(*words, output="whole")
    output = tmp_path / "out"
    killed: list[int] = []
    ended = threading.Event()

    def kill_when(begun: Callable[[], bool]) -> None:
        """SIGKILL the workers that run just now."""
        wait_for(lambda: ended.is_set() or begun(), "the work to begin")
        before = len(killed)
        while len(killed) == before and not ended.is_set():
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                    if process.cmdline()[0].startswith("ray::Map"):
                        process.send_signal(signal.SIGKILL)
                        killed.append(process.pid)

    def kill() -> None:
        kill_when(lambda: len(list((output / ".documents").glob("*.parquet"))) >= 2)
        kill_when(lambda: len(list(output.glob("part-*"))) >= 2)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = prepare(*words)
    ended.set()
    killer.join()
    assert result.code == 0 and len(killed) >= 2
    assert result.bytes() == whole.bytes(), "hidden files of dead writers would count too"
    names = {name for name in result.bytes() if not name.startswith(".")}
    assert set(result.manifest["files"]) == names
    assert result.manifest["files"] == {name: checksum(str(output / name)) for name in names}
    assert result.manifest["figures"] == whole.manifest["figures"]
