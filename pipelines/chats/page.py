"""The page of report.html: what was read, file by file, and some documents with what the model learns coloured.

One page without scripts or outside parts: the picture of the lengths lies in it. Everything that comes from the data is
escaped. The page depends on the input alone, like the rows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipelines.chats.documents import read_documents
from pipelines.chats.rows import IGNORED

FILES = 12  # files of which examples are shown
TOKENS = 1500  # of an example that are shown

HEAD = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Prepared chats</title>'
STYLE = """
:root { color-scheme: light dark; --learnt: #b7e4c7; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --learnt: #1b5e3b; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { border: 1px solid var(--line); padding: .2rem .6rem; }
td { text-align: right; } td:first-child, th { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; background: #fff; } mark { background: var(--learnt); color: inherit; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .6rem; }
"""


@dataclass(frozen=True)
class Example:
    """A document. file: where it comes from. runs: its text in stretches that are learnt or not. length in tokens."""

    file: str
    runs: tuple[tuple[str, bool], ...]
    length: int
    shown: int


def choose_examples(lengths: np.ndarray) -> list[int]:
    """The first document, one of median length and the longest, by index."""
    if not len(lengths):
        return []
    order = np.argsort(lengths, kind="stable")
    return sorted({0, int(order[len(order) // 2]), int(order[-1])})


def read_examples(tokenizer: PreTrainedTokenizerBase, file: str, place: str, chosen: np.ndarray) -> Iterator[Example]:
    """The documents with the chosen indices in a documents file. file: where they come from."""
    for input_ids, labels in read_documents(place, chosen):
        shown = input_ids[:TOKENS]
        yield Example(file, tuple(_runs(tokenizer, shown, labels[:TOKENS] != IGNORED)), len(input_ids), len(shown))


def _runs(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, learnt: np.ndarray) -> Iterator[tuple[str, bool]]:
    """The text cut where supervision begins or ends; a run is what its tokens add to the text before."""
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(ids)]
    before = ""
    for start, end in pairwise(edges):
        text = _decoded(tokenizer, ids[:end])
        yield (
            (text[len(before) :] if text.startswith(before) else _decoded(tokenizer, ids[start:end])),
            bool(learnt[start]),
        )
        before = text


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


# The page -------------------------------------------------------------------------------------------------------------


def page(stats: Mapping[str, Any], examples: Sequence[Example], picture: bytes) -> str:
    """The HTML page. picture: the PNG of the lengths."""
    parts = [
        "<h1>Prepared chats</h1>",
        f"<p>{escape(_summary(stats))}</p>",
        _files(stats["files"]),
        _mixture(stats.get("mixture", [])),
        _rejected(stats["rejected_by_reason"]),
        f'<p><img alt="Lengths of documents" src="data:image/png;base64,{base64.b64encode(picture).decode()}"></p>',
        "<h2>Examples</h2><p>As the model sees them. <mark>Coloured</mark>: what it learns to write.</p>",
        *map(_example, examples),
    ]
    if len(stats["files"]) > FILES:
        parts.append(f"<p>Examples of the first {FILES} of {len(stats['files'])} files.</p>")
    body = "\n".join(filter(None, parts))
    return f"{HEAD}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"


def _summary(stats: Mapping[str, Any]) -> str:
    return (
        f"{stats['documents']:,} documents with {stats['turns']:,} turns; {stats['tokens']:,} tokens in "
        f"{stats['rows']:,} rows of {stats['context_length']:,}: {stats['fill']:.2%} full with whole blocks of "
        f"{stats['block_size']}, {stats['token_fill']:.2%} real tokens; {stats['supervised_share']:.1%} of the tokens "
        f"are supervised. Held out: {stats['held_out']['documents']:,} documents."
    )


def _files(files: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("format", "lines", "documents", "turns", "pieces", "tokens", "supervised_share", "rejected")
    rows = [[uri, *(figures[name] for name in columns), *figures["length"].values()] for uri, figures in files.items()]
    return _table(["file", *columns, "median length", "95% up to", "longest"], rows)


def _mixture(portions: Sequence[Mapping[str, Any]]) -> str:
    columns = ("weight", "share", "tokens", "documents", "passes")
    rows = [[portion["source"], *(portion[name] for name in columns)] for portion in portions]
    return "<h2>Mixture</h2>" + _table(["source", *columns], rows) if rows else ""


def _rejected(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return "<p>No line was rejected.</p>"
    rows = [[reason, count] for reason, count in reasons.items()]
    return "<h2>Rejected lines</h2>" + _table(["reason", "lines"], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def _example(example: Example) -> str:
    runs = "".join(f"<mark>{escape(text)}</mark>" if learnt else escape(text) for text, learnt in example.runs)
    more = f" … {example.length - example.shown:,} more tokens" if example.shown < example.length else ""
    return f"<h3>{escape(example.file)}, {example.length:,} tokens</h3><pre>{runs}{more}</pre>"
