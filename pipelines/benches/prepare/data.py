"""The same chats for every form: JSONL of messages, one file a word of --data, and the tokenizer with one template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.backbone import load_tokenizer
from model.errors import UserError
from pipelines.benches.prepare.config import PrepareBenchConfig
from pipelines.benches.prepare.reference import MARKED
from pipelines.benches.result import model_of
from pipelines.chats.lines import format_of, read_shard
from pipelines.chats.records import Chat, Message, parse
from pipelines.chats.refusal import Rejected
from pipelines.chats.rows import RowFormat
from pipelines.chats.sources import InputFile, Shard, cut, find_files
from pipelines.chats.vocabulary import model_folder, row_format
from pipelines.tasks import generate

WHOLE = 1 << 62
LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class Setting:
    """tokenizer: a folder that both sides load, its template marks what the assistant wrote. files: chats by name."""

    tokenizer: Path
    name: str
    form: RowFormat
    files: dict[str, Path]


def make_setting(config: PrepareBenchConfig, folder: Path) -> Setting:
    """Write the chats and the tokenizer into `folder`. Raises UserError where --data holds no chat."""
    source, name = model_of(config)
    pack = config.pack
    form, _ = row_format(source, block_size=pack.block_size, context_length=pack.context_length)
    tokenizer = load_tokenizer(model_folder(source))
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder / "tokenizer")
    return Setting(folder / "tokenizer", name, form, _files(config, folder))


def _files(config: PrepareBenchConfig, folder: Path) -> dict[str, Path]:
    if not config.data:
        tasks = (task.chat()["messages"] for task in generate("train", config.tasks, config.seed))
        return {"tasks": _written(folder / "tasks.jsonl", tasks)}
    files: dict[str, Path] = {}
    for number, word in enumerate(config.data):
        name = Path(word.rstrip("/")).name.partition(".")[0]
        path = folder / f"{number}-{name}.jsonl"
        files[name if name not in files else f"{name} {number}"] = _written(path, _messages(find_files([word])))
        if not path.stat().st_size:
            raise UserError(f"--data {word} holds no chat to measure with.")
    return files


def _messages(files: list[InputFile]) -> Iterator[list[Message]]:
    """The chats in files, whatever their format; what cannot be read is left out."""
    for file in files:
        found = format_of(file, LINE_BYTES)
        for shard in _shards(file) if found else ():
            for line in read_shard(shard, LINE_BYTES):
                try:
                    document = parse(line.value, found or "")
                except Rejected:
                    continue
                if isinstance(document, Chat) and not document.tools:
                    yield [{"role": turn["role"], "content": turn["content"]} for turn in document.messages]


def _shards(file: InputFile) -> list[Shard]:
    return cut([file], WHOLE)


def _written(path: Path, chats: Iterator[list[Message]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats)
    return path


def repeated(files: dict[str, Path], folder: Path, size: int) -> Path:
    """A file of at least `size` bytes: the chats of all files, over and over."""
    path = folder / f"{size}.jsonl"
    content = [source.read_bytes() for source in files.values()]
    with path.open("wb") as out:
        while out.tell() < size:
            for one in content:
                out.write(one)
    return path
