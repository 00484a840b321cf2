"""llama.cpp on the same prompts and threads, one at a time and several; a row with the reason where it cannot.

It runs in a process of its own (`llama_worker`), which sleeps while others have their turn. Its weights are quantised
(the demo's package has Q4_1) and those of the base model, so the rows name the format and compare speed, not answers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from model.decoding import GenerationRequest
from model.demo_base import GGUF, PACKAGE
from model.errors import JobError
from pipelines.assessment.contenders import AR
from pipelines.benches.engine import llama_worker
from pipelines.benches.engine.closed import BLOCKS
from pipelines.benches.engine.contestants import (
    AR_NAME,
    Answers,
    Contestant,
    EngineContestant,
    compete,
    exact_match,
    line,
    over,
)
from pipelines.benches.engine.setting import PartResult, Setting

GENERATE, SEQUENCES = "llama.cpp, Llama.generate", "llama.cpp, sequences"
WAIT_S = 10.0  # for the worker to end


@dataclass(frozen=True)
class LlamaWorker:
    """The other process, a JSON line for a JSON line."""

    process: subprocess.Popen[str]

    def ask(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Raises JobError with the worker's reason."""
        try:
            self._pipe(self.process.stdin).write(json.dumps(content) + "\n")
            self._pipe(self.process.stdin).flush()
            text = self._pipe(self.process.stdout).readline()
        except BrokenPipeError:
            text = ""
        answer: dict[str, Any] = json.loads(text) if text else {"error": "its process ended"}
        if "error" in answer:
            raise JobError(f"llama.cpp: {answer['error']}.")
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both pipes are asked for"
        return pipe


@contextmanager
def llama(setting: Setting, gguf: Path, slots: int, length: int) -> Iterator[LlamaWorker]:
    """A worker that has loaded the weights, with this process's number of threads. Raises JobError when it cannot."""
    command = [setting.config.llama_python, str(Path(llama_worker.__file__))]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise JobError(f"llama.cpp: {error.strerror}: {setting.config.llama_python}.") from error
    with process:
        worker = LlamaWorker(process)
        try:
            worker.ask({"gguf": str(gguf), "threads": torch.get_num_threads(), "slots": slots, "length": length})
            yield worker
        finally:
            with suppress(BrokenPipeError):  # it ended before it had read everything
                worker._pipe(process.stdin).close()
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass
class LlamaContestant:
    """Requests through the worker, `slots` at a time."""

    worker: LlamaWorker
    requests: Sequence[GenerationRequest]
    how: str
    slots: int
    answers: Answers = ()

    def run(self) -> None:
        job = {
            "how": self.how,
            "slots": self.slots,
            "prompts": [request.prompt_ids for request in self.requests],
            "max_tokens": [request.max_tokens for request in self.requests],
            "stop": sorted(self.requests[0].stop_token_ids),
        }
        self.answers = [tuple(ids) for ids in self.worker.ask(job)["answers"]]


def find_gguf(setting: Setting) -> Path:
    """--gguf, or the file of the demo's package. Raises JobError where it is absent or of another model."""
    if setting.config.gguf is not None:
        return Path(setting.config.gguf)
    if setting.config.width is not None:
        raise JobError("llama.cpp: the random Llama of --width has no GGUF.")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise JobError(f"llama.cpp: no weights: the package {PACKAGE} is not installed, and --gguf names none.")
    return Path(spec.origin).parent / GGUF


def measure_rivals(setting: Setting) -> PartResult:
    """One at a time and `batch` at a time."""
    levels = sorted({1, setting.config.batch})
    counts = {
        n: setting.config.tasks if n == 1 else max(setting.config.tasks, n * setting.config.per_slot) for n in levels
    }
    asked = setting.requests(AR, max(counts.values()))
    length = max(len(request.prompt_ids) + request.max_tokens for request in asked)
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    try:
        gguf = find_gguf(setting)
        with llama(setting, gguf, max(levels), length) as worker:
            for level in levels:
                found = _measure(setting, worker, level, counts[level], gguf)
                lines += found.lines
                ratios |= found.ratios
    except JobError as error:
        lines.append({"part": "rivals", "decoder": "llama.cpp", "reason": str(error)})
    return PartResult(lines, ratios)


def _measure(setting: Setting, worker: LlamaWorker, level: int, count: int, gguf: Path) -> PartResult:
    asked, blocks = setting.requests(AR, count), setting.requests(setting.blocks, count)
    engine = setting.engine(asked, level)
    rivals: dict[str, Contestant] = {SEQUENCES: LlamaContestant(worker, asked, "sequences", level)}
    if level == 1:
        rivals[GENERATE] = LlamaContestant(worker, asked, "generate", level)
    contestants: dict[str, Contestant] = {
        AR_NAME: EngineContestant(engine, asked),
        BLOCKS: EngineContestant(engine, blocks),
        **rivals,
    }
    times = compete(f"rivals, {level} at a time", contestants, setting)
    questions = setting.questions(count)
    lines = []
    for name, contestant in contestants.items():
        right = exact_match(contestant.answers, questions, setting.backbone) if setting.adapted else None
        ours = setting.config.dtype if setting.config.weights == "model" else setting.config.weights
        weights = f"GGUF {weight_format(gguf)}" if name in rivals else ours
        lines.append({**line("rivals", level, name, contestants, times), "exact match": right, "weights": weights})
    ratios = {
        f"{ours} over {rival}, batch {level}": over(ours, rival, contestants, times)
        for ours in (AR_NAME, BLOCKS)
        for rival in rivals
    }
    return PartResult(lines, ratios)


def weight_format(gguf: Path) -> str:
    """As such files are named: `Model.Q4_1.gguf`."""
    return gguf.stem.rpartition(".")[2] or gguf.name
