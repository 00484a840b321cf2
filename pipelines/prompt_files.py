"""The two files of a job that answers prompts: the prompts it reads, and the journal of answers it can go on with.

Prompts are JSON lines (DESIGN "Prompts"). The journal gathers answers as they come, one line each, flushed; at the end
they are put into the prompts' order. A line torn by a kill is cut off when the journal is opened again.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import fsspec

from actors.answers import Answer, Prompt
from model.errors import UserError
from pipelines.jobkit import OutputFile

MAX_LINE_BYTES = 16 * 2**20


# ------------------------------------------------------------------------------------------------- prompts
def read_prompts(source: str) -> Iterator[Prompt]:
    """Every line that is not blank, in order; a line that is no prompt carries its error. Raises UserError: no file."""
    try:
        with fsspec.open(source, "rb", compression="infer") as file:
            for index, line in enumerate(file):
                if line.strip():
                    yield _prompt_of(index, line)
    except FileNotFoundError as error:
        raise UserError(f"--prompts {source}: there is no such file.") from error
    except IsADirectoryError as error:
        raise UserError(f"--prompts {source} is a folder: give a JSONL file.") from error
    except (ValueError, ImportError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"--prompts {source} cannot be read: {error}") from error


def _prompt_of(index: int, line: bytes) -> Prompt:
    default_id = str(index)
    if len(line) > MAX_LINE_BYTES:  # as over HTTP: tokenizing it would take minutes, to be refused after all
        return Prompt(index, default_id, {}, f"line {index} is larger than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line.decode("utf-8-sig" if index == 0 else "utf-8"))
    except RecursionError:
        return Prompt(index, default_id, {}, f"line {index}: the JSON is nested too deeply")
    except ValueError as error:
        return Prompt(index, default_id, {}, f"line {index} is not a JSON object: {error}")
    if not isinstance(fields, dict):
        return Prompt(index, default_id, {}, f"line {index} is not a JSON object but {type(fields).__name__}")
    given = fields.pop("id", None)
    if given is None:
        return Prompt(index, default_id, fields)
    if isinstance(given, int) and not isinstance(given, bool):
        return Prompt(index, str(given), fields)
    if not isinstance(given, str):
        return Prompt(index, default_id, {}, f"line {index}: id must be a string, not {type(given).__name__}")
    if given != given.encode("utf-8", "replace").decode("utf-8"):
        return Prompt(index, default_id, {}, f"line {index}: id holds half of a surrogate pair, which is no text")
    return Prompt(index, given, fields)


def prompt_ids(source: str) -> list[str]:
    """The ids of all prompts, in order. Raises UserError for a duplicate, or where there is no prompt at all."""
    first_line: dict[str, int] = {}
    for prompt in read_prompts(source):
        if prompt.id in first_line:
            lines = f"lines {first_line[prompt.id]} and {prompt.index}"
            raise UserError(f"{source}: the id {prompt.id!r} stands on {lines} (counted from 0): ids must differ.")
        first_line[prompt.id] = prompt.index
    if not first_line:
        raise UserError(f"{source} holds no prompt: give one JSON object a line.")
    return list(first_line)


# ------------------------------------------------------------------------------------------------- answers
class Journal:
    """Answers as they come, kept across runs in the output's partial file; on a remote store, copied there at the end.

    `done`: the id of each answer in the file, with its place (offset, length) in bytes. An answer that is an error is
    not kept by a later run: its prompt is tried again.
    """

    def __init__(self, output: OutputFile) -> None:
        self._output = output
        self.done: dict[str, tuple[int, int]] = {}
        self.errors: set[str] = set()

    def __enter__(self) -> Self:
        self._scratch = None if self._output.local else tempfile.TemporaryDirectory(prefix="blockcast-")
        self._path = Path(self._scratch.name) / "answers" if self._scratch else self._output.partial_path
        if self._scratch and self._output.filesystem.exists(self._output.partial):
            self._output.filesystem.get_file(self._output.partial, str(self._path))
        self._load()
        self._file = self._path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._scratch:
            if kind is not None:
                self._output.filesystem.put_file(str(self._path), self._output.partial)
            self._scratch.cleanup()

    def _load(self) -> None:
        if not self._path.exists():
            return
        offset = 0
        with self._path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                answer = json.loads(line)
                if "error" not in answer:
                    self.done[answer["id"]] = (offset, len(line))
                offset += len(line)
            file.truncate(offset)

    def add(self, answer: Answer) -> None:
        """Append one answer and flush it."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        self.done[answer["id"]] = (self._file.tell(), len(line))
        if "error" in answer:
            self.errors.add(answer["id"])
        self._file.write(line)
        self._file.flush()

    def publish(self, ids: Iterable[str]) -> None:
        """Put the answers into the order of `ids` and give the file its name."""
        ordered = self._path.with_name(f"{self._path.name}.ordered")
        with self._path.open("rb") as source, ordered.open("wb") as target:
            for prompt_id in ids:
                offset, length = self.done[prompt_id]
                source.seek(offset)
                target.write(source.read(length))
            target.flush()
            os.fsync(target.fileno())
        os.replace(ordered, self._path)
        self._output.publish(None if self._output.local else self._path.read_bytes())

    def total(self, ids: Iterable[str]) -> dict[str, Any]:
        """Sums over all answers of the file: tokens and forwards."""
        sums = {"prompt_tokens": 0, "completion_tokens": 0, "denoise": 0, "commit": 0}
        with self._path.open("rb") as file:
            for prompt_id in ids:
                offset, length = self.done[prompt_id]
                file.seek(offset)
                answer = json.loads(file.read(length))
                if "error" in answer:
                    continue
                sums["prompt_tokens"] += answer["usage"]["prompt_tokens"]
                sums["completion_tokens"] += answer["usage"]["completion_tokens"]
                sums["denoise"] += answer["diffusion"]["forwards"]["denoise"]
                sums["commit"] += answer["diffusion"]["forwards"]["commit"]
        return sums
